"""C's picks are torch's, to the last digits of the noise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sampling
from cpu import CPU, native
from sampling import GOLDEN, MIX1, MIX2, Keyed, draft_role, pick
from test_sampling import EXTREME

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no C here: {native.why_not()}")


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 5),
    st.integers(1, 600),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(0, 1),
)
def test_c_picks_what_torch_picks(B, V, dtype, each, seed, hidden):
    """For rows with roles of their own or one for all, and where many tokens, or all, have probability 0."""
    generator = torch.Generator().manual_seed(V)
    probs = torch.where(
        torch.rand(B, V, generator=generator) < hidden, 0, torch.rand(B, V, generator=generator)
    ).to(dtype)
    streams = Keyed(
        torch.tensor([seed]).expand(B), torch.arange(B), torch.arange(B) if each else draft_role(B)
    ).streams
    picked = native.race(probs, streams)
    assert torch.equal(picked, pick(probs, streams)) and torch.equal(
        native.race(probs.T.contiguous().T, streams), picked
    )


def test_the_noise_of_c_is_right_to_the_last_digits():
    """Where every p is its own noise, all scores are 1: a token whose p is larger by 1e-13 of itself wins."""
    V = 2000
    streams = Keyed(torch.tensor([3]), torch.tensor([4])).streams
    noise = sampling._exponential(streams, torch.arange(1, V + 1) * GOLDEN)
    for at in range(0, V, 7):
        probs = noise.clone()
        probs[0, at] *= 1 + 1e-13
        assert native.race(probs, streams).item() == at


@pytest.mark.parametrize("bits, u", EXTREME.values(), ids=EXTREME)
def test_c_makes_noise_of_extreme_bits(bits, u):
    """Places whose first number of the stream has these bits: what `_mix` makes of them is undone, a step at a time."""

    def unshift(z: int, by: int) -> int:
        whole = z
        for _ in range(64 // by + 1):
            whole = z ^ whole >> by
        return whole

    for at in range(3):
        z = unshift(bits % 2**64, 31) * pow(MIX2, -1, 2**64) % 2**64
        z = unshift(z, 27) * pow(MIX1, -1, 2**64) % 2**64
        start = (
            unshift(z, 30) - (at + 1) * GOLDEN
        ) % 2**64  # of the stream whose number `at` it is
        z = unshift(start, 31) * pow(MIX2, -1, 2**64) % 2**64
        place = unshift(unshift(z, 27) * pow(MIX1, -1, 2**64) % 2**64, 30)
        streams = torch.tensor([[place - 2**64 if place >= 2**63 else place]])
        probs = torch.full((1, 3), 1e-300, dtype=torch.float64)
        probs[0, at] = 1
        found = sampling._uniform(
            sampling._mix(sampling._mix(streams) + torch.arange(1, 4) * GOLDEN)
        )[0, at]
        assert found == u and native.race(probs, streams).item() == at


@pytest.mark.parametrize("temperature", [0, 1e-300, 0.7, 1.0])
def test_minus_infinity_is_a_logit_and_what_else_is_not_finite_is_refused(temperature):
    ops, logits = CPU(), torch.randn(3, 70, generator=torch.Generator().manual_seed(0))
    logits[0, 0] = logits[1, 5] = -math.inf
    torch.testing.assert_close(
        ops.probabilities(logits, temperature), sampling.probabilities(logits, temperature)
    )
    for wrong in (math.nan, math.inf):
        for place in (0, 69):
            damaged = logits.clone()
            damaged[1, place] = wrong
            with pytest.raises(ValueError, match="not finite"):
                ops.probabilities(damaged, temperature)
    with pytest.raises(ValueError, match="not finite"):
        ops.probabilities(torch.full((1, 70), -math.inf), temperature)
