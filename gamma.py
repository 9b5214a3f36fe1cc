"""How many tokens to draft: γ from measured cost and measured acceptance.

If each drafted token is accepted with probability α, independently, a round yields 1 + α + … + α^γ tokens: the
accepted drafts, and one token of the target. If a drafted token costs c plain passes, and a pass over γ + 1 tokens w:

    speed-up = (1 − α^(γ+1)) / (1 − α) / (w + γ c)                          (Leviathan et al. 2023, 3.3, where w = 1)

`Auto` takes the γ of the best speed-up, a mean over the texts decoded together, or 0 if no speed-up is above 1.05 (some
bookkeeping is not measured). While γ is 0, a trial drafts one token now and then, in a sixtieth of the time. γ depends
on past rounds and the clock, never on its own round's draws: the text's law stays, but a seed may give another text.
Not covered: acceptance that depends on neighbours; in a batch, a γ for each text.
"""
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a round yields on average, with γ drafted and each accepted with probability α."""
    return gamma + 1.0 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speed_up(alpha: float, gamma: int, c: float, w: float = 1.0) -> float:
    """The speed-up over plain decoding, if a drafted token costs c plain passes, and a pass over γ + 1 tokens w."""
    return expected_tokens(alpha, gamma) / (w + gamma * c)


class Measured:
    """The median of the last 9 times, without the very first, which warms caches and builds kernels."""

    def __init__(self) -> None:
        self.times = list[float]()                      # the first, and the last 9
        self.seconds: float | None = None               # the median; before it None, or a guess

    def add(self, seconds: float) -> None:
        self.times = [*self.times[:1], *self.times[1:][-8:], seconds]
        self.seconds = median(self.times[1:]) if len(self.times) > 1 else self.seconds


class Costs:
    """Measured seconds: of drafting a token; of a pass of the target, by its number of tokens."""

    def __init__(self) -> None:
        self.draft, self.passes = Measured(), defaultdict[int, Measured](Measured)          # of a token; by tokens
        self.known: list[tuple[int, float]] = []        # (tokens of a pass, seconds) made to rise with tokens
        self.trial = 0.0                                # what the last round with drafts took beyond a plain one

    def saw_draft(self, steps: int, seconds: float) -> None:
        if steps:
            self.draft.add(seconds / steps)

    def saw_pass(self, tokens: int, seconds: float) -> None:
        """Record a pass of rounds only, without prompts. tokens: all in the pass."""
        self.passes[tokens].add(seconds)
        self.known, most = [], float("inf")
        for n in sorted(self.passes, reverse=True):     # a narrower pass costs no more than a wider one
            if own := self.passes[n].seconds:
                self.known.insert(0, (n, most := min(most, own)))

    def plain(self, rows: int = 1) -> float | None:
        """Seconds of a pass over one token of each of `rows` texts; None until a pass as small was measured."""
        return self.verifying(rows) if self.known and self.known[0][0] <= rows else None

    def drafting(self) -> float:
        """Seconds to draft a token. Before the first measurement a guess, or 0, so that drafts are tried."""
        return self.draft.seconds or 0.0

    def verifying(self, tokens: int) -> float:
        """Seconds of a pass: interpolated between measured numbers of tokens, beyond them as the nearest; 0 if none."""
        if not self.known:
            return 0.0
        at = bisect_left(self.known, (tokens,))         # the first width ≥ tokens
        (n, low), (m, high) = self.known[max(0, at - 1)], self.known[min(at, len(self.known) - 1)]
        return high - (m - tokens) / max(1, m - n) * (high - low)


def mean_gains(costs: Costs, alphas: Sequence[float], most: int) -> list[float]:
    """The mean speed-up of texts decoded together, for γ = 0 to `most`; empty until plain decoding is measured."""
    plain = costs.plain(len(alphas))
    widths = [costs.verifying(len(alphas) * (1 + gamma)) / plain for gamma in range(most + 1)] if plain else []
    return [fmean(speed_up(alpha, gamma, costs.drafting() / plain, w) for alpha in alphas)
            for gamma, w in enumerate(widths)]


class Auto:
    """The γ of one text, round by round."""

    def __init__(self, costs: Costs, alpha: float = 0.7, weight: float = 3.0):
        self.costs, self.alpha, self.weight = costs, alpha, weight      # alpha: mean over `weight` drafts
        self.largest, self.idle = 0, 0.0                # γ tried so far; seconds without drafts

    def choose(self, most: int, gains: Sequence[float] | None = None) -> int:
        """γ for the next round, at most `most`. gains: the `mean_gains` of the batch; None: the text is alone."""
        most = min(most, max(1, 2 * self.largest))      # at most twice the largest γ so far
        gains = (mean_gains(self.costs, (self.alpha,), most) if gains is None else gains)[:most + 1]
        best = max(range(len(gains)), key=gains.__getitem__, default=0)
        if not gains or gains[best] > 1.05:             # no gains: first measure plain decoding
            return best
        return int(most > 0 and self.idle >= 60 * max(self.costs.trial, self.costs.drafting()))

    def saw(self, gamma: int, accepted: int, seconds: float, rows: int = 1) -> None:
        """Learn from a round of `rows` texts: its seconds, and how many of this text's γ drafts were accepted."""
        examined = min(accepted + 1, gamma)             # none beyond the first rejection
        old = 0.98 ** examined * self.weight            # older drafts count less
        self.alpha, self.weight = (old * self.alpha + accepted) / (old + examined), old + examined
        self.largest, self.idle = max(self.largest, gamma), 0.0 if gamma else self.idle + seconds
        if gamma:
            self.costs.trial = max(0.0, seconds - self.costs.verifying(rows))


def main() -> None:
    print("α, and the speed-up for γ = 0 to 8 where c = 0.1 and w = 1")
    for alpha in (0.05, 0.3, 0.5, 0.7, 0.8, 0.9):
        gains = [speed_up(alpha, gamma, c=0.1) for gamma in range(9)]
        print(f"{alpha:4}", *(f"{gain:6.2f}" for gain in gains), f"   the best is γ = {gains.index(max(gains))}")


if __name__ == "__main__":
    main()
