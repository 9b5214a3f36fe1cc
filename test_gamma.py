"""Choosing γ: the formula beside a simulation, and a choice that finds what pays."""

import math
import random
from copy import deepcopy

import pytest

import gamma
from gamma import (
    MAX_GAMMA,
    MEASURED,
    PATIENCE,
    PLAIN,
    TRIAL,
    Acceptance,
    AutoGamma,
    speed_ups,
)
from request import RoundStats


def expected_tokens(alpha: float, gamma: int) -> float:
    """Of a round of γ drafts, each accepted with probability α."""
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def test_speed_ups_by_hand():
    assert speed_ups([0.5, 0.25, 0.1], [1.2, 1.4]) == [1.0, 1.5 / 1.2, 1.75 / 1.4]
    assert speed_ups([], [1.2]) == speed_ups([0.9], []) == [1.0]
    alphas = Acceptance().chances()
    for num_drafts, tokens in enumerate(speed_ups(alphas, [1.0] * MAX_GAMMA)):
        assert tokens == pytest.approx(expected_tokens(0.7, num_drafts))


def accepted_drafts(rng: random.Random, alpha: float, gamma: int) -> int:
    """Drafts before the first rejection."""
    count = 0
    while count < gamma and rng.random() < alpha:
        count += 1
    return count


def round_seconds(gamma: int, c: float, w: float) -> float:
    """c: of a draft; w: of a pass over more than one token, in plain passes."""
    return (w if gamma else 1.0) + c * gamma


class Clocked(AutoGamma):
    """With the acceptance of its drafter."""

    def __init__(self):
        super().__init__()
        self.drafter = Acceptance()

    def gamma(self, batch: int) -> int:
        return self.choose(batch, self.drafter.chances())

    def round(self, num_drafts: list[int], num_accepted: list[int], seconds: float) -> None:
        self.observe(num_drafts, seconds)
        for stats in map(RoundStats, num_drafts, num_accepted):
            self.drafter.observe(stats)


def simulate(
    auto: Clocked, alpha: float, c: float, w: float, num_rounds: int, seed: int = 0, batch=1
) -> list[tuple[int, float, float]]:
    """(γ, expected tokens, seconds) of each round; the clock varies by a tenth, with hiccups."""
    rng = random.Random(seed)
    rounds = []
    for _ in range(num_rounds):
        gamma = auto.gamma(batch)
        accepted = [accepted_drafts(rng, alpha, gamma) for _ in range(batch)]
        seconds = round_seconds(gamma, c, w)
        hiccup = 20 if rng.random() < 0.02 else 1
        auto.round([gamma] * batch, accepted, seconds * rng.uniform(0.9, 1.1) * hiccup)
        rounds.append((gamma, expected_tokens(alpha, gamma), seconds))
    return rounds


def reached(rounds: list[tuple[int, float, float]]) -> float:
    """The speed-up over plain decoding."""
    return sum(tokens for _, tokens, _ in rounds) / sum(seconds for *_, seconds in rounds)


def test_expected_tokens_by_hand_and_by_simulation():
    table = [(0.7, 5, 2.94), (0.8, 4, 3.36), (0, 4, 1), (1, 4, 5), (0.5, 1, 1.5), (0.9, 0, 1)]
    rng = random.Random(1)
    for alpha, num_drafts, tokens in table:
        assert expected_tokens(alpha, num_drafts) == pytest.approx(tokens, abs=0.005)
        counts = [1 + accepted_drafts(rng, alpha, num_drafts) for _ in range(5_000)]
        assert sum(counts) / 5_000 == pytest.approx(tokens, rel=0.05)


def test_trial_measures_plain_rounds_then_drafts():
    gammas = [gamma for gamma, *_ in simulate(Clocked(), 0.9, 0.05, 1.0, 9)]
    trial = [0] * PLAIN + [TRIAL] * MEASURED
    assert gammas[: len(trial)] == trial and gammas[len(trial)] > TRIAL
    auto = Clocked()
    for seconds in (100.0, 1.0):  # the first warms up
        assert auto.gamma(1) == 0
        auto.round([0], [0], seconds)
    assert auto.round_seconds(1, 0) == 1.0 and auto.gamma(1) == TRIAL


@pytest.mark.parametrize("batch", [1, 4])
def test_auto_reaches_the_best_fixed_gamma(batch):
    """After the trial, however the drafts fare and whatever they cost."""
    shares = []
    for alpha in (0.3, 0.5, 0.8, 0.95):
        for c in (0.03, 0.1, 0.3):
            for w in (1.0, 1.5):
                times = [round_seconds(num_drafts, c, w) for num_drafts in range(MAX_GAMMA + 1)]
                fixed = [expected_tokens(alpha, g) / seconds for g, seconds in enumerate(times)]
                auto = Clocked()
                simulate(auto, alpha, c, w, 2 * MEASURED, batch=batch)
                rounds = simulate(auto, alpha, c, w, 600, seed=1, batch=batch)
                shares.append(reached(rounds) / max(fixed))
                assert shares[-1] > 0.94, (alpha, c, w)
    assert sum(shares) / len(shares) > 0.97


def test_pair_that_does_not_pay_is_hardly_noticed():
    for alpha, c, w in [(0.0, 0.1, 1.0), (0.02, 0.1, 1.1), (0.05, 0.5, 1.2), (0.3, 1.0, 1.1)]:
        rounds = simulate(Clocked(), alpha, c, w, 1000)
        assert reached(rounds) > 0.97, (alpha, c, w)
    rounds = simulate(Clocked(), 0.1, 3.0, 1.0, 1000)  # its trial alone takes 39 passes
    assert reached(rounds[2 * MEASURED :]) > 0.97


def test_draft_that_becomes_useful_is_found_and_one_that_does_not_pay_any_more_is_left():
    auto = Clocked()
    useless = simulate(auto, 0.0, 0.1, 1.0, 400)
    assert reached(useless[100:]) > 0.96
    useful = simulate(auto, 0.9, 0.1, 1.0, 1500)
    assert reached(useful[-200:]) > 2
    useless = simulate(auto, 0.0, 0.1, 1.0, 1000)
    assert reached(useless[-400:]) > 0.96


def test_interrupted_plain_rounds_of_the_trial_do_not_stay():
    """They make drafts look good; but plain rounds are measured again."""
    auto = Clocked()
    for seconds in (1.0, 50.0, 50.0):
        auto.round([0], [0], seconds)
    simulate(auto, 0.1, 0.1, 1.0, 500)
    assert reached(simulate(auto, 0.1, 0.1, 1.0, 500)) > 0.97


def test_a_line_through_near_gammas_does_not_lead_far():
    """Two times that noise has made equal: no γ seems to cost more than another."""
    auto = Clocked()
    for _ in range(PLAIN):
        for num_drafts, seconds in ((0, 1.0), (4, 1.5), (5, 1.5)):
            auto.round([num_drafts], [num_drafts], seconds)
    assert auto.costs_of(auto.measured(1))[4:] == [1.5] * 6  # up to 10 drafts


def test_choose_changes_nothing():
    auto = Clocked()
    for num_rounds in (0, 1, 2, 4, 300):
        simulate(auto, 0.05, 0.1, 1.0, num_rounds)
        before = deepcopy((auto.costs, auto.seconds, auto.num_plain, auto.num_drafting))
        for batch_size in (1, 2, 7, 100):
            auto.gamma(batch_size)
            auto.round_seconds(batch_size, 5)
        assert (auto.costs, auto.seconds, auto.num_plain, auto.num_drafting) == before


def test_time_of_the_last_rounds_ignores_outliers():
    auto = Clocked()
    for seconds in (100.0, 50.0, 1.0, 1.0, 50.0, 1.0):
        auto.round([3], [1], seconds)
    assert auto.round_seconds(1, 3) == 1.0
    for _ in range(7):  # of nine
        auto.round([3], [1], 2.0)
    assert auto.round_seconds(1, 3) == 2.0


def test_rounds_are_measured_by_batch_size_and_mean_gamma():
    auto = Clocked()
    for _ in range(MEASURED):
        auto.round([4, 4, 4, 3], [0] * 4, 2.0)  # some near their ends draft fewer
        auto.round([0, 0, 0, 0], [0] * 4, 1.0)
    assert auto.round_seconds(7, 4) == 2.0 and auto.round_seconds(4, 0) == 1.0
    assert auto.round_seconds(8, 4) is None and auto.round_seconds(3, 4) is None

    def seconds() -> list[float]:
        return auto.costs_of(auto.measured(4))

    # a γ that was not measured lies on the line through plain rounds and the trial's
    assert seconds() == pytest.approx([1 + num_drafts / 4 for num_drafts in range(1, 9)])
    for _ in range(MEASURED):
        auto.round([8] * 4, [0] * 4, 2.4)
    # on that through all rounds with drafts: any draft may make a pass wider
    assert seconds() == pytest.approx([1.6 + num_drafts / 10 for num_drafts in range(1, 17)])
    for _ in range(MEASURED):
        auto.round([2] * 4, [0] * 4, 7.0)
    assert seconds()[1] == 7.0 and min(seconds()) == 1.0  # never less than a plain round


def test_the_trial_ends_where_some_texts_find_nothing_to_draft():
    auto = Clocked()
    for _ in range(MEASURED):
        auto.round([0] * 4, [0] * 4, 1.0)
        assert auto.gamma(4) in (0, TRIAL)
        auto.round([TRIAL, 0, 0, 0], [0] * 4, 3.0)
    assert auto.gamma(4) == 0
    assert auto.round_seconds(4, 1) == 3.0  # by the mean: TRIAL drafts each would take longer


def test_alpha_is_a_mean_over_examined_drafts():
    """Behind the first rejection none is examined; a new text begins with this mean."""
    auto = Clocked()
    auto.drafter.alpha = 0.5
    auto.drafter.weight = 10.0
    auto.round([4], [1], 1.0)  # two examined, one accepted
    assert auto.drafter.alpha == 0.5
    auto.round([4], [4], 1.0)  # four of four: 10 of 16 with those before
    assert auto.drafter.alpha == pytest.approx(10 / 16)
    auto.round([0], [0], 1.0)
    assert auto.drafter.alpha == pytest.approx(10 / 16)
    for _ in range(100):
        auto.round([4], [4], 1.0)
    assert auto.drafter.weight == gamma.WINDOW and auto.drafter.alpha > 0.99


def test_a_try_is_as_rare_as_it_is_expensive():
    auto = Clocked()
    for _ in range(MEASURED):
        auto.round([0], [0], 1.0)
        auto.round([TRIAL], [0], 2.0)
    auto.drafter.alpha = 0.0
    cost = 1 + 1 / TRIAL  # of a round with γ = 1
    waited = 0
    while auto.gamma(1) == 0 and waited < 1000:
        auto.round([0], [0], 1.0)
        waited += 1
    assert auto.gamma(1) == 1 and waited == math.ceil(PATIENCE * cost)
    auto.round([1], [0], cost)
    assert auto.gamma(1) == 0  # and waits again
    auto.round([0], [0], 1.0)
    auto.drafter.alpha = 1.0
    num_rounds = 0
    while auto.gamma(1) and num_rounds < 1000:
        auto.round([MAX_GAMMA], [MAX_GAMMA], 5.0)
        num_rounds += 1
    assert num_rounds == PATIENCE  # then a plain round


def test_plain_rounds_that_run_together_are_counted_and_measured():
    auto = Clocked()
    for _ in range(MEASURED):
        auto.round([0], [0], 1.0)
        auto.round([TRIAL], [0], 3.0)
    auto.round([0], [0], 1.0)
    for _ in range(9):  # as many as are kept
        auto.observe([0], 0.5, 4)
    assert auto.num_plain == 1 + 9 * 4
    assert auto.costs[1][TRIAL - 1] == 3.0 / 0.5


def test_the_acceptance_is_a_share_whatever_a_round_has():
    """Also where a round has more drafts than the mean is over."""
    auto = Clocked()
    for accepted in (499, 499, 0, 150, 500):
        auto.round([500], [accepted], 1e-3)
        assert 0 <= auto.drafter.alpha <= 1
