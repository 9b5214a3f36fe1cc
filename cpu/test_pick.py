"""C's picks are torch's, to the last digits of the noise; and its softmax is torch's."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import sampling
from cpu import CPU, native
from request import Request, Settings
from sampling import GOLDEN, MIX1, MIX2, Keyed, draft_role, pick
from speculative import Drawing, Round
from testing.toys import Place

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no C here: {native.why_not()}")


@given(
    st.integers(1, 5),
    st.integers(1, 600),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(0, 1),
)
def test_c_picks_what_torch_picks(B, V, dtype, each, seed, hidden):
    """For rows with roles of their own or one for all, and where many tokens, or all, have
    probability 0."""
    torch.manual_seed(V)
    probs = torch.where(torch.rand(B, V) < hidden, 0, torch.rand(B, V)).to(dtype)
    roles = torch.arange(B) if each else draft_role(B)
    streams = Keyed(torch.tensor([seed]).expand(B), torch.arange(B), roles).streams
    picked = native.pick_tokens(probs, streams)
    assert torch.equal(picked, pick(probs, streams))
    assert torch.equal(native.pick_tokens(probs.T.contiguous().T, streams), picked)


def test_the_noise_of_c_is_right_to_the_last_digits():
    """Where every p is its own noise, all scores are 1: a token whose p is larger by 1e-13 of
    itself wins."""
    V = 2000
    streams = Keyed(torch.tensor([3]), torch.tensor([4])).streams
    noise = sampling.exponential(streams, V)
    for i in range(0, V, 7):
        probs = noise.clone()
        probs[0, i] *= 1 + 1e-13
        assert native.pick_tokens(probs, streams).item() == i


def test_ties_of_scores_go_to_the_first():
    """Probabilities so small that most scores round to the same number."""
    probs = torch.full((50, 3), 5e-324, dtype=torch.float64)
    streams = Keyed(torch.arange(50), torch.arange(50)).streams
    assert torch.equal(native.pick_tokens(probs, streams), pick(probs, streams))


def test_a_token_alone_in_its_block_may_win_by_little():
    """C draws 256 tokens at a time, and leaves a block out if none of it can win. Twice the
    smallest number, too, whose share of a score is rounded up."""
    streams = Keyed(torch.tensor([3]), torch.tensor([4])).streams
    noise = sampling.exponential(streams, 512)
    later = 256 + noise[0, 256:].argmin().item()
    probs = torch.zeros(1, 512, dtype=torch.float64)
    for factor, winner in ((1 + 1e-13, later), (1 - 1e-13, 0)):
        probs[0, 0] = noise[0, 0]
        probs[0, later] = noise[0, later] * factor
        assert native.pick_tokens(probs, streams).item() == winner
    for n in range(1, 1000):
        probs[0, 0] = n * 5e-324
        probs[0, later] = 1e-323
        assert torch.equal(native.pick_tokens(probs, streams), pick(probs, streams))


def unshift(z: int, by: int) -> int:
    """z ^ z >> by, undone."""
    result = z
    for _ in range(64 // by + 1):
        result = z ^ result >> by
    return result


def unmix(z: int) -> int:
    """What `sampling.mix` makes of it is z: undone, a step at a time."""
    z = unshift(z, 31) * pow(MIX2, -1, 2**64) % 2**64
    z = unshift(z, 27) * pow(MIX1, -1, 2**64) % 2**64
    return unshift(z, 30)


EXTREME = {0: 0.0, -1: 1 - 2.0**-52, -(2**63): 0.5, 2**63 - 1: 0.5 - 2.0**-52}  # bits -> u


def test_c_makes_noise_of_extreme_bits():
    """Streams one of whose first numbers has these bits."""
    for bits, u in EXTREME.items():
        for i in range(3):
            start = (unmix(bits % 2**64) - (i + 1) * GOLDEN) % 2**64
            stream = unmix(start)
            streams = torch.tensor([[stream - 2**64 if stream >= 2**63 else stream]])
            probs = torch.full((1, 3), 1e-300, dtype=torch.float64)
            probs[0, i] = 1
            hashes = sampling.mix(sampling.mix(streams) + torch.arange(1, 4) * GOLDEN)
            assert sampling.uniform(hashes)[0, i] == u
            assert native.pick_tokens(probs, streams).item() == i


@pytest.mark.parametrize("temperature", [0, 1e-300, 0.7, 1.0, 1e30])
def test_minus_infinity_is_a_logit_and_what_else_is_not_finite_is_refused(temperature):
    ops = CPU()
    torch.manual_seed(0)
    logits = torch.randn(3, 70)
    logits[0, 0] = logits[1, 5] = -math.inf
    probs = ops.probabilities(logits, temperature=temperature)
    torch.testing.assert_close(probs, sampling.probabilities(logits, temperature=temperature))
    for wrong in (math.nan, math.inf):
        for column in (0, 69):
            damaged = logits.clone()
            damaged[1, column] = wrong
            with pytest.raises(ValueError, match="not finite"):
                ops.probabilities(damaged, temperature=temperature)
    with pytest.raises(ValueError, match="not finite"):
        ops.probabilities(torch.full((1, 70), -math.inf), temperature=temperature)
    with pytest.raises(ValueError, match="not finite"):
        ops.probabilities(logits, masked=False, temperature=temperature)


def test_ties_go_to_the_first_at_temperature_0():
    """Above it they share, also where float32 has only 0."""
    logits = torch.zeros(3, 50)
    logits[1, [7, 30, 49]] = 2
    logits[2, [0, 49]] = 1
    probs = native.row_probabilities(logits, temperature=0)
    assert probs.argmax(1).tolist() == [0, 7, 0] and probs.sum(1).tolist() == [1, 1, 1]
    probs = native.row_probabilities(logits, temperature=1e-300)
    assert torch.equal(probs, sampling.probabilities(logits, 1e-300))


@given(
    st.integers(1, 3),
    st.integers(1, 6000),
    st.sampled_from([0.1, 1, 4, 12]),  # how far logits are from each other
    st.booleans(),
    st.fixed_dictionaries(
        dict(
            temperature=st.sampled_from([0, 0.3, 1, 2, 1e6]),
            top_k=st.sampled_from([0, 1, 3, 40, 5000, 2**31]),
            top_p=st.sampled_from([1e-300, 0.4987, 0.9013, 0.9987, 1]),
            min_p=st.sampled_from([0, 0.001, 0.3, 1]),
        )
    ),
)
@example(1, 50, 0.1, True, dict(top_k=3))
@example(1, 5, 0.1, True, dict(top_p=0.5))
def test_c_filters_what_torch_filters(B, V, spread, ties, settings):
    """Where some likely tokens tell what is kept, and where only all do; of equal logits the first,
    −0 and 0, too; and where float32 holds the logits apart, and not their probabilities."""
    torch.manual_seed(V)
    logits = spread * torch.randn(B, V)
    if ties:
        logits = logits.round()
    logits[:, V // 2] = -math.inf if V > 1 else 0
    probs = native.row_probabilities(logits, **settings)
    wanted = sampling.probabilities(logits, **settings)
    torch.testing.assert_close(probs, wanted, atol=1e-6, rtol=1e-5)
    assert (probs[wanted > 1e-30] > 0).all() and not probs[wanted == 0].any()
    assert torch.equal(native.row_probabilities(logits[-1:], **settings), probs[-1:])


def test_filters_keep_unlikely_tokens_where_the_likely_ones_are_too_few():
    """Two tokens are likely; 4,999 others have 6e-6 of the first's probability, or 9e-27."""
    for gap, settings, kept in (
        (-12, dict(top_p=0.99), range(1500, 2500)),
        (-12, dict(top_k=40), [40]),
        (-12, dict(top_k=40, top_p=0.9999), range(2, 40)),
        (
            -12,
            dict(top_k=40, top_p=0.52495),
            [2],
        ),  # the first has 0.52498 of the two, 0.52492 of 40
        (-12, dict(min_p=1e-6), [5001]),
        (-60, dict(top_k=40), [40]),
    ):
        logits = torch.full((1, 5001), float(gap))
        logits[0, [7, 9]] = torch.tensor([0, -0.1])
        probs = native.row_probabilities(logits, **settings)
        assert (probs > 0).sum() in kept, settings
        assert torch.equal(probs > 0, sampling.probabilities(logits, **settings) > 0), settings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_c_makes_all_probabilities_but_of_float64(dtype, monkeypatch):
    """Each row with settings of its own; one with neutral filters is what it is without, to the
    bit."""
    monkeypatch.setattr(sampling, "probabilities", None)
    logits = torch.randn(2, 30).to(dtype)
    alone = CPU().probabilities(logits, temperature=0.7)
    settings = dict(top_k=torch.tensor([3, 0]), top_p=torch.tensor([0.8, 1.0]), min_p=None)
    probs = CPU().probabilities(logits, temperature=0.7, **settings)
    assert torch.equal(probs[1], alone[1]) and 1 <= (probs[0] > 0).sum() <= 3


def test_verifying_is_c_with_keyed_rngs_alone():
    round = Round([Request([1], Settings(seed=0))], [2], Drawing(5), target=Place())
    p = torch.ones(1, 3, 5) / 5
    drafted = torch.tensor([[1, 2]])
    rng = round.text_rng()

    def plain(*arguments: Any) -> str:
        return "plain"

    assert CPU().verify_block(plain, p, p, drafted, rng) != "plain"
    assert CPU().verify_block(plain, p.double(), p.double(), drafted, rng) == "plain"
    assert CPU().verify_block(plain, p, p, drafted, SimpleNamespace()) == "plain"


@pytest.mark.parametrize("V", [5000, 128_000])
def test_a_probability_is_right_in_a_large_vocabulary(V):
    """A sum of so many float32, one after the other, would lose 1e-5 to 2e-4 of it."""
    torch.manual_seed(0)
    logits = torch.randn(2, V) * 3
    wanted = (logits.double() / 0.7).softmax(-1)
    probs = CPU().probabilities(logits, temperature=0.7)
    error = ((probs - wanted).abs() / wanted)[wanted > 1e-4]
    assert error.max() < 3e-6
