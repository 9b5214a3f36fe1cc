"""Padded attention is that of each text alone: ragged steps of few and of many queries beside kernels.Ops, poisoned."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpu
from cpu import CPU, native, padded
from cpu.padded import FEW
from kernels import Ops, Step
from kvcache import Store
from quant import GROUP, WIDTHS, Bits

NAN = float("nan")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def cache(ops: Ops, shape: tuple[int, ...], bits: Bits, dtype: torch.dtype) -> SimpleNamespace:
    """Keys and values that must not be used."""
    stores = [
        Store.empty(shape, width, dtype, torch.device("cpu"), ops.room, group)
        for width, group in zip(bits, (GROUP, None))
    ]
    for part in (part for store in stores for part in store.parts):
        part.fill_(NAN if part.is_floating_point() else 77)
    return SimpleNamespace(keys=stores[0], values=stores[1], dtype=dtype)


@pytest.mark.parametrize("bits", WIDTHS.values(), ids=str)
@settings(max_examples=25, deadline=None)
@given(
    G=st.integers(1, 3),
    R=st.integers(1, 3),
    D=st.sampled_from([2, 6, 18]),
    S=st.sampled_from([1, 3, 16, 50]),
    texts=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 4) | st.sampled_from([FEW, FEW + 1, 25])),
        min_size=1,
        max_size=5,
    ),
    fresh=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_a_ragged_step_is_each_text_alone(bits, G, R, D, S, texts, fresh, dtype, seed):
    """What is stored is the same to the bit, and nothing else is written. fresh: blocks lie in order."""
    torch.manual_seed(seed)
    blocks = [-(-(start + count) // S) for start, count in texts]
    order = (
        list(range(sum(blocks) + 1))[::-1] if fresh else torch.randperm(sum(blocks) + 1).tolist()
    )
    spans = [
        ([order.pop() for _ in range(n)], start, start + count)
        for n, (start, count) in zip(blocks, texts)
    ]
    T, old = sum(count for _, count in texts), sum(start for start, _ in texts)
    q, past, new = (
        torch.randn(n, heads, D).to(dtype) for n, heads in ((T, G * R), (old, 2 * G), (T, 2 * G))
    )
    made, plain = [], []
    for ops, results in ((CPU(), made), (Ops(), plain)):
        held = cache(CPU(), (2, sum(blocks) + 1, S, G, D), bits, dtype)
        if old:
            before = Step(
                [(own, 0, start) for own, start, _ in spans if start], S, held
            ).places.slots.long()
            for store, numbers in zip((held.keys, held.values), past.split(G, 1)):
                store.write(1, before, numbers)
        look_back = padded.look_back if type(ops) is CPU else ops.look_back
        out = look_back(q, *new.split(G, 1), Step(spans, S, held), 1)
        results += [out, *(part for store in (held.keys, held.values) for part in store.parts)]
    assert made[0].dtype == dtype
    torch.testing.assert_close(made[0], plain[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for own, wanted in zip(made[1:], plain[1:]):
        assert torch.equal(
            own.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
        )


def test_only_texts_with_few_queries_share_a_call():
    """And a past in order is a slice: nothing is gathered."""

    def plan(*spans: tuple[list[int], int, int]) -> padded.Plan:
        return padded.plan(Step(spans, 4, None))

    lone, many, both = ([5, 6, 7], 9, 10), ([1, 2, 3, 4, 5, 6], 0, 22), ([3, 1], 4, 6)
    assert (
        plan(lone).few.past == slice(20, 30)
        and plan(lone).few.place is None
        and plan(lone).many == []
    )
    assert plan(many).few is None and plan(many).many == [(slice(0, 22), slice(4, 26))]
    assert plan(both).few.past.tolist() == [[12, 13, 14, 15, 4, 5]]
    mixed = plan(lone, many, both)
    assert mixed.few.rows.tolist() == [0, 23, 24] and mixed.few.place.tolist() == [0, 2, 3]
    assert mixed.few.past.tolist() == [list(range(20, 30)), [12, 13, 14, 15, 4, 5, *[12] * 4]]
    assert [own for own, _ in mixed.many] == [slice(1, 23)]
    moved = plan(([2, 1, 3, 4, 5], 0, 18)).many[0][1]
    assert moved.tolist() == [8, 9, 10, 11, 4, 5, 6, 7, *range(12, 22)]


@torch.inference_mode()
def test_which_attention_a_step_takes(compiler, monkeypatch):
    """C, if each text has few queries or scores, but not for 4 bits and float64; padded, if there is a cache."""
    monkeypatch.setattr(cpu, "SCORES", (FEW + 1) ** 2)
    called = []
    monkeypatch.setattr(native, "attend", lambda qkv, *_: called.append("C") or qkv)
    monkeypatch.setattr(padded, "look_back", lambda q, *_: called.append("padded") or q)
    full, wide = torch.float32, torch.float64
    for bits, dtype, count, c in (
        ("16", full, FEW, True),
        ("8", torch.bfloat16, 1, True),
        ("16", full, FEW + 1, True),
        ("16", full, FEW + 2, False),
        ("8/4", full, 1, False),
        ("16", wide, 1, False),
        ("8", wide, 1, False),
    ):
        step = Step(
            [([0], 0, count), ([1], 0, 1)], 20, cache(CPU(), (1, 2, 20, 1, 4), WIDTHS[bits], dtype)
        )
        q = torch.zeros(count + 1, 1, 4, dtype=dtype)
        CPU().look_back(q, q, q, step, 0)
        assert called.pop() == ("C" if c and compiler else "padded")
    assert CPU().look_back(q, q, q, Step.alone(1, 2), 0).shape == (2, 1, 4) and not called
