"""Triton's attention and store beside plain torch: in the interpreter, on a GPU, and as compiled for one."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = (
        "1"  # Triton reads it when it is imported, here or in another test
    )
pytest.importorskip("triton", reason="Triton exists for Linux only")

from checkpoint.config import Config
from conftest import SMALL
from gpu import GPU, unpack
from gpu.crosscompile import SHARED, processors
from gpu.flash import Launch, LayerStore, flash_attention, plan_launches
from gpu.graphs import Bucket, place_for, refill
from gpu.store import store_vectors
from gpu.test_crosscompile import apart
from kernels import Ops, Step, attention
from kvcache import KVCache, Store
from model import Llama
from paged import PagedCache
from quant import GROUP, int4, int8, unpack4
from test_kernels import heads_first

WIDTHS = [(16, 16), (8, 8), (8, 4), (4, 4)]


@contextmanager
def poisoned() -> Iterator[None]:
    """What the kernels' own tensors hold before they are written is not a number."""

    def empty(*size: Any, **how: Any) -> Tensor:
        made = torch.zeros(*size, **how)
        return (
            made.fill_(nan)
            if made.is_floating_point()
            else made.fill_(-128 if made.dtype != torch.uint8 else 255)
        )

    with mock.patch("torch.empty", empty):
        yield


class Texts:
    """Random keys and values of some texts in an otherwise poisoned store, and queries of their newest tokens.

    rows: every text has one block, of S tokens, and all tokens of a head lie together.
    """

    def __init__(
        self,
        counts: list[int],
        past: list[int],
        G: int,
        R: int,
        D: int,
        S: int,
        bits: tuple[int, int],
        rows: bool,
        seed: int,
        dtype: torch.dtype = torch.float32,
    ):
        torch.manual_seed(seed)
        self.counts, self.lengths, self.S, B = (
            counts,
            [n + m for n, m in zip(counts, past)],
            S,
            len(counts),
        )
        most = 1 if rows else -(-max(self.lengths) // S)
        self.tables = torch.randperm(B * most + 1)[: B * most].view(B, most)
        shape, room = (1, B * most + 1, S, G, D), heads_first if rows else Ops().room
        self.k, self.v = (
            Store.empty(shape, width, dtype, "cpu", room, group)
            for width, group in zip(bits, (GROUP, None))
        )
        for part in (*self.k.parts, *self.v.parts):
            part.fill_(nan if part.is_floating_point() else 77)
        padded = torch.randn(sum(counts) + 2, G * (R + 2), D).to(dtype)  # by two rows
        self.q = padded[:, : G * R]  # a view, as in a model
        self.plain = [
            [self._put(kept, b, torch.randn(length, G, D).to(dtype)) for kept in (self.k, self.v)]
            for b, length in enumerate(self.lengths)
        ]
        self.block, self.starts = 0 if rows else S, torch.tensor([0, *counts]).cumsum(0)

    def _put(self, kept: Store, b: int, x: Tensor) -> Tensor:
        """Where the tables say -> what was stored, [G, length, D]."""
        at = torch.arange(len(x))
        slots = self.tables[b, at // self.S] * self.S + at % self.S
        kept.write(0, slots, x)
        return kept.read(0, slots, torch.float32).transpose(0, 1)

    def expected(self) -> Tensor:
        """In float32, by the reference, from what was stored: [T, H, D]."""
        queries = self.q[:-2].float().split(self.counts)
        return torch.cat(
            [attention(q, k, v) if len(q) else q for q, (k, v) in zip(queries, self.plain)]
        )

    def attend(self, launches: list[Launch]) -> tuple[Tensor, Tensor]:
        """By the kernel -> what it wrote for the texts' tokens, and what is around it."""
        T, *rest = self.q.shape
        around = torch.full((T + 2, *rest), nan, dtype=self.q.dtype, device=DEVICE)
        k, v = (LayerStore.of(moved(kept), 0) for kept in (self.k, self.v))
        where = (x.int().to(DEVICE) for x in (self.tables, self.starts, torch.tensor(self.lengths)))
        before = [x.clone() for x in (*k[:3], *v[:3]) if x is not None]
        with poisoned():
            flash_attention(self.q.to(DEVICE), k, v, *where, launches, self.block, around[1:-1])
        for x, y in zip(
            before, (x for x in (*k[:3], *v[:3]) if x is not None)
        ):  # nothing is written into the cache
            assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        return around[1:-3].cpu(), torch.cat((around[:1], around[-3:])).cpu()


def moved(kept: Store) -> Store:
    return Store([part.to(DEVICE) for part in kept.parts], kept.bits, kept.group)


text = st.tuples(st.sampled_from([0, 1, 1, 2, 5, 17]), st.sampled_from([0, 0, 1, 30, 64, 90]))


@settings(
    deadline=None, max_examples=4, phases=(Phase.explicit, Phase.generate)
)  # to shrink takes minutes here
@example(
    [(17, 64), (0, 0)], 1, 4, 64, 1, (8, 4), True, (1, 3), 41
)  # a split whose tiles all rows see whole
@example(
    [(2, 150), (1, 0)], 1, 2, 80, 3, (4, 4), False, (10, 1), 5
)  # five groups a key; parts of ten splits
@given(
    st.lists(text, min_size=1, max_size=3).filter(lambda some: any(n for n, _ in some)),
    st.integers(1, 2),
    st.integers(1, 8),
    st.sampled_from([20, 64, 80, 128]),
    st.one_of(st.integers(1, 64), st.sampled_from([1, 16, 64])),
    st.sampled_from(WIDTHS),
    st.booleans(),
    st.sampled_from([(1, 1), (3, 1)]),
    st.integers(0, 99),
)
def test_attention_equals_the_reference(some, G, R, D, S, bits, rows, forced, seed):
    counts, past = [n for n, _ in some], [m for _, m in some]
    texts = Texts(
        counts, past, G, R, D, S if not rows else max(n + m for n, m in some), bits, rows, seed
    )
    launches = [
        launch._replace(splits=forced[launch.rows == 128])  # few rows have the first of two
        for launch in plan_launches(counts, max(texts.lengths), G * R, G, 132)
    ]
    with mock.patch("gpu.flash.LEAST_KEYS", 1):
        out, around = texts.attend(launches)
    torch.testing.assert_close(out, texts.expected(), atol=2e-5, rtol=2e-5)
    assert around.isnan().all()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("rows, forced", [(False, 4), (True, 1)])
def test_each_width_layout_and_way_to_split(bits, rows, forced):
    """Few rows, many, none, one key; of four splits, those of a text that is short have no keys at all."""
    texts = Texts(
        [1, 0, 22, 3], [0, 9, 70, 130], 1, 3, 64, 16 if not rows else 133, bits, rows, seed=1
    )
    few, many = plan_launches(texts.counts, 133, 3, 1, 132)
    assert (few.rows, many.rows, many.fewest) == (16, 128, 4)
    with mock.patch("gpu.flash.LEAST_KEYS", 1):
        out, around = texts.attend([few._replace(splits=forced), many])
    torch.testing.assert_close(out, texts.expected(), atol=2e-5, rtol=2e-5)
    assert around.isnan().all()


def test_zeros_and_scales_far_apart():
    """Keys that are all zero have a scale of 1e-30; others lie far from 0 with zeros of hundreds."""
    for bits in ((8, 8), (4, 4)):
        texts = Texts([4], [60], 1, 2, 64, 16, bits, False, seed=2)
        for b, kept in enumerate((texts.k, texts.v)):
            x = torch.randn(64, 1, 64) * torch.logspace(-6, 1, 64)[:, None, None]
            x += 30 * (torch.arange(64) % 3 == b)[:, None, None]
            x[::7] = 0
            texts.plain[0][b] = texts._put(kept, 0, x)
        out, _ = texts.attend(plan_launches([4], 64, 2, 1, 132))
        expected = texts.expected()
        assert (out - expected).abs().max() < 3e-5 * expected.abs().max()


@pytest.mark.parametrize("splits", [1, 2])
def test_a_token_without_keys_becomes_zero(splits):
    """Padding of a recorded step: what it becomes is read by the operations that follow."""
    q, kept = (
        torch.randn(3, 2, 16, device=DEVICE),
        Store([torch.full((1, 2, 4, 1, 16), nan, device=DEVICE)], 16),
    )
    starts, lengths = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 1, 3], [0, 0])
    )
    tables, own = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE), LayerStore.of(kept, 0)
    with poisoned():
        out = flash_attention(q, own, own, tables, starts, lengths, [Launch(1, 2, 16, splits)], 4)
    assert torch.equal(out, torch.zeros_like(out))


def test_wide_heads_in_float32():
    """A tile of 128 rows would need more shared memory than there is: 16 rows at a time."""
    texts = Texts([40], [5], 1, 2, 160, 16, (16, 16), False, 3)
    out, around = texts.attend(plan_launches([40], 45, 2, 1, 132))
    torch.testing.assert_close(out, texts.expected(), atol=2e-5, rtol=2e-5)
    assert around.isnan().all()


def test_a_plan_fills_the_machine_from_shapes_alone():
    def plan(counts: list[int], longest: int) -> list[Launch]:
        return plan_launches(counts, longest, 32, 8, 132)

    assert plan([1], 64) == [Launch(1, 1, 16, 1)]
    (one,) = plan([1], 8192)
    assert 30 <= one.splits <= 64 and one.rows == 16  # 8 programs would be 6 % of it
    (many,) = plan([1] * 64, 8192)
    assert many.splits == 1  # 512 programs are 1.94 rounds
    assert plan([1] * 400, 8192)[0].splits == 1
    assert [launch.rows for launch in plan([5] * 4, 1024)] == [32]
    assert plan([1, 2000, 3, 0], 4096) == [
        Launch(1, 3, 16, plan([1, 3], 4096)[0].splits),
        Launch(4, 2000, 128, 1),
    ]
    assert plan([0, 0], 10) == []
    for count in range(1, 70):  # the last round is nearly full
        (found,) = plan([1] * count, 32768)
        rounds = count * 8 * found.splits / (2 * 132)
        assert rounds / -(-rounds // 1) > 0.8


# ---- Storing ---------------------------------------------------------------------------------------------------------

sizes = st.sampled_from([0.0, 1e-38, 1e-6, 1.0, 30.0, 1e4, 3e38])
SIZES = [
    (0.0, 0.0),
    (1.0, 0.0),
    (30.0, 1e4),
    (1e-38, 0.0),
    (1e-6, 1.0),
    (3e38, 0.0),
    (3e38, 3e38),
    (0.0, 3e38),
]


@settings(deadline=None, max_examples=4)
@example(SIZES, 1, 20, (4, 4), False, 0)
@example(SIZES, 1, 6, (8, 8), True, 1)
@given(
    st.lists(st.tuples(sizes, sizes), min_size=1, max_size=3),
    st.integers(1, 2),
    st.sampled_from([6, 20, 64, 80]),
    st.sampled_from(WIDTHS),
    st.booleans(),
    st.integers(0, 99),
)
def test_storing_rounds_as_quant_does_to_the_bit(far, G, D, bits, rows, seed):
    """far: of each token, how far its numbers are from each other, and from 0. Two more tokens are halves of steps."""
    torch.manual_seed(seed)
    S, N, T = 4, 5, len(far) + 2
    loud, offset = torch.tensor([*far, (0, 0), (0, 0)]).T[:, :, None, None]
    kv = ((torch.rand(T, 2 * G + 1, D) * 2 - 1) * loud / 2 + offset / 4).to(DEVICE)
    for token, (least, most) in enumerate(
        [(-1.5, 13.5), (-100.5, 127)], T - 2
    ):  # as 4 bits count them, and as 8
        kv[token] = torch.arange(D, device=DEVICE) % 16 + 0.5
        kv[token, :, ::16], kv[token, :, 1::16] = least, most
    k, v = kv[:, :G], kv[:, G : 2 * G]
    room = heads_first if rows else Ops().room
    made = [
        Store.empty((1, N, S, G, D), width, torch.float32, DEVICE, room, group)
        for width, group in zip(bits, (GROUP, None))
    ]
    for part in (part for kept in made for part in kept.parts):
        part.fill_(77)
    slots = torch.randperm(N * S)[:T].int()
    slots[T - 3] = -1
    expected = [[part[0].clone() for part in kept.parts] for kept in made]
    store_vectors(k, v, *(LayerStore.of(kept, 0) for kept in made), slots.to(DEVICE), S)
    used = [t for t in range(T) if slots[t] >= 0]
    for x, width, group, kept, wanted in zip((k, v), bits, (GROUP, None), made, expected):
        parts = {16: lambda x: (x,), 8: int8, 4: lambda x: int4(x, group)}[width](x)  # noqa: B023
        for numbers, place, found in zip(parts, wanted, kept.parts, strict=True):
            place[slots[used].long() // S, slots[used].long() % S] = numbers[used]
            assert torch.equal(found[0], place)  # and nothing else has changed


@pytest.mark.parametrize("R, D", [(1, 64), (3, 80), (4, 6)])
def test_rotation_in_the_same_pass(R, D):
    torch.manual_seed(R)
    T, G = 3, 2
    qkv, angles = (
        torch.randn(T, G * (R + 2), D, device=DEVICE),
        torch.randn(T, 1, D // 2, device=DEVICE),
    )
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((-angles, angles), -1).sin()
    q, k, v = qkv.split((G * R, G, G), 1)
    keys, values = torch.zeros(2, 1, 1, T, G, D, device=DEVICE)
    before, slots = qkv.clone(), torch.arange(T, device=DEVICE).int()
    with poisoned():
        turned = store_vectors(
            k, v, *(LayerStore.of(Store([x], 16), 0) for x in (keys, values)), slots, T, q, cos, sin
        )
    torch.testing.assert_close(turned, Ops().rotate(q, cos, sin))
    torch.testing.assert_close(keys[0, 0], Ops().rotate(k, cos, sin))
    assert torch.equal(values[0, 0], v) and torch.equal(qkv, before)


# ---- Steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout, bits", [("rows", (4, 4)), ("blocks", (16, 16)), ("blocks", (8, 4))]
)
@torch.inference_mode()
def test_both_caches_give_the_same_logits_as_in_torch(layout, bits):
    def run(ops: Ops) -> Tensor:
        llama = Llama(Config(**SMALL | dict(num_hidden_layers=1)), DEVICE, seed=1, ops=ops)
        for place in llama.places().values():
            place.mul_(10)
        tokens = torch.arange(60, device=DEVICE) * 7 % 251
        cache = (
            KVCache.of(llama, 40, 3, bits=bits)
            if layout == "rows"
            else PagedCache.of(llama, 12, 4, bits=bits)
        )
        a, b, logits = cache.open(())[0], cache.open(())[0], []
        for n, m in ((5, 1), (1, 2)):
            step = cache.extend([(a, tokens[:n].tolist()), (b, tokens[30 : 30 + m].tolist())])
            logits.append(llama(torch.cat((tokens[:n], tokens[30 : 30 + m])), step))
        cache.truncate(a, 3)
        logits.append(llama(tokens[:2], cache.extend([(cache.fork(a), tokens[:2].tolist())])))
        return torch.cat(logits)

    expected = run(Ops())
    with mock.patch("gpu.flash_attention", mock.Mock(wraps=flash_attention)) as kernel:
        found = run(GPU(records=False))
    assert kernel.call_count == 3
    torch.testing.assert_close(found, expected, atol=5e-5 * expected.abs().max().item(), rtol=0)


@torch.inference_mode()
def test_a_refilled_bucket_is_the_step_itself():
    """Fewer texts and tokens than the bucket has: what is left over is stored nowhere and disturbs nothing."""
    torch.manual_seed(3)
    ops, bucket = GPU(records=False), Bucket(sequences=3, each=2, blocks=3)
    cache, other = (PagedCache(2, 1, 64, 9, 4, device=DEVICE) for _ in range(2))
    for kept in (cache.keys, cache.values):
        kept.parts[0].normal_()
    step = place_for(Step([([1], 0, 2), ([2], 0, 2), ([3], 0, 2)], 4, cache, DEVICE), bucket)
    pointers = [x.data_ptr() for x in step.places]
    for spans in (
        [([5, 0, 8], 9, 11), ([4], 2, 3)],
        [([7], 0, 2)],
        [([6, 2], 3, 5), ([1], 0, 1), ([3, 4, 5], 10, 12)],
    ):
        refill(step, bucket, spans)
        for kept, its in ((cache.keys, other.keys), (cache.values, other.values)):
            its.parts[0].copy_(kept.parts[0])
        alone, T = Step(spans, 4, other, DEVICE), sum(stop - start for _, start, stop in spans)
        qkv = torch.randn(6, 2 + 2, 64, device=DEVICE)
        q, k, v = qkv.split((2, 1, 1), 1)
        assert step.places.positions[:T].tolist() == [
            i for _, start, stop in spans for i in range(start, stop)
        ]
        assert step.places.slots.tolist() == [
            *(
                blocks[i // 4] * 4 + i % 4
                for blocks, start, stop in spans
                for i in range(start, stop)
            ),
            *[-1] * (6 - T),
        ]
        torch.testing.assert_close(
            ops.look_back(q, k, v, step, 1)[:T], Ops().look_back(q[:T], k[:T], v[:T], alone, 1)
        )
        for kept, its in ((cache.keys, other.keys), (cache.values, other.values)):
            assert torch.equal(kept.parts[0], its.parts[0])
        cos, sin = torch.randn(2, 6, 1, 64, device=DEVICE)
        expected = Ops().attend(qkv[:T], 1, cos[:T], sin[:T], alone, 0)
        torch.testing.assert_close(ops.attend(qkv, 1, cos, sin, step, 0)[:T], expected)
    assert pointers == [x.data_ptr() for x in step.places]
    for spans in ([([1], 0, 3)], [([1, 2, 3, 4], 12, 13)], [([1], 0, 1)] * 4):
        before = [x.clone() for x in step.places]
        with pytest.raises(ValueError, match="do not fit Bucket.*: take a larger bucket"):
            refill(step, bucket, spans)
        assert all(map(torch.equal, before, step.places))


@pytest.mark.skipif(
    DEVICE == "cpu",
    reason="test_contract.py has a whole model for the interpreter, and a smaller one",
)
@torch.inference_mode()
def test_the_embedded_model_says_the_same():
    def greedy(ops: Ops) -> list[int]:
        llama = Llama.load("tiny", DEVICE, torch.float32, trainable=True).requires_grad_(False)
        llama.ops = ops
        cache = PagedCache.of(llama.prepare(), 3, 4)
        seq, tokens, text = cache.open(())[0], torch.arange(5, 11, device=DEVICE), []
        for _ in range(4):
            tokens = llama(
                tokens, cache.extend([(seq, tokens.tolist())]), rows=slice(-1, None)
            ).argmax(-1)
            text += tokens.tolist()
        return text

    assert greedy(GPU(records=False)) == greedy(Ops())


@pytest.mark.parametrize("bits", WIDTHS)
@torch.inference_mode()
def test_float64_is_computed_in_float64_or_from_what_is_stored(bits):
    """A cache of float64 is plain torch's, to the bit; in fewer bits the kernels read it, in float32."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, 16, dtype=torch.float64, device=DEVICE) for heads in (4, 2, 2))
    found = []
    for ops in (GPU(records=False), Ops()):
        cache = KVCache(1, 2, 16, 9, 1, DEVICE, torch.float64, bits, ops)
        found.append(ops.look_back(q, k, v, cache.extend([(cache.open(())[0], range(3))]), 0))
    assert found[0].dtype == torch.float64
    torch.testing.assert_close(*found, rtol=0, atol=0 if bits == (16, 16) else 1e-5)


# ---- The compiler, and the machine -----------------------------------------------------------------------------------


def emulate(asm: str, outputs: int, *words: int) -> list[int]:
    """What a few PTX instructions make of words that come after their outputs."""
    registers = {f"${outputs + i}": word for i, word in enumerate(words)}

    def pair(kind: torch.dtype, x: int) -> Tensor:
        return torch.tensor([x], dtype=torch.int64).to(torch.int32).view(kind)

    def bits(x: Tensor) -> int:
        return int(x.view(torch.int32)) & 0xFFFFFFFF

    for instruction in re.sub(r"\.reg[^;]*;", "", asm.strip("{} \n")).split(";"):
        if not (parts := instruction.replace(",", " ").split()):
            continue
        name, out, *given = parts
        values = [registers[x] if x in registers else int(re.sub("^0f", "0x", x), 0) for x in given]
        if name == "prmt.b32":
            source = (values[0] | values[1] << 32).to_bytes(8, "little")
            registers[out] = sum(source[values[2] >> 4 * i & 15] << 8 * i for i in range(4))
        elif name in ("sub.rn.f16x2", "sub.f32"):
            kind = torch.float32 if name == "sub.f32" else torch.float16
            registers[out] = bits(pair(kind, values[0]) - pair(kind, values[1]))
        elif name == "lop3.b32":
            assert values[3] == 0xEA  # the table of (a & b) | c
            registers[out] = values[0] & values[1] | values[2]
        else:
            registers[out] = {
                "mov.b32": lambda a: a,
                "xor.b32": int.__xor__,
                "shr.u32": int.__rshift__,
                "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
            }[name](*values)
    return [registers[f"${i}"] for i in range(outputs)]


def numbers(words: list[int], dtype: torch.dtype) -> Tensor:
    """Two in a word."""
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(dtype)


@pytest.mark.parametrize(
    "name, dtype", [("K8", torch.float16), ("V8", torch.bfloat16), ("V4", torch.bfloat16)]
)
def test_bytes_become_numbers(name, dtype):
    """The interpreter does not run these instructions, so they are followed one by one."""
    for first in range(0, 256, 4):
        packed = torch.tensor([first, first + 1, first + 2, first + 3], dtype=torch.uint8)
        expected = unpack4(packed) + 16 if name == "V4" else packed.view(torch.int8)
        word = int(packed.view(torch.int32)) & 0xFFFFFFFF
        found = numbers(emulate(getattr(unpack, name).value, len(expected) // 2, word), dtype)
        if name[1] != "8" or -128 not in expected.tolist():  # which is never stored
            assert torch.equal(found, expected.to(dtype))


OTHERS = [
    (90, "3B", (16, 16), "bf16"),
    *(
        (*kind, "fp32")
        for kind in ((80, "8B", (4, 4)), (90, "wide", (16, 16)), (80, "wide", (16, 16)))
    ),
]


def compiled(*kinds: tuple[int, str, int, int]) -> tuple[list[Any], list[Any], list[Any]]:
    """Attention's rows for each architecture and model, storing's, and reports of OTHERS."""
    tables = [
        ["gpu.flash", "attention_table", [arch], [model], rows] for arch, model, *rows in kinds
    ]
    others = [["gpu.flash", "compile_attention", *what, 128, 16, kind] for *what, kind in OTHERS]
    stored, *done = apart(
        "gpu.test_crosscompile", "several", ["gpu.store", "store_table", [90, 80]], *tables, *others
    )
    return [row for rows in done[: len(tables)] for row in rows], stored, done[len(tables) :]


@pytest.mark.meanwhile(compiled, (90, "8B", 16, 32, 64, 128), (80, "8B", 128), (90, "1B", 16, 128))
def test_what_the_compiler_makes_of_the_kernels(meanwhile):
    """For 8B and 1B, all widths: nothing spilled, shared memory that fits, prompts by `wgmma` where there is one, and
    keys are copied while others are multiplied. In float32 tiles that fit, and tensor cores: products of single numbers
    would be unrolled, and spilled."""
    rows, stored, others = meanwhile()
    assert len(rows) == 4 * (4 + 1 + 2) + 3
    for arch, model, kind, M, registers, spills, shared, ahead, wgmma, programs in rows:
        what = f"sm_{arch} {model} {kind} M = {M}: {registers} registers"
        assert spills == 0 and shared <= SHARED[arch], what
        assert (ahead > 0) == (kind != "merge"), what
        assert (wgmma > 0) == (arch == 90 and M >= 64), what
        assert programs >= (1 if M > 16 else 3), what
    for arch, D, bits, registers, spills, shared in stored:
        assert spills == 0 and registers <= 128 and shared < 4096, f"sm_{arch} {D} {bits}"
    for (arch, *_, kind), (_, spills, shared, ahead, ptx, *_) in zip(OTHERS, others):
        assert shared <= SHARED[arch] and spills < (1024 if kind == "fp32" else 1)
        assert (".tf32" in ptx) == (kind == "fp32") and (ahead > 0 or arch == 80)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter has no 16-bit products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("rows", [False, True])
def test_16_bits_on_the_machine(dtype, bits, rows):
    for counts, past in (
        ([1] * 9, [1000 + 13 * i for i in range(9)]),
        ([5, 1, 8], [4000, 0, 333]),
        ([700, 1, 0, 33], [300, 77, 5, 2000]),
        ([16], [100]),
    ):
        for D in (64, 80, 128):
            texts = Texts(counts, past, 8, 4, D, 16 if not rows else 4005, bits, rows, 1, dtype)
            longest, expected = max(texts.lengths), texts.expected()
            for forced in (None, 5):
                launches = plan_launches(
                    counts, longest, 32, 8, processors(torch.device(DEVICE, 0))
                )
                out, around = texts.attend(
                    [launch._replace(splits=forced or launch.splits) for launch in launches]
                )
                assert (
                    out.float() - expected
                ).norm() < 1e-2 * expected.norm() and around.isnan().all()
