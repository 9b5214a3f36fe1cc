"""How many tokens to draft: γ from measured cost and measured acceptance.

A round drafts γ tokens and verifies them in one pass. If each drafted token is accepted with probability α, whatever came before,
the round yields 1 + α + α² + … + α^γ tokens: the accepted ones are a chain that breaks at the first rejection, and one more
token, the correction or the bonus, always comes. So the round beats plain decoding, one pass a token, by

    speed-up = (1 − α^(γ+1)) / (1 − α) / (w + γ c)

with c the cost of drafting a token and w that of a pass over γ + 1 tokens, both over the cost of a plain pass (Leviathan et al.
2023, section 3.3, where w = 1: on a GPU a pass costs what reading the weights costs). It is not 1 + γ α: α = 0.7 and γ = 5 give
2.9 tokens a round, not 4.5.

`Costs` measures w and c, for all texts together; `Auto` follows the α of one text and takes the γ of the best speed-up, 0 if none
is above 1.05: what nobody measures, the bookkeeping of drafts, must pay too. At 0 nothing is learnt of α any more, so now and then it
tries a single drafted token: as often as keeps what such trials cost below a sixtieth of the time, by what the last one did, of
whichever text. A useless draft is never noticed.

γ may depend on what has happened, on α and on the clock, never on whether to keep a token that was drawn; so the text's law does
not change. But the clock is no part of the seed: with γ chosen here, the same seed need not give the same text.

In a batch a wider pass is one with more tokens of all texts, and who drafts nothing waits for those who do: the texts that are made
together choose one γ, the one with the best mean of their gains.

Not covered: that a token's acceptance depends on its neighbours'; a γ of its own for each text of a batch.
"""
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Any

import torch


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a round yields on average, with γ drafted and each accepted with probability α."""
    return gamma + 1.0 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speed_up(alpha: float, gamma: int, c: float, w: float = 1.0) -> float:
    """Of speculation over plain decoding: a drafted token costs c plain passes, a pass over γ + 1 tokens w of them."""
    return expected_tokens(alpha, gamma) / (w + gamma * c)


Mark = Any                                              # a moment: seconds, or what a GPU notes when it comes to it


def mark(device: torch.device) -> Mark:
    """Now; on a GPU, when it has done what it has been given, for which nobody waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Mark, end: Mark) -> float:
    """Seconds. A GPU must have passed both: whoever asks has waited for something that came after."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


class Measured:
    """`seconds`: the median of the last few times; the first is left out, for it warms caches and builds kernels. Before that a guess may stand there."""

    def __init__(self) -> None:
        self.times: deque[float] = deque(maxlen=9)
        self.seconds: float | None = None
        self.warm = False

    def add(self, seconds: float) -> None:
        if self.warm:
            self.times.append(seconds)
            self.seconds = median(self.times)
        self.warm = True


class Costs:
    """What steps take on this machine, now."""

    def __init__(self) -> None:
        self.draft, self.passes = Measured(), dict[int, Measured]()
        self.known: list[tuple[int, float]] = []                         # tokens of a pass, and seconds: what was measured, made to rise
        self.trial = 0.0                                                 # what the last round with drafts took beyond a plain one

    def saw_draft(self, steps: int, seconds: float) -> None:
        if steps:
            self.draft.add(seconds / steps)

    def saw_pass(self, tokens: int, seconds: float) -> None:
        """A pass of rounds; one that also read prompts is another thing."""
        self.passes.setdefault(tokens, Measured()).add(seconds)
        widest_first = sorted(((n, m.seconds) for n, m in self.passes.items() if m.seconds), reverse=True)
        rising = accumulate(widest_first, lambda wider, own: (own[0], min(wider[1], own[1])))       # a narrower pass costs no more than a wider
        self.known = list(rising)[::-1]

    def plain(self, rows: int = 1) -> float | None:
        """Seconds of a pass over one token of each of `rows` texts; None until one as narrow was measured."""
        return self.verifying(rows) if self.known and self.known[0][0] <= rows else None

    def drafting(self) -> float:
        """Seconds to draft a token; until it was measured, as was guessed, or 0, so that it is."""
        return self.draft.seconds or 0.0

    def verifying(self, tokens: int) -> float:
        """Seconds of a pass over so many tokens: as measured, or between two that were, or what the widest took (0 if none was)."""
        if not self.known:
            return 0.0
        at = bisect_left(self.known, (tokens,))                          # the first that is as wide
        (n, low), (m, high) = self.known[max(0, at - 1)], self.known[min(at, len(self.known) - 1)]
        return high - (m - tokens) / max(1, m - n) * (high - low)


class Together:
    """Texts that are made together, by their α: they share what drafting costs, so one γ is best for all (who drafts nothing waits for those who
    do). What each γ gains is worked out once for all of them, as far as one asks."""

    def __init__(self, costs: Costs, alphas: Sequence[float]):
        self.costs, self.alphas, self.gains = costs, alphas, list[float]()

    def up_to(self, most: int) -> list[float]:
        """The mean of their speed-ups, for γ from 0 to `most` and perhaps beyond; empty while nobody knows what plain decoding costs."""
        rows = len(self.alphas)
        plain = self.costs.plain(rows)
        while plain is not None and len(self.gains) <= most:
            gamma = len(self.gains)
            c, w = self.costs.drafting() / plain, self.costs.verifying(rows * (1 + gamma)) / plain
            self.gains.append(sum(speed_up(alpha, gamma, c, w) for alpha in self.alphas) / rows)
        return self.gains


class Auto:
    """The γ of one text, round by round."""

    def __init__(self, costs: Costs, alpha: float = 0.7, weight: float = 3.0, memory: float = 0.98, patience: float = 60.0):
        self.costs, self.memory, self.patience = costs, memory, patience
        self.accepted, self.examined = alpha * weight, weight            # what is believed before anything is seen
        self.largest, self.idle = 0, 0.0                                 # γ tried so far; seconds without drafts

    @property
    def alpha(self) -> float:
        return self.accepted / self.examined

    def choose(self, most: int, together: Together | None = None) -> int:
        """γ for the next round, at most `most`. together: all texts of it, this one among them; None: it is alone."""
        most = min(most, max(1, 2 * self.largest))                       # one width after the other,
        gains = (together or Together(self.costs, (self.alpha,))).up_to(most)
        if not gains:
            return 0                                                     # and first what plain decoding costs
        best = max(range(most + 1), key=gains.__getitem__)
        if gains[best] > 1.05:
            return best
        return 1 if most and self.idle >= self.patience * max(self.costs.trial, self.costs.drafting()) else 0

    def saw(self, gamma: int, accepted: int, seconds: float, rows: int = 1) -> None:
        """A round went by, of `rows` texts: how many of its γ drafts stood, and what it took, all in all."""
        if gamma == 0:
            self.idle += seconds
            return
        examined = min(accepted + 1, gamma)                              # nobody looked beyond the first that was rejected
        self.accepted = self.memory ** examined * self.accepted + accepted
        self.examined = self.memory ** examined * self.examined + examined
        self.largest, self.idle = max(self.largest, gamma), 0.0
        self.costs.trial = max(0.0, seconds - self.costs.verifying(rows))


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: what the formula says, and a chooser that finds it in simulated rounds.

def main() -> None:
    import random
    print("speed-up by γ, for c = 0.1 and passes that cost the same whatever their width")
    print("    α" + "".join(f"{f'γ = {g}':>8}" for g in range(9)) + "     auto took, on average")
    for alpha in (0.05, 0.3, 0.5, 0.7, 0.8, 0.9):
        costs, taken, coin = Costs(), [], random.Random(0)
        auto = Auto(costs)
        for _ in range(2000):
            gamma = auto.choose(8)
            stood = next((j for j in range(gamma) if coin.random() >= alpha), gamma)
            costs.saw_draft(gamma, 0.1 * gamma)
            costs.saw_pass(1 + gamma, 1.0)
            auto.saw(gamma, stood, 1.0 + 0.1 * gamma)
            taken.append(gamma)
        print(f"{alpha:5.2f}" + "".join(f"{speed_up(alpha, g, 0.1):8.2f}" for g in range(9)) + f"{sum(taken) / len(taken):10.2f}")


if __name__ == "__main__":
    main()
