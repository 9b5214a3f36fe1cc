"""How many tokens to draft: γ from measured cost and measured acceptance.

If each drafted token is accepted with probability α, independently, a round yields 1 + α + … + α^γ tokens: the
accepted drafts, and one token of the target. If a drafted token costs c plain passes, and a pass over γ + 1 tokens w:

    speed-up = (1 − α^(γ+1)) / (1 − α) / (w + γ c)                          (Leviathan et al. 2023, 3.3, where w = 1)

`Auto` takes the γ of the best speed-up, a mean over the texts decoded together, or 0 if no speed-up is above 1. A size
not measured yet counts as the nearest that was, so a larger γ is tried while it looks better, up to twice the largest
measured. While γ is 0, trials lose a sixtieth of the time. γ depends on past rounds and the clock, never on its own
round's draws: the text's law stays, but a seed may give another text.
Not covered: acceptance that depends on neighbours; in a batch, a γ for each text.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, median


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a round yields on average, with γ drafted and each accepted with probability α."""
    return gamma + 1.0 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speed_up(alpha: float, gamma: int, c: float, w: float = 1.0) -> float:
    """The speed-up over plain decoding, if a drafted token costs c plain passes, and a pass over γ + 1 tokens w."""
    return expected_tokens(alpha, gamma) / (w + gamma * c)


class Times:
    """Seconds by size: medians of the last 9 times, without a size's first, which warms caches and builds kernels."""

    def __init__(self) -> None:
        self.times = defaultdict[int, list[float]](list)  # by size: the first, and the last 9
        self.medians = dict[int, float]()
        self.known: list[tuple[int, float]] = []  # (size, its median), made to rise with size

    def saw(self, size: int, seconds: float) -> None:
        times = self.times[size] = [*self.times[size][:1], *self.times[size][1:][-8:], seconds]
        if len(times) > 1:
            self.medians[size] = median(times[1:])
        sizes = sorted(self.medians)  # a smaller size takes no longer than a larger one
        least = [*accumulate((self.medians[n] for n in reversed(sizes)), min)]
        self.known = [*zip(sizes, reversed(least))]

    def at(self, size: int) -> float:
        """Seconds: interpolated between measured sizes, beyond them as the nearest; 0 if none is known."""
        if not self.known:
            return 0.0
        at = bisect_left(self.known, (size,))  # the first known size ≥ size
        (n, low), (m, high) = self.known[max(0, at - 1)], self.known[min(at, len(self.known) - 1)]
        return high - (m - size) / max(1, m - n) * (high - low)


class Costs:
    """What all texts share: seconds to draft γ tokens, and of a pass of the target by its tokens; a mean acceptance."""

    def __init__(self) -> None:
        self.drafts, self.passes, self.alpha = Times(), Times(), 0.7
        self.drafts.medians[0] = 0.0  # no drafts take no time
        self.trial = 0.0  # what the last round with drafts cost beyond its tokens' worth

    @property
    def largest(self) -> int:
        """The largest γ whose drafting was measured."""
        return self.drafts.known[-1][0] if self.drafts.known else 0

    def plain(self, rows: int = 1) -> float | None:
        """Seconds of a pass over one token of each of `rows` texts; None until a pass as small was measured."""
        return (
            self.passes.at(rows) if self.passes.known and self.passes.known[0][0] <= rows else None
        )

    def drafting(self, gamma: float = 1) -> float:
        """Seconds of a drafted token, where γ are drafted."""
        return self.drafts.at(max(1, gamma)) / max(1, gamma)


def mean_gains(costs: Costs, alphas: Sequence[float], most: int) -> list[float]:
    """The mean speed-up of texts decoded together, for γ = 0 to `most`; empty until plain decoding is measured."""
    plain = costs.plain(len(alphas))
    widths = (
        [costs.passes.at(len(alphas) * (1 + gamma)) / plain for gamma in range(most + 1)]
        if plain
        else []
    )
    return [
        fmean(speed_up(alpha, gamma, costs.drafting(gamma) / plain, w) for alpha in alphas)
        for gamma, w in enumerate(widths)
    ]


class Auto:
    """The γ of one text, round by round."""

    def __init__(self, costs: Costs, weight: float = 10.0):
        self.costs, self.alpha, self.weight = (
            costs,
            costs.alpha,
            weight,
        )  # alpha: mean over `weight` drafts
        self.idle = 0.0  # seconds without drafts

    def choose(self, most: int, gains: Sequence[float] | None = None) -> int:
        """γ for the next round, at most `most`. gains: the `mean_gains` of the batch; None: the text is alone."""
        most = min(most, max(1, 2 * self.costs.largest))  # at most twice the largest γ measured
        gains = (mean_gains(self.costs, (self.alpha,), most) if gains is None else gains)[
            : most + 1
        ]
        best = max(
            range(1, len(gains)), key=gains.__getitem__, default=0
        )  # no gains: first measure plain decoding
        pays = (
            best
            and gains[best] > 1
            or self.idle >= 60 * max(self.costs.trial, self.costs.drafting())
        )
        return best if pays else 0

    def saw(self, gamma: int, accepted: int, seconds: float, rows: int = 1) -> None:
        """Learn from a round of `rows` texts: its seconds, and how many of this text's γ drafts were accepted."""
        if gamma:
            self.costs.trial = max(
                0.0, seconds - expected_tokens(self.alpha, gamma) * self.costs.passes.at(rows)
            )
        examined = min(accepted + 1, gamma)  # none beyond the first rejection
        old = 0.99**examined * self.weight  # older drafts count less
        self.alpha, self.weight = (old * self.alpha + accepted) / (old + examined), old + examined
        self.costs.alpha += (self.alpha - self.costs.alpha) / 10 if examined else 0
        self.idle = 0.0 if gamma else self.idle + seconds


def main() -> None:
    print("α, and the speed-up for γ = 0 to 8 where c = 0.1 and w = 1")
    for alpha in (0.05, 0.3, 0.5, 0.7, 0.8, 0.9):
        gains = [speed_up(alpha, gamma, c=0.1) for gamma in range(9)]
        print(
            f"{alpha:4}",
            *(f"{gain:6.2f}" for gain in gains),
            f"   the best is γ = {gains.index(max(gains))}",
        )


if __name__ == "__main__":
    main()
