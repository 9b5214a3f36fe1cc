"""Triton's attention and store beside plain torch: in the interpreter, as compiled for a GPU that is not there, and on one that is."""
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
    os.environ["TRITON_INTERPRET"] = "1"                # Triton reads it when it is imported, which is here or in another test like this
pytest.importorskip("triton", reason="Triton exists for Linux only")

import kvcache
import native
import paged
import unpack
from conftest import SMALL
from config import Config
from crosscompile import SHARED, apart
from flash import Launch, Pool, attend, plan
from kernels import attention, processors
from kernelstep import Bucket, KernelStep
from kvquant import GROUP, KVStore
from kvquant import store as room
from model import Llama, rotate
from quant import int4, int8, unpack4
from store import store

WIDTHS = [(16, 16), (8, 8), (8, 4), (4, 4)]
Kept = Tensor | KVStore


@contextmanager
def poisoned() -> Iterator[None]:
    """What the kernels' own tensors hold before they are written is not a number."""
    def empty(*size: Any, **how: Any) -> Tensor:
        made = torch.zeros(*size, **how)
        return made.fill_(nan) if made.is_floating_point() else made.fill_(-128 if made.dtype != torch.uint8 else 255)
    with mock.patch("torch.empty", empty):
        yield


def parts(kept: Kept) -> tuple[Tensor, ...]:
    return getattr(kept, "parts", (kept,))


class Texts:
    """Random keys and values of some texts in a pool whose other places are poisoned, and queries of their newest tokens.

    rows: every text has one block, of S tokens, laid out as in the contiguous cache.
    """

    def __init__(self, counts: list[int], past: list[int], G: int, R: int, D: int, S: int, bits: tuple[int, int], rows: bool, seed: int,
                 dtype: torch.dtype = torch.float32):
        torch.manual_seed(seed)
        self.counts, self.lengths, self.S, B = counts, [n + m for n, m in zip(counts, past)], S, len(counts)
        if rows:
            shape, self.tables = (B + 1, G, S, D), torch.randperm(B + 1)[:B, None]
        else:
            most = -(-max(self.lengths) // S)
            shape, self.tables = (B * most + 1, S, G, D), torch.randperm(B * most + 1)[:B * most].view(B, most)
        pools = [room(shape, width, "cpu", dtype, group) for width, group in zip(bits, (GROUP, None))]
        for part in (part for pool in pools for part in parts(pool)):
            part.fill_(nan if part.is_floating_point() else 77)
        self.k, self.v = (pool.transpose(1, 2) if rows else pool for pool in pools)                          # [N, S, G, D]
        self.q = torch.randn(sum(counts) + 2, G * (R + 2), D).to(dtype)[:, :G * R]                           # two rows of padding; a view, as the model has
        self.plain = [[self._put(pool, b, torch.randn(length, G, D).to(dtype)) for pool in (self.k, self.v)] for b, length in enumerate(self.lengths)]
        self.block, self.query_start = 0 if rows else S, torch.tensor([0, *counts]).cumsum(0)

    def _put(self, pool: Kept, b: int, x: Tensor) -> Tensor:
        """Where the tables say -> what was stored, [G, length, D]."""
        at = torch.arange(len(x))
        blocks, within = self.tables[b, at // self.S], at % self.S
        kept = room(x.shape, {1: 16, 2: 8, 3: 4}[len(parts(pool))], "cpu", x.dtype, getattr(pool, "group", None))
        kept.copy_(x)
        for place, numbers in zip(parts(pool), parts(kept)):
            place[blocks, within] = numbers
        return kept.to(torch.float32).transpose(0, 1)

    def expected(self) -> Tensor:
        """In float32, by the reference, from what was stored: [T, H, D]."""
        queries = self.q[:-2].float().split(self.counts)
        return torch.cat([attention(q, k, v) if len(q) else q for q, (k, v) in zip(queries, self.plain)])

    def attend(self, launches: list[Launch]) -> tuple[Tensor, Tensor]:
        """By the kernel -> what it wrote for the texts' tokens, and what is around it."""
        T, *rest = self.q.shape
        around = torch.full((T + 2, *rest), nan, dtype=self.q.dtype, device=DEVICE)
        k, v = (Pool.of(move(pool)) for pool in (self.k, self.v))
        where = (x.int().to(DEVICE) for x in (self.tables, self.query_start, torch.tensor(self.lengths)))
        before = [x.clone() for x in (*k[:3], *v[:3]) if x is not None]
        with poisoned():
            attend(self.q.to(DEVICE), k, v, *where, launches, self.block, around[1:-1])
        for x, y in zip(before, (x for x in (*k[:3], *v[:3]) if x is not None)):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))                                    # nothing is written into the cache
        return around[1:-3].cpu(), torch.cat((around[:1], around[-3:])).cpu()


def move(kept: Kept) -> Kept:
    return kept.to(DEVICE) if isinstance(kept, Tensor) else KVStore([part.to(DEVICE) for part in kept.parts])


text = st.tuples(st.sampled_from([0, 1, 1, 2, 5, 17]), st.sampled_from([0, 0, 1, 30, 64, 150]))


@settings(deadline=None, max_examples=9, phases=(Phase.explicit, Phase.generate))                           # to shrink takes minutes here
@example([(17, 64), (0, 0)], 1, 6, 64, 1, (8, 4), True, 3, 41)                                               # a split whose tiles all rows see whole
@given(st.lists(text, min_size=1, max_size=3).filter(lambda some: any(n for n, _ in some)), st.integers(1, 2), st.integers(1, 8),
       st.sampled_from([20, 64, 80, 128]), st.one_of(st.integers(1, 64), st.sampled_from([1, 16, 64])), st.sampled_from(WIDTHS), st.booleans(),
       st.sampled_from([1, 3]), st.integers(0, 99))
def test_attention_equals_the_reference(some, G, R, D, S, bits, rows, forced, seed):
    counts, past = [n for n, _ in some], [m for _, m in some]
    texts = Texts(counts, past, G, R, D, S if not rows else max(n + m for n, m in some), bits, rows, seed)
    launches = [launch._replace(splits=forced) for launch in plan(counts, max(texts.lengths), G * R, G, 132)]
    with mock.patch("flash.LEAST_KEYS", 1):
        out, around = texts.attend(launches)
    torch.testing.assert_close(out, texts.expected(), atol=2e-5, rtol=2e-5)
    assert around.isnan().all()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("rows, forced", [(False, 4), (True, 1)])
def test_each_width_layout_and_way_to_split(bits, rows, forced):
    """Few rows, many, none, one key; of four splits, those of a text that is short have no keys at all."""
    texts = Texts([1, 0, 40, 1, 3], [0, 9, 126, 200, 130], 1, 3, 64, 16 if not rows else 201, bits, rows, seed=1)
    launches = [launch._replace(splits=forced) for launch in plan(texts.counts, 201, 3, 1, 132)]
    assert [launch.rows for launch in launches] == [16, 128] and launches[1].fewest == 4
    with mock.patch("flash.LEAST_KEYS", 1):
        out, around = texts.attend(launches)
    torch.testing.assert_close(out, texts.expected(), atol=2e-5, rtol=2e-5)
    assert around.isnan().all()


def test_zeros_and_scales_far_apart():
    """Keys that are all zero have a scale of 1e-30; others lie far from 0 with zeros of hundreds."""
    for bits in ((8, 8), (4, 4)):
        texts = Texts([4], [60], 1, 2, 64, 16, bits, False, seed=2)
        for b, pool in enumerate((texts.k, texts.v)):
            x = torch.randn(64, 1, 64) * torch.logspace(-6, 1, 64)[:, None, None] + 30 * (torch.arange(64) % 3 == b)[:, None, None]
            x[::7] = 0
            texts.plain[0][b] = texts._put(pool, 0, x)
        out, _ = texts.attend(plan([4], 64, 2, 1, 132))
        expected = texts.expected()
        assert (out - expected).abs().max() < 3e-5 * expected.abs().max()


def test_a_plan_fills_the_machine_from_shapes_alone():
    H, G, processors = 32, 8, 132
    assert plan([1], 64, H, G, processors) == [Launch(1, 1, 16, 1)]
    one, = plan([1], 8192, H, G, processors)
    assert 30 <= one.splits <= 64 and one.rows == 16                                                         # 8 programs would be 6 % of it
    many, = plan([1] * 64, 8192, H, G, processors)
    assert many.splits == 1                                                                                  # 512 programs are 1.94 rounds
    assert plan([1] * 400, 8192, H, G, processors)[0].splits == 1
    assert [launch.rows for launch in plan([5] * 4, 1024, H, G, processors)] == [32]
    assert plan([1, 2000, 3, 0], 4096, H, G, processors) == [Launch(1, 3, 16, plan([1, 3], 4096, H, G, processors)[0].splits), Launch(4, 2000, 128, 1)]
    assert plan([0, 0], 10, H, G, processors) == []
    for count in range(1, 70):                                                                               # the last round is nearly full
        found, = plan([1] * count, 32768, H, G, processors)
        rounds = count * G * found.splits / (2 * processors)
        assert rounds / -(-rounds // 1) > 0.8


# ---- Storing ----------------------------------------------------------------------------------------------------------------------

numbers = st.sampled_from([0.0, 1e-38, 1e-6, 1.0, 30.0, 1e4, 3e38])


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([6, 20, 64, 80]), st.sampled_from(WIDTHS), st.booleans(), numbers, numbers, st.integers(0, 99))
def test_storing_rounds_as_quant_does_to_the_bit(T, G, D, bits, rows, loud, offset, seed):
    torch.manual_seed(seed)
    S, N = 4, 5
    kv = ((torch.rand(T, 2 * G + 1, D) * 2 - 1) * loud / 2 + offset / 4).to(DEVICE)
    kv[0, 0] = 0
    k, v = kv[:, :G], kv[:, G:2 * G]
    pools = [room((N, G, S, D) if rows else (N, S, G, D), width, DEVICE, torch.float32, group) for width, group in zip(bits, (GROUP, None))]
    for part in (part for pool in pools for part in parts(pool)):
        part.fill_(77)
    slots = torch.randperm(N * S)[:T].int()
    slots[T // 2] = -1
    expected = [Pool.of(pool if not rows else pool.transpose(1, 2)) for pool in ([part.clone() for part in parts(pool)][0] if width == 16 else
                KVStore([part.clone() for part in parts(pool)]) for pool, width in zip(pools, bits))]
    seen = [pool.transpose(1, 2) if rows else pool for pool in pools]                                        # [N, S, G, D]
    store(k, v, *map(Pool.of, seen), slots.to(DEVICE), S)
    kept = [t for t in range(T) if slots[t] >= 0]
    for x, width, group, pool, wanted in zip((k, v), bits, (GROUP, None), seen, expected):
        for numbers, place, found in zip({16: lambda x: (x,), 8: int8, 4: lambda x: int4(x, group)}[width](x), wanted, parts(pool)):
            place[slots[kept].long() // S, slots[kept].long() % S] = numbers[kept]
            assert torch.equal(found, place)                                                                 # and nothing else has changed


@pytest.mark.parametrize("R, D", [(1, 64), (3, 80), (4, 6)])
def test_rotation_in_the_same_pass(R, D):
    torch.manual_seed(R)
    T, G = 3, 2
    qkv, angles = torch.randn(T, G * (R + 2), D, device=DEVICE), torch.randn(T, 1, D // 2, device=DEVICE)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((-angles, angles), -1).sin()
    q, k, v = qkv.split((G * R, G, G), 1)
    keys, values = torch.zeros(2, T, G, D, device=DEVICE)
    before = qkv.clone()
    with poisoned():
        turned = store(k, v, Pool.of(keys[None]), Pool.of(values[None]), torch.arange(T, device=DEVICE).int(), T, q, cos, sin)
    torch.testing.assert_close(turned, rotate(q, cos, sin))
    torch.testing.assert_close(keys, rotate(k, cos, sin))
    assert torch.equal(values, v) and torch.equal(qkv, before)


# ---- Steps ------------------------------------------------------------------------------------------------------------------------

@contextmanager
def in_triton() -> Iterator[None]:
    """The caches' steps are those of a GPU, wherever their tensors are."""
    with (mock.patch.object(kvcache, "in_place", lambda *_: True), mock.patch.object(paged, "in_place", lambda *_: True),
          mock.patch.object(native, "library", lambda: None)):
        yield


def loud_llama() -> Llama:
    llama = Llama(Config(**SMALL), DEVICE, seed=1)
    for place in llama.places().values():
        place.mul_(10)
    return llama


@pytest.mark.parametrize("bits", [(16, 16), (8, 4), (4, 4)])
@torch.inference_mode()
def test_both_caches_give_the_same_logits_as_in_torch(bits):
    llama = loud_llama()
    c, tokens = llama.config, torch.arange(60, device=DEVICE) * 7 % 251
    kinds = [lambda: llama.cache(40, 3, bits=bits),
             lambda: paged.PagedCache(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, 12, 4, device=DEVICE, dtype=torch.float32, bits=bits)]

    def run(make: Any) -> Tensor:
        cache, logits = make(), []
        a, b = cache.open(())[0], cache.open(())[0]
        for sizes in ((9, 1), (1, 1), (2, 5)):
            step = cache.extend([(a, tokens[:sizes[0]].tolist()), (b, tokens[30:30 + sizes[1]].tolist())])
            logits.append(llama(torch.cat((tokens[:sizes[0]], tokens[30:30 + sizes[1]])), step))
        cache.truncate(a, 7)
        logits.append(llama(tokens[:2], cache.extend([(cache.fork(a), tokens[:2].tolist())])))
        return torch.cat(logits)

    for make in kinds:
        with mock.patch.object(kvcache, "in_place", lambda *_: False), mock.patch.object(paged, "in_place", lambda *_: False), mock.patch.object(native, "library", lambda: None):
            expected = run(make)
        with in_triton():
            found = run(make)
        torch.testing.assert_close(found, expected, atol=5e-5 * expected.abs().max().item(), rtol=0)


@torch.inference_mode()
def test_a_refilled_bucket_is_the_step_itself():
    """Fewer texts and tokens than the bucket has: what is left over is stored nowhere and disturbs nothing."""
    torch.manual_seed(3)
    keys, values = torch.randn(2, 2, 9, 4, 2, 64, device=DEVICE).unbind()                                    # [L, N, S, G, D]
    bucket = Bucket(sequences=3, each=2, blocks=3)
    step = KernelStep(keys, values, [([1], 0, 2), ([2], 0, 2), ([3], 0, 2)], 4, bucket=bucket)
    pointers = [x.data_ptr() for x in (step.positions, step.places.slots, step.places.query_start, step.places.lengths, step.places.tables)]
    for spans in ([([5, 0, 8], 9, 11), ([4], 2, 3)], [([7], 0, 2)], [([6, 2], 3, 5), ([1], 0, 1), ([3, 4, 5], 10, 12)]):
        step.refill(spans)
        alone, T = KernelStep(keys.clone(), values.clone(), spans, 4), sum(stop - start for _, start, stop in spans)
        qkv = torch.randn(6, 4 + 4, 64, device=DEVICE)
        q, k, v = qkv.split((4, 2, 2), 1)
        assert step.positions[:T].tolist() == [i for _, start, stop in spans for i in range(start, stop)] and step.places.slots[T:].tolist() == [-1] * (6 - T)
        assert step.places.slots[:T].tolist() == [blocks[i // 4] * 4 + i % 4 for blocks, start, stop in spans for i in range(start, stop)]
        torch.testing.assert_close(step.attend(1, q, k, v)[:T], alone.attend(1, q[:T], k[:T], v[:T]))
        assert torch.equal(keys, alone.keys) and torch.equal(values, alone.values)
        cos, sin = torch.randn(2, 6, 1, 64, device=DEVICE)
        turned = rotate(qkv[:, :6], cos, sin)
        one = step.attend_turned(0, qkv, cos, sin)[:T]
        torch.testing.assert_close(one, alone.attend(0, turned[:T, :4], turned[:T, 4:], v[:T]))
    assert pointers == [x.data_ptr() for x in (step.positions, step.places.slots, step.places.query_start, step.places.lengths, step.places.tables)]
    for spans in ([([1], 0, 3)], [([1, 2, 3, 4], 12, 13)], [([1], 0, 1)] * 4):
        before = step._buffer.clone()
        with pytest.raises(ValueError, match="do not fit Bucket.*: take a larger bucket"):
            step.refill(spans)
        assert torch.equal(before, step._buffer)


@torch.inference_mode()
def test_the_embedded_model_says_the_same():
    llama = Llama.load("tiny", DEVICE, torch.float32)
    prompt = torch.arange(5, 11, device=DEVICE)

    def greedy() -> list[int]:
        c = llama.config
        cache = paged.PagedCache(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, 3, 4, device=DEVICE, dtype=torch.float32)
        seq, tokens, text = cache.open(())[0], prompt, []
        for _ in range(4):
            tokens = llama(tokens, cache.extend([(seq, tokens.tolist())]), rows=slice(-1, None)).argmax(-1)
            text += tokens.tolist()
        return text

    expected = greedy()
    with in_triton():
        assert greedy() == expected


# ---- The compiler, and the machine ------------------------------------------------------------------------------------------------

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
            assert values[3] == 0xEA                                                                         # the table of (a & b) | c
            registers[out] = values[0] & values[1] | values[2]
        else:
            registers[out] = {"mov.b32": lambda a: a, "xor.b32": int.__xor__, "shr.u32": int.__rshift__,
                              "shl.b32": lambda a, b: a << b & 0xFFFFFFFF}[name](*values)
    return [registers[f"${i}"] for i in range(outputs)]


def numbers(words: list[int], dtype: torch.dtype) -> Tensor:
    """Two in a word."""
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(dtype)


@pytest.mark.parametrize("name, dtype", [("K8", torch.float16), ("V8", torch.bfloat16), ("V4", torch.bfloat16)])
def test_bytes_become_numbers(name, dtype):
    """The interpreter does not run these instructions, so they are followed one by one."""
    for first in range(0, 256, 4):
        packed = torch.tensor([first, first + 1, first + 2, first + 3], dtype=torch.uint8)
        expected = unpack4(packed) + 16 if name == "V4" else packed.view(torch.int8)
        found = numbers(emulate(getattr(unpack, name).value, len(expected) // 2, int(packed.view(torch.int32)) & 0xFFFFFFFF), dtype)
        if name[1] != "8" or -128 not in expected.tolist():                                                  # which is never stored
            assert torch.equal(found, expected.to(dtype))


def compiled(*kinds: tuple[int, str]) -> tuple[list[Any], list[Any], list[Any]]:
    """Attention's rows for each architecture and model, storing's, and what attention takes in float32."""
    tables = [["flash", "table", [arch], [model], [16, 128]] for arch, model in kinds]
    wide = [["flash", "compiled", arch, "8B", [4, 4], 128, 0, "fp32"] for arch in SHARED]
    stored, *done = apart("test_crosscompile", "several", ["store", "table", [90, 80]], *tables, *wide)
    return [row for rows in done[:len(tables)] for row in rows], stored, done[len(tables):]


@pytest.mark.meanwhile(compiled, (90, "8B"), (80, "8B"), (90, "1B"))
def test_what_the_compiler_makes_of_the_kernels(meanwhile):
    """For 8B and 1B, all widths: nothing spilled, shared memory that fits, prompts by `wgmma` where there is one. In float32, which is for
    exactness, tiles that fit, and tensor cores: products of single numbers would be unrolled, and spilled."""
    rows, stored, wide = meanwhile()
    assert len(rows) == 3 * 9
    for arch, model, kind, M, registers, spills, shared, wgmma, programs in rows:
        what = f"sm_{arch} {model} {kind} M = {M}: {registers} registers"
        assert spills == 0 and shared <= SHARED[arch], what
        assert (wgmma > 0) == (arch == 90 and M == 128), what
        assert programs >= (1 if M > 16 else 3), what
    for arch, D, bits, registers, spills, shared in stored:
        assert spills == 0 and registers <= 128 and shared < 4096, f"sm_{arch} {D} {bits}"
    for most, (_, spills, shared, ptx, _) in zip(SHARED.values(), wide):
        assert shared <= most and spills < 1024 and ".tf32" in ptx


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter has no 16-bit products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("rows", [False, True])
def test_16_bits_on_the_machine(dtype, bits, rows):
    for counts, past in (([1] * 9, [1000 + 13 * i for i in range(9)]), ([5, 1, 8], [4000, 0, 333]), ([700, 1, 0, 33], [300, 77, 5, 2000]), ([16], [100])):
        for D in (64, 80, 128):
            texts = Texts(counts, past, 8, 4, D, 16 if not rows else 4005, bits, rows, 1, dtype)
            longest, expected = max(texts.lengths), texts.expected()
            for forced in (None, 5):
                launches = plan(counts, longest, 32, 8, processors(torch.device(DEVICE, 0)))
                out, around = texts.attend(launches if forced is None else [launch._replace(splits=forced) for launch in launches])
                assert (out.float() - expected).norm() < 1e-2 * expected.norm() and around.isnan().all()
