"""How many tokens to draft: k, chosen for each request and round.

Let P_j be the probability that the first j drafts of a round are all accepted. Then k drafts yield
1 + P_1 + … + P_k tokens: the accepted drafts and one token from the target. If the round takes
cost(k) times as long as a plain one, then

    speed-up(k) = (1 + P_1 + … + P_k) / cost(k)        cost(0) = 1

`AutoGamma` takes the k with the best speed-up, or 0. The drafter says what P is. A model or a head
says P_j = α^j, where α is its `Acceptance`; with cost(k) = w + k c this is the formula of
Leviathan et al. 2023 (3.3, where w = 1). A look-up knows more about each draft (lookup.py).

The cost is that of a whole round, the drafter's work included. It is measured by these rules:

  - Real rounds are timed: PLAIN plain ones, then a few with TRIAL drafts, and then every round.
    Steps that read a prompt or record a CUDA graph are not timed. A GPU may run several plain
    rounds in one step; each counts with its share of the time.
  - The time of a round is the lower quartile of at least MEASURED rounds (with 2 or 3 rounds, the
    shortest). So a slow first round or an interruption does not distort it.
  - For other k, up to twice the largest one measured, the time is taken from a straight line fitted
    to the measured times (without k = 0, if two others are known). It is never below the time of a
    plain round.
  - α is a moving average over all requests. So a new request starts with the acceptance of earlier
    ones.
  - While drafts are not worth their cost, they are tried again after PATIENCE · cost plain rounds.
    While they are worth it, a plain round is run after PATIENCE rounds with drafts. So these tests
    take about 1 % of the time.

In a batch, the cost of k is that of a round whose requests have k drafts on average. So all
requests with the same chances have the same k.

k depends on past rounds, the clock and what is known before a draft is drawn, but never on the
draws of its own round. So the distribution of outputs is unchanged, but the same seed may give a
different output.
Not covered:
  - Stopping a chain before draft j by the shape of q_j. That would be exact (test_distribution.py).
    But q_j must be computed first, and C and CUDA graphs draft in one call. For tiny's drafts a
    learnt threshold changed the speed by −14 to +4 %, against the best fixed k, and the best
    threshold in hindsight by 0 to +4.5 %.
  - Acceptance that depends on the position, as in a block (speculative.py), where the first j
    drafts are accepted with probability E w_j, not α^j.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import linear_regression

from request import Request, RoundStats, Speculation

TRIAL = 3  # drafts of the first rounds that have any
MAX_GAMMA = 16
WINDOW = 100  # how many drafts the acceptance is averaged over
PATIENCE = 128  # rounds before the alternative that seems worse is tried again
MEASURED = 2  # the fewest rounds needed for a measured time
PLAIN = 2  # plain rounds before the first one with drafts


def speed_ups(chances: Sequence[float], costs: Sequence[float]) -> list[float]:
    """The speed-up of k = 0, 1, 2, … drafts. chances: P_1, P_2, …; costs: those of rounds with
    1, 2, … drafts, in plain rounds."""
    tokens = 1.0
    gains = [1.0]
    for chance, cost in zip(chances, costs):
        tokens += chance
        gains.append(tokens / cost)
    return gains


class Acceptance:
    """α: the share of a drafter's examined drafts that were accepted, as a moving average."""

    def __init__(self) -> None:
        self.alpha = 0.7
        self.weight = 5.0  # how many drafts alpha is averaged over

    def observe(self, stats: RoundStats) -> None:
        """Learn from a round of one request. Drafts are examined up to the first rejection."""
        examined = min(stats.num_accepted + 1, stats.num_drafts)
        if examined:
            self.weight = max(examined, min(self.weight + examined, WINDOW))
            self.alpha += (stats.num_accepted - examined * self.alpha) / self.weight

    def chances(self) -> list[float]:
        """P_1, P_2, …, for up to MAX_GAMMA drafts."""
        return [self.alpha**j for j in range(1, MAX_GAMMA + 1)]


class AutoGamma:
    """What rounds cost, and how many drafts are worth it."""

    def __init__(self) -> None:
        self.num_plain = 0  # plain rounds since the last draft
        self.num_drafting = 0  # rounds with drafts since the last plain one
        # Batch sizes with the same bit_length (4 to 7, say) share these: the costs of rounds with
        # 1, 2, … drafts, and the seconds of the last rounds of each number of drafts.
        self.costs: dict[int, list[float]] = {}
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

    def costs_of(self, measured: dict[int, float]) -> list[float]:
        """The time of a round divided by that of a plain one, for 1, 2, … drafts."""
        plain = measured[0]
        points = dict(measured)
        if len(points) > 2:  # a pass over several tokens may have a cost that a plain one lacks
            del points[0]
        slope, intercept = linear_regression(list(points), list(points.values()))
        costs = []
        for gamma in range(1, min(MAX_GAMMA, 2 * max(measured)) + 1):
            on_line = max(plain, intercept + slope * gamma)  # never less than a plain round
            costs.append(measured.get(gamma, on_line) / plain)
        return costs

    def choose(self, batch_size: int, chances: Sequence[float]) -> int:
        """The number of drafts for a request in the next round of a batch of this size. chances:
        P_1, P_2, …, as estimated by its drafter. Changes nothing."""
        if not chances:
            return 0
        costs = self.costs.get(batch_size.bit_length())
        if costs is None:  # nothing is known yet: measure plain rounds, then try drafts
            plain = self.seconds.get((batch_size.bit_length(), 0), ())
            return min(TRIAL, len(chances)) if len(plain) >= PLAIN else 0
        gains = speed_ups(chances, costs)
        best = gains.index(max(gains[1:]), 1)  # of those with drafts
        if gains[best] > 1:
            plain_is_due = self.num_drafting >= PATIENCE  # to measure plain rounds again
            return 0 if plain_is_due else best
        retry_is_due = self.num_plain >= PATIENCE * costs[best - 1]
        return best if retry_is_due else 0

    def observe(self, num_drafts: Sequence[int], seconds: float, num_rounds: int = 1) -> None:
        """Learn from a round: how many drafts each request had, and how long the round took. Or
        from several plain ones that ran together, with their mean time."""
        batch_size = len(num_drafts)
        gamma = math.ceil(sum(num_drafts) / batch_size)  # some requests may have had fewer
        self.seconds[batch_size.bit_length(), gamma].append(seconds)
        if gamma:
            self.num_plain = 0
            self.num_drafting += 1
        else:
            self.num_plain += num_rounds
            self.num_drafting = 0
        is_trial = batch_size.bit_length() not in self.costs
        is_eighth = (self.num_plain + self.num_drafting) % 8 < num_rounds
        if is_trial or is_eighth:  # one round changes little
            measured = self.measured(batch_size)
            if 0 in measured and len(measured) > 1:
                self.costs[batch_size.bit_length()] = self.costs_of(measured)

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


def main() -> None:
    """Demonstration: the best γ for each acceptance."""
    print("α, and the speed-up for γ = 0 to 8 where c = 0.1 and w = 1")
    for alpha in (0.05, 0.3, 0.5, 0.7, 0.8, 0.9):
        chances = [alpha**j for j in range(1, 9)]
        gains = speed_ups(chances, [1 + k * 0.1 for k in range(1, 9)])
        columns = [f"{gain:6.2f}" for gain in gains]
        print(f"{alpha:4}", *columns, f"   the best is γ = {gains.index(max(gains))}")


if __name__ == "__main__":
    main()
