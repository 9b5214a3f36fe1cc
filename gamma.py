"""How many tokens to draft: γ from measured time and measured acceptance.

If each drafted token is accepted with probability α, independently, a round yields
1 + α + … + α^γ tokens: the accepted drafts, and one token of the target. If a drafted token costs c
plain passes, and the target's pass over γ + 1 tokens costs w of them, then

    speed-up = (1 − α^(γ+1)) / (1 − α) / (w + γ c)         (Leviathan et al. 2023, 3.3, where w = 1)

`AutoGamma` takes the γ with the best speed-up, or 0. The denominator is the time of a whole round
over the time of a plain one, by these rules:

  - Real rounds are measured: PLAIN plain ones, then a few with TRIAL drafts, and then every round.
    Steps that read a prompt are not measured, nor those that record a CUDA graph.
  - A time is the lower quartile of at least MEASURED rounds (the shortest of 2 or 3). So neither a
    first round, which warms up, nor an interruption sways it.
  - A γ that was not measured lies on the line through the measured ones (without γ = 0, if two
    others are known), as far as twice the largest of them, and never costs less than a plain round.
  - α is a moving average over all requests, so all have the same γ, and a new text begins with the
    acceptance of those before it.
  - While γ is 0, drafts are tried again after PATIENCE · cost plain rounds, where a round with
    drafts costs as much as `cost` plain ones. While γ is above 0, a plain round is run after
    PATIENCE rounds with drafts. So tries take less than a hundredth of the time.

γ depends on past rounds and the clock, never on its own round's draws: the distribution of texts
stays, but a seed may give another text.
Not covered: a γ for each text of a batch; acceptance that depends on the position, as it does in a
block (speculative.py), whose first j drafts are accepted with probability E w_j, not α^j.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import linear_regression

from request import Request, Speculation

TRIAL = 3  # drafts of the first rounds with drafts
MAX_GAMMA = 16
WINDOW = 100  # drafts that the acceptance is a mean over
PATIENCE = 128  # rounds before what seems worse is tried again
MEASURED = 2  # rounds that a time is taken from, at least
PLAIN = 2  # rounds without drafts before the first ones with drafts


def expected_tokens(alpha: float, gamma: int) -> float:
    """The tokens that a round of γ drafts yields on average, if each is accepted with probability
    α."""
    if alpha >= 1:
        return gamma + 1.0
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


class AutoGamma:
    """The γ of all requests that are decoded together."""

    def __init__(self) -> None:
        self.alpha = 0.7
        self.weight = 5.0  # drafts that alpha is a mean over
        self.num_plain = 0  # plain rounds since the last draft
        self.num_drafting = 0  # rounds with drafts since the last plain one
        # Batches of like size (4 to 7, say: of one bit_length) share what is known: the best γ with
        # its round's time over a plain one's, and the seconds of the last rounds of each γ.
        self.best: dict[int, tuple[int, float]] = {}
        self.seconds = defaultdict[tuple[int, int], deque[float]](lambda: deque(maxlen=9))

    def round_seconds(self, batch_size: int, gamma: int) -> float | None:
        """The lower quartile of a round's times; None if it was not measured often enough."""
        times = self.seconds.get((batch_size.bit_length(), gamma), ())
        if len(times) < MEASURED:
            return None
        return sorted(times)[len(times) // 4]

    def measured(self, batch_size: int) -> dict[int, float]:
        """γ -> seconds of a round, for each γ that was measured often enough."""
        measured = {}
        for gamma in range(MAX_GAMMA + 1):
            seconds = self.round_seconds(batch_size, gamma)
            if seconds is not None:
                measured[gamma] = seconds
        return measured

    def costs(self, measured: dict[int, float]) -> list[float]:
        """A round's time over a plain one's for γ = 1, 2, …, MAX_GAMMA, from the measured γ."""
        plain = measured[0]
        points = dict(measured)
        if len(points) > 2:  # a pass over several tokens may have a cost that a plain one lacks
            del points[0]
        slope, intercept = linear_regression(list(points), list(points.values()))
        costs = []
        for gamma in range(1, MAX_GAMMA + 1):
            on_line = max(plain, intercept + slope * gamma)  # never less than a plain round
            costs.append(measured.get(gamma, on_line) / plain)
        return costs

    def choose(self, batch_size: int) -> int:
        """γ for the next round of so many requests. This changes nothing."""
        best = self.best.get(batch_size.bit_length())
        if best is None:  # the trial
            plain = self.seconds.get((batch_size.bit_length(), 0), ())
            return TRIAL if len(plain) >= PLAIN else 0
        gamma, cost = best
        if expected_tokens(self.alpha, gamma) > cost:
            plain_is_due = self.num_drafting >= PATIENCE  # to measure it again
            return 0 if plain_is_due else gamma
        retry_is_due = self.num_plain >= PATIENCE * cost
        return gamma if retry_is_due else 0

    def observe(
        self, num_drafts: Sequence[int], num_accepted: Sequence[int], seconds: float
    ) -> None:
        """Learn from a round: each request's drafts, how many of them stand, and the time."""
        batch_size = len(num_drafts)
        gamma = math.ceil(sum(num_drafts) / batch_size)  # some requests may have had fewer
        self.seconds[batch_size.bit_length(), gamma].append(seconds)
        if gamma:
            self.num_plain = 0
            self.num_drafting += 1
        else:
            self.num_plain += 1
            self.num_drafting = 0
        for drafted, accepted in zip(num_drafts, num_accepted):
            examined = min(accepted + 1, drafted)  # none beyond the first rejection
            if examined:
                self.weight = max(examined, min(self.weight + examined, WINDOW))
                self.alpha += (accepted - examined * self.alpha) / self.weight
        is_trial = batch_size.bit_length() not in self.best
        if is_trial or (self.num_plain + self.num_drafting) % 8 == 0:  # one round teaches little
            self._choose_best(batch_size)

    def report(self, request: Request) -> Speculation | None:
        """A text's acceptance; its tokens a round, and its speed-up over plain decoding, by the
        times of its rounds and of plain ones (None: unknown), both without the first round, which
        reads the prompt's end."""
        rounds = request.rounds[1:]
        if not rounds:
            return None
        num_tokens = sum(stats.num_accepted + 1 for stats in rounds)
        seconds = 0.0
        plain_seconds = 0.0  # what plain decoding takes for the same tokens
        num_drafts = 0  # in rounds whose times are known
        for stats in rounds:
            own = self.round_seconds(stats.batch_size, stats.num_drafts)
            plain = self.round_seconds(stats.batch_size, 0)
            if own is not None and plain is not None:
                seconds += own
                plain_seconds += (stats.num_accepted + 1) * plain
                num_drafts += stats.num_drafts
        speed_up = plain_seconds / seconds if num_drafts else None
        return Speculation(request.acceptance, num_tokens / len(rounds), speed_up)

    def _choose_best(self, batch_size: int) -> None:
        """Keep the γ with the largest gain, once the times of plain rounds and of another γ are
        known."""
        if self.round_seconds(batch_size, 0) is None:
            return
        measured = self.measured(batch_size)
        if len(measured) == 1:
            return
        costs = self.costs(measured)
        del costs[2 * max(measured) :]
        gains = [expected_tokens(self.alpha, 1 + i) / cost for i, cost in enumerate(costs)]
        best = gains.index(max(gains))
        self.best[batch_size.bit_length()] = (1 + best, costs[best])


def main() -> None:
    """The demonstration: the best γ for each acceptance."""
    print("α, and the speed-up for γ = 0 to 8 where c = 0.1 and w = 1")
    for alpha in (0.05, 0.3, 0.5, 0.7, 0.8, 0.9):
        gains = [expected_tokens(alpha, gamma) / (1 + gamma * 0.1) for gamma in range(9)]
        columns = [f"{gain:6.2f}" for gain in gains]
        print(f"{alpha:4}", *columns, f"   the best is γ = {gains.index(max(gains))}")


if __name__ == "__main__":
    main()
