"""Quantized numbers are within half a step of what they stand for."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import quant
from checkpoint.config import Config
from conftest import SMALL, peak
from model import Llama
from quant import (
    dequantize,
    from_int4,
    from_int8,
    int4,
    int8,
    nf4,
    pack4,
    quantize,
    round_up,
    unpack4,
)

MAX = torch.finfo(torch.float32).max
KINDS = {
    "plain": lambda x: x,
    "zeros": lambda x: 0 * x,
    "constant": lambda x: 0 * x + x.flatten()[0],
    "largest": lambda x: (x.clamp(-3, 3) / 3) * MAX,
    "all at the largest": lambda x: x.sign() * MAX,
    "near the largest": lambda x: (0.9 + 0.1 * torch.sigmoid(x)) * MAX,
    "large": lambda x: x * 1e36,
    "tiny": lambda x: x * 1e-31,
    "below all": lambda x: x * 1e-40,
    "small": lambda x: x * 1e-27,
    "far from 0": lambda x: 1e6 + x,
    "at the edge of far": lambda x: 200 + 0.75 * x.sigmoid(),
    "one outlier": lambda x: torch.cat((x[:, :1] * 1e4, x[:, 1:]), 1),
    "positive": lambda x: x.abs(),
    "some zero": lambda x: x * (x > 0),
}


def numbers(kind: str, N: int, K: int, seed: int) -> torch.Tensor:
    return KINDS[kind](torch.randn(N, K, generator=torch.Generator().manual_seed(seed)))


def off_by(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> float:
    """The largest difference, in steps; in float64, where nothing is rounded."""
    assert y.isfinite().all() and scale.isfinite().all() and (scale.float() >= 1e-30 * 0.999).all()
    return ((x.double() - y.double()).abs() / scale.double()).max().item()


def columns_of(x: torch.Tensor, q: quant.Quantized) -> torch.Tensor:
    return x.repeat_interleave(q.group, 1)[:, : q.columns]


# ---- Weights


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(sorted(KINDS)),
    st.integers(1, 4),
    st.integers(1, 300),
    st.sampled_from([8, 4]),
    st.sampled_from([1, 2, 5, 32, 64, 128]),
    st.integers(0, 99),
)
@example("all at the largest", 2, 33, 4, 32, 0)
@example("all at the largest", 2, 33, 8, 32, 0)
@example("near the largest", 4, 300, 4, 5, 0)
def test_weights_are_within_half_a_step(kind, N, K, bits, group, seed):
    w = numbers(kind, N, K, seed)
    q = quantize(w, bits, group)
    M = 1 if bits == 8 else -(-K // group)
    back = dequantize(*q)
    assert back.shape == w.shape and back.dtype == torch.float32 and q.scale.shape == (N, M)
    assert off_by(w, back, columns_of(q.scale, q)) <= 0.5 * (1 + 1e-3)
    assert sum(t.nbytes for t in q[:3] if t is not None) == N * (
        K + 2 if bits == 8 else -(-K // 2) + 4 * M
    )


E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(sorted(KINDS)),
    st.integers(1, 4),
    st.integers(1, 150),
    st.sampled_from(["fp8", "nf4"]),
    st.sampled_from([1, 5, 32, 64]),
    st.integers(0, 99),
)
@example("all at the largest", 2, 33, "nf4", 32, 0)
@example("all at the largest", 2, 33, "fp8", 32, 0)
def test_weights_become_the_nearest_of_the_numbers_that_there_are(kind, N, K, bits, group, seed):
    """By looking at each of them; and a scale is no larger than the largest number asks for."""
    w, codes = (
        numbers(kind, N, K, seed),
        E4M3[E4M3.isfinite()].double() if bits == "fp8" else nf4().double(),
    )
    q, largest = quantize(w, bits, group), codes.max()
    scale = columns_of(q.scale, q).double()
    error, back = (w.double() - dequantize(*q).double()).abs(), dequantize(*q)
    best = ((w.double() / scale)[..., None] - codes).abs().amin(-1) * scale
    assert back.isfinite().all() and (error <= best + 1e-6 * (w.double().abs() + scale)).all()
    most = torch.stack([part.abs().amax(1) for part in w.split(q.group, 1)], 1).double()
    assert (q.scale.double() <= most / largest * (1 + 2.0**-7) + 1.01e-30).all() and (
        q.scale.double() * largest >= most * (1 - 2.0**-7)
    ).all()
    assert q.bits == bits and sum(t.nbytes for t in q[:3] if t is not None) == N * (
        K + 2 if bits == "fp8" else -(-K // 2) + 2 * -(-K // group)
    )


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 4),
    st.integers(1, 200),
    st.sampled_from([8, 4]),
    st.sampled_from([1, 5, 32]),
    st.integers(0, 99),
    st.floats(-20, 20),
)
def test_a_step_is_no_longer_than_it_must_be(N, K, bits, group, seed, power):
    w = numbers("plain", N, K, seed) * 10**power
    q = quantize(w, bits, group)
    for g, part in enumerate(w.split(K if bits == 8 else group, 1)):
        low, high = part.amin(1), part.amax(1)
        least = (
            torch.maximum(high, -low) / 127
            if bits == 8
            else torch.maximum((high - low) / 15, torch.maximum(high, -low) / 2000)
        )
        assert (q.scale[:, g].float() <= least * (1 + 2.0**-7) + 1e-30).all()


def test_what_is_on_the_grid_stays():
    """All 255 and all 16 numbers, wherever the sixteen begin."""
    every = torch.arange(-127.0, 128)[None] * 0.25
    assert torch.equal(dequantize(*quantize(every, 8)), every)
    for begin in (-15, -7, 0, 100, -1000):
        every = torch.arange(begin, begin + 16.0)[None].repeat(1, 2) * 0.125
        q = quantize(every, 4, 16)
        assert torch.equal(dequantize(*q), every) and torch.equal(
            unpack4(q.values)[0, :16], torch.arange(16, dtype=torch.uint8)
        )


@settings(deadline=None)
@given(st.lists(st.integers(0, 15), min_size=1, max_size=40))
def test_packing_round_trips_to_the_bit(numbers):
    q = torch.tensor([numbers, numbers[::-1]], dtype=torch.uint8)
    packed = pack4(q)
    assert packed.shape[1] == (len(numbers) + 1) // 2 and torch.equal(
        unpack4(packed)[:, : len(numbers)], q
    )
    assert packed[0, 0] == numbers[0] + 16 * (
        numbers[1] if len(numbers) > 1 else 0
    )  # the order that files and kernels rely on


@settings(deadline=None, max_examples=300)
@given(st.floats(0, 2.0**120, width=32))
@example(1.0)
@example(1.0000001192092896)
@example(1.9999998807907104)
def test_16_bits_are_rounded_up_and_only_as_far_as_they_must(x):
    x = torch.tensor([x])
    up = round_up(x)
    assert up.dtype == torch.bfloat16 and up.float() >= x
    below = (up.view(torch.int16) - 1).view(torch.bfloat16)
    assert up == 0 or below.float() < x


def test_a_weight_in_slabs_is_the_same_as_whole(monkeypatch):
    w = numbers("plain", 7, 37, 0)
    whole = {bits: quantize(w, bits, 32) for bits in (8, 4)}
    monkeypatch.setattr(quant, "SLAB", 80)
    for bits, q in whole.items():
        for a, b in zip(q, quantize(w, bits, 32)):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bits", [8, 4])
def test_other_dtypes_are_numbers_too(dtype, bits):
    w = numbers("plain", 3, 50, 0).to(dtype)
    q, same = quantize(w, bits, 32), quantize(w.float(), bits, 32)
    assert (
        all(torch.equal(a, b) for a, b in zip(q[:2], same[:2]))
        and dequantize(*q, dtype=dtype).dtype == dtype
    )


@pytest.mark.parametrize(
    "w, bits, group, says",
    [
        (torch.ones(2, 2), 3, 32, "bits is 3: weights are stored in 8, 4, fp8, nf4"),
        (torch.ones(2, 2), 16, 32, "bits is 16"),
        (torch.ones(2, 2), 4, 0, "group is 0"),
        (
            torch.tensor([[1.0, torch.nan]]),
            8,
            32,
            r"\[1, 2\] cannot be quantized: it holds numbers that are not finite",
        ),
        (torch.tensor([[1.0, -torch.inf]]), 4, 32, "not finite"),
        (torch.tensor([[1.0, torch.inf]]), 8, 32, "not finite"),
        (torch.ones(2, 2, dtype=torch.int8), 8, 32, r"a weight of torch.int8 \[2, 2\]"),
        (torch.ones(2), 8, 32, "must be a matrix"),
        (torch.ones(0, 2), 8, 32, "must be a matrix"),
    ],
)
def test_what_cannot_be_quantized_is_refused(w, bits, group, says):
    with pytest.raises(ValueError, match=says):
        quantize(w, bits, group)


# ---- Keys and values


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(sorted(KINDS)),
    st.integers(1, 40),
    st.integers(1, 2),
    st.integers(1, 16),
    st.sampled_from([None, 1, 4, 16]),
    st.integers(0, 99),
)
def test_keys_and_values_are_within_half_a_step(kind, n, heads, half, group, seed):
    x = numbers(kind, heads * n, 2 * half, seed).view(heads, n, 2 * half)
    values, scale = int8(x)
    assert (
        values.dtype == torch.int8
        and scale.dtype == torch.bfloat16
        and scale.shape == (heads, n, 1)
    )
    assert off_by(x, from_int8(values, scale), scale) <= 0.5 * (1 + 1e-3)
    packed, scale, zero = int4(x, group)
    M = -(-2 * half // group) if group else 1
    assert packed.shape == (heads, n, half) and packed.dtype == torch.uint8
    assert scale.shape == zero.shape == (heads, n, M)
    if M > 1 and x.abs().max() > 1e38:  # which no product could use
        return
    again = from_int4(packed, scale, zero, group=group)
    assert off_by(
        x, again, scale.repeat_interleave(group or 2 * half, -1)[..., : 2 * half]
    ) <= 0.5 * (1 + 1e-3)


def test_a_vector_does_not_depend_on_its_neighbours():
    """So a text can be stored in any chunks, and blocks can be shared."""
    x = numbers("one outlier", 12, 8, 0).view(3, 4, 8)
    for store in (int8, int4, lambda x: int4(x, 3)):
        whole, first = store(x), store(x[:1])
        assert all(torch.equal(a[:1], b) for a, b in zip(whole, first))


def test_numbers_that_are_large_in_every_key_spoil_their_group_alone():
    keys = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    keys[:, 5] += 20
    keys[:, 9] *= 15
    whole, grouped = (
        (from_int4(*int4(keys, group), group=group) - keys).square().sum(0) for group in (None, 16)
    )
    assert (
        grouped[16:].sum() < 0.05 * whole[16:].sum() and grouped[:16].sum() < 1.1 * whole[:16].sum()
    )


def test_bytes_of_a_vector():
    keys = torch.randn(4, 32, 64)
    assert sum(t.nbytes for t in int8(keys)) == 4 * 32 * (64 + 2) <= 0.54 * keys.bfloat16().nbytes
    assert (
        sum(t.nbytes for t in (*int4(keys, 16), *int4(keys))) <= 0.33 * 2 * keys.bfloat16().nbytes
    )
    assert sum(t.nbytes for t in (*int8(keys), *int4(keys))) <= 0.42 * 2 * keys.bfloat16().nbytes
    assert (
        from_int8(*int8(keys), torch.bfloat16).dtype
        == from_int4(*int4(keys), torch.bfloat16).dtype
        == torch.bfloat16
    )


# ---- Models

LARGE = dict(
    tie_word_embeddings=False,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=8,
    head_dim=64,
    vocab_size=8192,
)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc"
)
@pytest.mark.meanwhile(
    peak,
    json.dumps(LARGE),
    'Llama.load("test_data/mha", "cpu", torch.float32, bits=8)',
    'llama = Llama.load(folder, "cpu", torch.float32, bits=8)',
)
def test_quantizing_at_load_never_has_the_plain_model_in_memory(meanwhile):
    plain = sum(
        place.numel() * 4
        for place in Llama(Config(**SMALL | LARGE), "meta", seed=None).places().values()
    )
    # 45 MB are a tensor's own numbers as it is rounded; where malloc keeps what was freed, 130 (both are seen). The plain model would be 155 more.
    assert plain > 150e6 and meanwhile() < plain / 4 + 145e6 < 5 / 4 * plain, (
        f"{meanwhile() >> 20} MiB for {plain >> 20}"
    )
