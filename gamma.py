"""How many tokens to draft: γ, chosen from measured times and measured acceptance.

If each drafted token is accepted with probability α, independently, a round yields
1 + α + … + α^γ tokens: the accepted drafts and one token from the target. If a drafted token costs
c plain passes, and the target's pass over γ + 1 tokens costs w plain passes, then

    speed-up = (1 − α^(γ+1)) / (1 − α) / (w + γ c)         (Leviathan et al. 2023, 3.3, where w = 1)

`AutoGamma` takes the γ with the best speed-up, or 0. The denominator is the time of a whole round
divided by the time of a plain one. It is measured by these rules:

  - Real rounds are timed: PLAIN plain ones, then a few with TRIAL drafts, and then every round.
    Steps that read a prompt or record a CUDA graph are not timed.
  - The time of a round is the lower quartile of at least MEASURED rounds (with 2 or 3 rounds, the
    shortest). So a slow first round or an interruption does not distort it.
  - For other γ, up to twice the largest one measured, the time is taken from a straight line fitted
    to the measured times (without γ = 0, if two others are known). It is never below the time of a
    plain round.
  - α is a moving average over all requests. So all requests have the same γ, and a new request
    starts with the acceptance of earlier ones.
  - While γ is 0, drafts are tried again after PATIENCE · cost plain rounds, where a round with
    drafts costs as much as `cost` plain ones. While γ is above 0, a plain round is run after
    PATIENCE rounds with drafts. So these tests take less than 1 % of the time.

γ depends on past rounds and the clock, but never on the draws of its own round. So the distribution
of outputs is unchanged, but the same seed may give a different output.
Not covered: a γ for each request of a batch; acceptance that depends on the position, as in a block
(speculative.py), where the first j drafts are accepted with probability E w_j, not α^j.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import linear_regression

from request import Request, Speculation

TRIAL = 3  # γ of the first rounds with drafts
MAX_GAMMA = 16
WINDOW = 100  # how many drafts the acceptance is averaged over
PATIENCE = 128  # rounds before the alternative that seems worse is tried again
MEASURED = 2  # the fewest rounds needed for a measured time
PLAIN = 2  # plain rounds before the first one with drafts


def expected_tokens(alpha: float, gamma: int) -> float:
    """The mean number of tokens from a round of γ drafts, if each draft is accepted with
    probability α."""
    if alpha >= 1:
        return gamma + 1.0
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


class AutoGamma:
    """The γ that all requests of a batch share."""

    def __init__(self) -> None:
        self.alpha = 0.7
        self.weight = 5.0  # how many drafts alpha is averaged over
        self.num_plain = 0  # plain rounds since the last draft
        self.num_drafting = 0  # rounds with drafts since the last plain one
        # Batch sizes with the same bit_length (4 to 7, say) share these: the best γ, with the time
        # of its round divided by that of a plain one, and the seconds of the last rounds of each γ.
        self.best: dict[int, tuple[int, float]] = {}
        self.seconds = defaultdict[tuple[int, int], deque[float]](lambda: deque(maxlen=9))

    def round_seconds(self, batch_size: int, gamma: int) -> float | None:
        """The lower quartile of the times of such rounds; None if there were too few."""
        times = self.seconds.get((batch_size.bit_length(), gamma), ())
        if len(times) < MEASURED:
            return None
        return sorted(times)[len(times) // 4]

    def measured(self, batch_size: int) -> dict[int, float]:
        """γ -> seconds of a round, for each γ that was timed often enough."""
        measured = {}
        for gamma in range(MAX_GAMMA + 1):
            seconds = self.round_seconds(batch_size, gamma)
            if seconds is not None:
                measured[gamma] = seconds
        return measured

    def costs(self, measured: dict[int, float]) -> list[float]:
        """The time of a round divided by that of a plain one, for γ = 1, 2, …, MAX_GAMMA."""
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
        """γ for the next round of a batch of this size. Changes nothing."""
        best = self.best.get(batch_size.bit_length())
        if best is None:  # nothing is known yet: measure plain rounds, then try drafts
            plain = self.seconds.get((batch_size.bit_length(), 0), ())
            return TRIAL if len(plain) >= PLAIN else 0
        gamma, cost = best
        if expected_tokens(self.alpha, gamma) > cost:
            plain_is_due = self.num_drafting >= PATIENCE  # to measure plain rounds again
            return 0 if plain_is_due else gamma
        retry_is_due = self.num_plain >= PATIENCE * cost
        return gamma if retry_is_due else 0

    def observe(
        self, num_drafts: Sequence[int], num_accepted: Sequence[int], seconds: float
    ) -> None:
        """Learn from a round: how many drafts each request had and how many were accepted, and the
        time that the round took."""
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
            examined = min(accepted + 1, drafted)  # up to the first rejection
            if examined:
                self.weight = max(examined, min(self.weight + examined, WINDOW))
                self.alpha += (accepted - examined * self.alpha) / self.weight
        is_trial = batch_size.bit_length() not in self.best
        if is_trial or (self.num_plain + self.num_drafting) % 8 == 0:  # one changes little
            self._choose_best(batch_size)

    def report(self, request: Request) -> Speculation | None:
        """A request's acceptance, its tokens per round, and its speed-up over plain decoding. The
        last two do not count the first round, which reads the end of the prompt. The speed-up
        compares the times of the request's rounds with those of plain rounds; None if those are
        unknown."""
        rounds = request.rounds[1:]
        if not rounds:
            return None
        num_tokens = sum(stats.num_accepted + 1 for stats in rounds)
        seconds = 0.0
        plain_seconds = 0.0  # the time of plain decoding for the same tokens
        num_drafts = 0  # in rounds with known times
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
        """Store the γ with the largest gain, once the times of plain rounds and of another γ are
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
    """Demonstration: the best γ for each acceptance."""
    print("α, and the speed-up for γ = 0 to 8 where c = 0.1 and w = 1")
    for alpha in (0.05, 0.3, 0.5, 0.7, 0.8, 0.9):
        gains = [expected_tokens(alpha, gamma) / (1 + gamma * 0.1) for gamma in range(9)]
        columns = [f"{gain:6.2f}" for gain in gains]
        print(f"{alpha:4}", *columns, f"   the best is γ = {gains.index(max(gains))}")


if __name__ == "__main__":
    main()
