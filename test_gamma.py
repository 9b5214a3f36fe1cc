"""Choosing γ: the formula against simulation, and a chooser that finds what pays and never costs much."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gamma import Auto, Costs, Times, expected_tokens, mean_gains, speed_up


def simulate(
    alpha: float,
    c: float,
    wide: float = 0.0,
    rounds: int = 500,
    noise: float = 0.0,
    most: int = 8,
    seed: int = 0,
    fixed: float = 0.0,
) -> tuple[float, list[int]]:
    """(speed-up over plain decoding, γ by round): γ drafts cost fixed + c γ, a wider pass `wide` a token; α is hidden.
    As in a decoder, the first drafts after a round without any are not measured: they read what the drafter lacks."""
    costs, coin, taken, made, spent = Costs(), random.Random(seed), [0], 0, 0.0
    auto = Auto(costs)
    while made < rounds:
        gamma = auto.choose(most)
        stood = next((j for j in range(gamma) if coin.random() >= alpha), gamma)
        shaky = lambda seconds: seconds * coin.uniform(1 - noise, 1 + noise)
        drafting, verifying = shaky(c * gamma + fixed * (gamma > 0)), shaky(1 + wide * gamma)
        if gamma and taken[-1]:
            costs.drafts.saw(gamma, drafting)
        costs.passes.saw(1 + gamma, verifying)
        auto.saw(gamma, stood, drafting + verifying)
        taken.append(gamma)
        made, spent = made + stood + 1, spent + drafting + verifying
    return made / spent, taken[1:]


@pytest.mark.parametrize(
    "alpha, gamma, tokens",
    [(0.7, 5, 2.94), (0.8, 4, 3.36), (0, 4, 1), (1, 4, 5), (0.5, 1, 1.5), (0.9, 0, 1)],
)
def test_expected_tokens_by_hand(alpha, gamma, tokens):
    assert expected_tokens(alpha, gamma) == pytest.approx(tokens, abs=0.005)


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 0.95), st.integers(0, 6))
def test_expected_tokens_by_simulation(alpha, gamma):
    coin = random.Random(1)
    made = (
        sum(
            1 + next((j for j in range(gamma) if coin.random() >= alpha), gamma)
            for _ in range(20_000)
        )
        / 20_000
    )
    assert made == pytest.approx(expected_tokens(alpha, gamma), rel=0.05)


def test_speed_up_counts_drafts_and_wider_passes():
    assert speed_up(0.7, 0, 0.5) == 1 and speed_up(0.7, 5, 0.1) == pytest.approx(
        2.94 / 1.5, abs=0.01
    )
    assert speed_up(0.7, 3, 0.1, w=1.2) == pytest.approx(expected_tokens(0.7, 3) / 1.5)


def test_the_first_time_of_all_is_left_out_and_outliers_do_not_matter():
    times = Times()
    times.saw(3, 100.0)
    assert times.at(3) == 0
    for seconds in (1.0, 1.0, 50.0, 1.0, 1.0):
        times.saw(3, seconds)
    assert times.at(3) == 1.0


def known(**passes: float) -> Costs:
    costs = Costs()
    for n, seconds in passes.items():
        for _ in range(3):
            costs.passes.saw(int(n[1:]), seconds)
    return costs


def test_a_pass_of_a_width_that_was_not_measured_lies_between_those_that_were():
    costs = known(n1=1.0, n4=1.3, n8=2.1)
    assert [costs.passes.at(n) for n in (1, 4, 8)] == [1.0, 1.3, 2.1]
    assert costs.passes.at(9) == 2.1 and costs.passes.at(64) == 2.1
    assert costs.passes.at(2) == pytest.approx(1.1) and costs.passes.at(6) == pytest.approx(1.7)
    assert known(n4=1.3).passes.at(2) == 1.3 and Costs().passes.at(3) == 0
    # a hiccup: one token cannot cost more than two
    assert known(n1=5.0, n2=1.0).passes.at(1) == 1.0


def test_in_a_batch_a_pass_has_the_tokens_of_all_texts():
    costs = known(n8=1.0, n16=1.0, n24=2.5, n64=6.0)
    costs.drafts.saw(1, 0.1), costs.drafts.saw(1, 0.1)
    assert costs.plain(8) == 1.0 and costs.plain(4) is None and costs.plain(16) == 1.0
    costs.alpha = 0.9
    trusting, together = Auto(costs, weight=1000), lambda *alphas: mean_gains(costs, alphas, 8)
    # nothing as narrow as 4 rows was measured
    assert (
        trusting.choose(1, together(*[0.9] * 4)) == 0
        and trusting.choose(1, together(*[0.9] * 8)) == 1
    )
    costs.drafts.saw(4, 4.0), costs.drafts.saw(4, 4.0)
    costs.trial = 1.0
    assert (
        trusting.choose(8, together(*[0.9] * 8)) == 1
        and trusting.choose(1, together(*[0.8] * 24)) == 0
    )
    costs.alpha = 0.1
    doubter = Auto(costs, weight=1000)
    # texts made together choose one γ for all of them
    for alphas in ([0.9] * 7 + [0.0], [0.0] * 7 + [0.7]):
        assert (
            doubter.choose(1, together(*alphas))
            == trusting.choose(1, together(*alphas))
            == int(alphas[0] > 0.5)
        )


def test_plain_decoding_is_measured_first_and_then_one_width_after_the_other():
    _, taken = simulate(0.95, 0.05)
    assert taken[:10] == [0, 0, 1, 1, 1, 2, 2, 4, 4, 8]


@pytest.mark.parametrize(
    "alpha, c, wide, fixed",
    [
        (0.9, 0.05, 0.0, 0.0),
        (0.7, 0.1, 0.02, 0.0),
        (0.8, 0.2, 0.05, 0.0),
        (0.5, 0.05, 0.1, 0.0),
        (0.7, 0.09, 0.17, 0.3),
    ],
)
def test_auto_comes_near_the_best_fixed_gamma(alpha, c, wide, fixed):
    best = max(speed_up(alpha, g, c, 1 + wide * g + fixed * (g > 0)) for g in range(9))
    reached = (
        sum(simulate(alpha, c, wide, 1500, 0.2, seed=seed, fixed=fixed)[0] for seed in range(4)) / 4
    )
    assert reached > 0.95 * best > 1.1


@pytest.mark.parametrize(
    "alpha, c, wide",
    [(0.0, 0.1, 0.0), (0.02, 0.11, 0.05), (0.05, 0.5, 0.2), (0.3, 1.0, 0.1), (0.1, 3.0, 0.0)],
)
def test_a_useless_draft_is_hardly_noticed(alpha, c, wide):
    reached = sum(simulate(alpha, c, wide, 512, 0.2, seed=seed)[0] for seed in range(4)) / 4
    assert reached > (0.96 if c < 1 else 0.93)


def test_a_draft_that_becomes_useful_is_found_again():
    costs, coin = Costs(), random.Random(0)
    auto, taken = Auto(costs), []
    for i in range(1500):
        gamma, alpha = auto.choose(6), 0.0 if i < 300 else 0.9
        stood = next((j for j in range(gamma) if coin.random() >= alpha), gamma)
        costs.drafts.saw(gamma, 0.1 * gamma)
        costs.passes.saw(1 + gamma, 1.0)
        auto.saw(gamma, stood, 1 + 0.1 * gamma)
        taken.append(gamma)
    assert sum(taken[100:300]) < 60 and sum(taken[-100:]) > 400


def test_gamma_never_exceeds_what_is_asked():
    for most in (0, 1, 3):
        assert max(simulate(0.99, 0.01, most=most)[1]) == most


def test_a_trial_is_as_dear_for_the_next_text():
    """What one text's trial cost beyond its tokens' worth is known to all: a later one waits sixty times as long."""
    costs = known(n1=1.0, n2=1.0)
    costs.drafts.saw(1, 0.1), costs.drafts.saw(1, 0.1)
    costs.alpha = 0.01
    first, second = Auto(costs, weight=1000), Auto(costs, weight=1000)
    first.saw(1, 0, 5.01)
    assert costs.trial == pytest.approx(4.0)
    for auto in (first, second):
        auto.saw(0, 0, 239.0)
        assert auto.choose(4) == 0
        auto.saw(0, 0, 1.01)
        assert auto.choose(4) > 0


def test_any_gain_is_taken_and_a_trial_drafts_as_many_as_lose_least():
    costs = known(n1=1.0, n2=1.3, n5=1.3)
    for gamma, seconds in ((1, 0.5), (4, 0.6)) * 2:
        costs.drafts.saw(gamma, seconds)
    text = Auto(costs)
    text.alpha = 0.5  # 1.02 times plain decoding with γ = 4
    assert text.choose(4) == 4
    text.alpha = 0.45  # 0.94 times
    assert text.choose(4) == 0
    text.idle = 60.0
    assert text.choose(4) == 4


def test_a_text_begins_with_the_acceptance_of_those_before_it():
    costs = Costs()
    for _ in range(20):
        text = Auto(costs)
        for _ in range(10):
            text.saw(2, 0, 1.0)
    assert Auto(costs).alpha < 0.1


def test_what_a_pass_adds_is_not_compared_with_all_widths_squared():
    class Seconds(float):
        compared = 0

        def __lt__(self, other):
            Seconds.compared += 1
            return float(self) < other

    costs = known(**{f"n{n}": Seconds(n) for n in range(1, 101)})
    for n in range(1, 101):
        # an odd number of times, of which the median is one
        costs.passes.saw(n, Seconds(n))
    Seconds.compared = 0
    costs.passes.saw(50, Seconds(50))
    assert costs.passes.at(50) == 50 and Seconds.compared < 500
