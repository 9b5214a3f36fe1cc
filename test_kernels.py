"""Attention against two loops and a softmax; and the contract of `Ops`, which every backend's operations keep (cpu/, gpu/)."""
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import write_drafts
from kernels import Flash, Linear, Ops, Step, attention, triton
from kvcache import KVCache, Store
from model import Llama
from quant import GROUP, Bits, dequantize, quantize
from request import Request, Round, Settings
from sampling import Keyed, probabilities
from weights import Config

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}       # about four roundings
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def slow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The definition, in float64."""
    (n, H, D), (G, m, _) = q.shape, k.shape
    out = torch.zeros(n, H, D, dtype=torch.float64)
    for i in range(n):
        for h in range(H):
            seen, g = i + m - n + 1, h // (H // G)
            scores = [float(q[i, h].double() @ k[g, j].double()) / math.sqrt(D) for j in range(seen)]
            weights = [math.exp(s - max(scores)) for s in scores]
            out[i, h] = sum(w / sum(weights) * v[g, j].double() for j, w in enumerate(weights))
    return out


def as_the_model_does(n: int, m: int, G: int, R: int, D: int, dtype: torch.dtype, of_a_cache: bool, loud: float = 1.0) -> Tensors:
    """q out of a row of q, k and v together; k and v as views of a larger store, or transposed out of that same row. None contiguous."""
    qkv = torch.randn(m, G * R + 2 * G, D).to(dtype)
    q, k, v = qkv.split((G * R, G, G), dim=1)
    q, k, v = q[m - n:] * loud if loud != 1 else q[m - n:], k.transpose(0, 1), v.transpose(0, 1)
    if of_a_cache:
        store = torch.full((2, 3, G, m + 4, D), math.nan, dtype=dtype)                                   # what lies beyond is not ours
        store[0, 1, :, :m], store[1, 1, :, :m] = k, v
        k, v = store[0, 1, :, :m], store[1, 1, :, :m]
    return q, k, v


@settings(deadline=None, max_examples=120)
@given(n=st.integers(1, 5), past=st.integers(0, 6), G=st.integers(1, 3), R=st.integers(1, 4), D=st.sampled_from([2, 6, 16]),
       dtype=st.sampled_from(list(TOLERANCE)), of_a_cache=st.booleans(), seed=st.integers(0, 99))
def test_equals_the_loops(n, past, G, R, D, dtype, of_a_cache, seed):
    torch.manual_seed(seed)
    q, k, v = as_the_model_does(n, n + past, G, R, D, dtype, of_a_cache)
    out = attention(q, k, v)
    assert out.dtype == dtype and out.shape == q.shape
    torch.testing.assert_close(out.double(), slow(q, k, v), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("n, m", [(1, 1), (1, 300), (2, 300), (70, 300), (257, 257)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_longer_than_a_tile(n, m, dtype):
    torch.manual_seed(n)
    q, k, v = as_the_model_does(n, m, 2, 3, 8, dtype, True)
    wide = attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(attention(q, k, v).double(), wide, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for i in {0, n // 2, n - 1}:                                     # the loops, for a few queries: query i is the last of its own past
        torch.testing.assert_close(wide[i:i + 1], slow(q[i:i + 1], k[:, :m - n + i + 1], v[:, :m - n + i + 1]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("n", [1, 3, 6])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_last_query_sees_everything_and_none_sees_its_future(n, dtype):
    """Aligned top-left, the first query would see key 0 alone and the result would not change with key 4."""
    q, k, v = torch.zeros(n, 2, 4, dtype=dtype), torch.zeros(1, 6, 4, dtype=dtype), torch.arange(6, dtype=dtype)[None, :, None].expand(1, 6, 4)
    expected = torch.tensor([sum(range(j)) / j for j in range(6 - n + 1, 7)], dtype=dtype)       # equal scores: the mean of what is seen
    torch.testing.assert_close(attention(q, k, v), expected[:, None, None].expand(n, 2, 4), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_each_group_of_queries_has_its_own_head():
    """H = 6 query heads on G = 2: the first three look at head 0, the others at head 1."""
    k, v = torch.zeros(2, 5, 4), torch.tensor([1.0, 2.0])[:, None, None].expand(2, 5, 4)
    for n in (1, 2, 5):
        assert attention(torch.randn(n, 6, 4), k, v)[:, :, 0].tolist() == [[1, 1, 1, 2, 2, 2]] * n


@pytest.mark.parametrize("n", [1, 4, 7])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scores_whose_exponentials_overflow(n, dtype):
    torch.manual_seed(n)
    q, k, v = as_the_model_does(n, 7, 2, 2, 16, dtype, True, loud=1000.0)
    out = attention(q, k, v)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), slow(q, k, v), atol=TOLERANCE[dtype], rtol=10 * TOLERANCE[dtype])


# ---- The contract -------------------------------------------------------------------------------------------------------------

ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def amid(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, not contiguous, among others that must not be used."""
    room = torch.full((*x.shape[:-1], x.shape[-1] + 3), 1000.0, dtype=x.dtype)
    room[..., :-3] = x
    return room[..., :-3]


def heads_first(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """[L, N, S, G, D], in memory with all tokens of a head together."""
    L, N, S, G, D = shape
    return torch.empty((L, G, N, S, D), dtype=dtype, device=device).permute(0, 2, 3, 1, 4)


def poison(kept: Store) -> None:
    for part in kept.parts:
        part.fill_(math.nan if part.is_floating_point() else 77)


class Contract:
    """Ragged shapes, poisoned surroundings, against the definitions in float64. A backend's test has its own `ops`."""

    ops: Ops
    dtypes = tuple(ROUNDING)
    examples = 25

    def close(self, got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, size: Any = 1.0) -> None:
        """size: what rounding is relative to."""
        assert got.dtype == dtype and got.shape == wanted.shape
        least = max(1e-30, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)                  # float16 ends at 6e-8
        assert ((got.double() - wanted).abs() <= ROUNDING[dtype] * torch.as_tensor(size) + least).all()

    def check(self, *strategies: Any, **named: Any) -> Any:
        """hypothesis, with this backend's number of examples."""
        return lambda body: settings(deadline=None, max_examples=self.examples)(given(*strategies, **named)(body))()

    @pytest.mark.parametrize("bits", [16, 8, 4])
    def test_products_and_look_ups(self, bits):
        @self.check(st.integers(0, 70), st.integers(1, 40), st.integers(1, 150), st.sampled_from(self.dtypes), st.booleans(),
                    st.integers(0, 2**30))
        def body(T, N, K, dtype, bias, seed):
            torch.manual_seed(seed)
            w, x = torch.randn(N, K).to(dtype), amid(torch.randn(T, K).to(dtype))
            kept, bias = w if bits == 16 else quantize(w, bits, 32), torch.randn(N).to(dtype) if bias else None
            wide = w.double() if bits == 16 else dequantize(*kept, dtype=torch.float64)
            more = torch.zeros(N, dtype=torch.float64) if bias is None else bias.double()
            ready = self.ops.prepare(Linear(kept, bias), dtype, looked_up=True)
            size = x.double().abs() @ wide.abs().T + more.abs()
            self.close(self.ops.linear(x, ready), x.double() @ wide.T + more, dtype, size)
            which = torch.randint(N, (5,))
            self.close(self.ops.embed(which, ready, dtype), wide[which], dtype, wide[which].abs())

    def test_between_the_products(self):
        @self.check(st.integers(0, 5), st.integers(1, 40), st.integers(1, 4), st.sampled_from(self.dtypes), st.booleans(),
                    st.integers(0, 2**30))
        def body(T, C, heads, dtype, first, seed):
            torch.manual_seed(seed)
            x, delta, wide = (amid(torch.randn(T, size).to(dtype) * 3) for size in (C, C, 2 * C))
            weight = torch.randn(C).to(dtype)
            total, y = self.ops.add_norm(x, None if first else delta, weight, 1e-5)
            whole = x.double() if first else (x + delta).double()
            self.close(total, whole, dtype, whole.abs())
            norm = whole / (whole.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
            self.close(y, norm, dtype, 2 * norm.abs())
            gate, up = wide.double().chunk(2, -1)
            wanted = gate * gate.sigmoid() * up
            self.close(self.ops.swiglu(wide), wanted, dtype, 2 * wanted.abs() + up.abs() * 1e-6)
            qkv, angles = torch.randn(T, heads + 2, 2 * C).to(dtype), torch.rand(T, 1, C) * 6
            cos, sin = angles.cos().repeat(1, 1, 2).to(dtype), torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
            q = qkv[:, :heads]
            a, b = q.double().chunk(2, -1)
            turned = q.double() * cos.double() + torch.cat((b, a), -1) * sin.double()
            self.close(self.ops.rotate(q, cos, sin), turned, dtype, 4 * qkv.double().abs().amax(-1, keepdim=True)[:, :heads])

    @pytest.mark.parametrize("bits", [(16, 16), (8, 8), (8, 4), (4, 4)])
    def test_attention_reads_what_is_stored(self, bits: Bits):
        """Sequences in blocks anywhere, prompts and single tokens in one step, a contiguous cache too: each as if it were alone;
        beyond them nothing is read, and nothing else written."""
        @self.check(st.lists(st.tuples(st.sampled_from([1, 1, 2, 4, 17, 20]), st.integers(0, 30)), min_size=1, max_size=3), st.integers(1, 3),
                    st.integers(1, 4), st.sampled_from([2, 6, 16, 20]), st.integers(1, 5), st.sampled_from(self.dtypes), st.integers(0, 2**30))
        def body(texts, G, R, D, S, dtype, seed):
            torch.manual_seed(seed)
            S, H = 64 if seed % 4 == 0 else S, G * R                            # 64: one block a text
            blocks = [-(-(n + past) // S) for n, past in texts]
            order = torch.randperm(sum(blocks) + 2).tolist()
            spans = [([order.pop() for _ in range(count)], past, past + n) for count, (n, past) in zip(blocks, texts)]
            shape = 2, sum(blocks) + 2, S, G, D
            rooms = [Store.empty(shape, width, dtype, torch.device("cpu"), self.ops.room, group)
                     for width, group in zip(bits, (GROUP, None))]
            cache = Cached(*rooms, dtype, S)
            for kept in rooms:
                poison(kept)
            T = sum(n for n, _ in texts)
            qkv = torch.randn(T, H + 2 * G, D).to(dtype)
            angles = torch.rand(T, 1, D // 2) * 6
            cos, sin = angles.cos().repeat(1, 1, 2).to(dtype), torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
            past = [[torch.randn(start, G, D).to(dtype) for _ in spans] for start in (30, 30)]
            slots = [torch.tensor([table[i // S] * S + i % S for i in range(stop)]) for table, _, stop in spans]
            for kept, own in zip(rooms, past):
                for (_, start, _), where, x in zip(spans, slots, own):
                    kept.write(1, where[:start], x[:start])
            before = [part.clone() for kept in rooms for part in kept.parts]
            step = Step(spans, S, cache, "cpu")
            out = self.ops.attend(qkv, G, cos, sin, step, 1)
            qk, v = qkv.split((H + G, G), 1)
            q, k = Ops().rotate(qk, cos, sin).split((H, G), 1)
            at, mine = 0, torch.cat(slots)
            for (_, start, stop), where in zip(spans, slots):
                n = stop - start
                read = [kept.read(1, where, torch.float64) for kept in rooms]
                for kept, x, seen in zip(rooms, (k, v), read):
                    again = kept.decode(kept.encode(x[at:at + n]), torch.float64)
                    step_size = (seen[start:] - again).abs().amax() if dtype != torch.float64 else 0      # rotation's own rounding
                    assert step_size <= 0.3 * x.abs().amax().double() and (seen[start:] - x[at:at + n].double()).abs().mean() < 0.2
                wanted = slow(q[at:at + n], *(x.transpose(0, 1) for x in read))
                self.close(out[at:at + n], wanted, dtype, 4 * read[1].abs().amax() * (1 + q.double().abs().amax()))
                at += n
            others = torch.ones(rooms[0].parts[0].shape[1] * S, dtype=torch.bool)
            others[torch.cat([where[start:] for (_, start, _), where in zip(spans, slots)])] = False
            for part, was in zip((part for kept in rooms for part in kept.parts), before):
                a, b = (x[1].flatten(0, 1)[others].contiguous().view(torch.uint8) for x in (part, was))
                assert torch.equal(a, b) and torch.equal(*(x[0].contiguous().view(torch.uint8) for x in (part, was)))
            assert len(mine) == len(set(mine.tolist()))

    def test_sampling(self):
        @self.check(st.integers(1, 4), st.integers(1, 300), st.sampled_from([None, 0.0, 0.7, 1.0]), st.sampled_from([None, 3]),
                    st.sampled_from([None, 0.8]), st.sampled_from([None, 0.2]), st.integers(0, 2**30))
        def body(B, V, temperature, top_k, top_p, min_p, seed):
            torch.manual_seed(seed)
            logits = torch.randn(B, V) * 3
            probs, wanted = self.ops.probabilities(logits, temperature, top_k, top_p, min_p), probabilities(logits, temperature, top_k, top_p, min_p)
            torch.testing.assert_close(probs, wanted, atol=1e-6, rtol=1e-5)
            coin = Keyed(torch.arange(B) + seed, torch.arange(B))
            assert torch.equal(self.ops.pick(wanted, coin.streams), coin.pick(wanted))


    def test_whole_passes_and_all_drafts_of_a_round(self):
        """A model's logits over a cache, and its drafts and their distributions, are the plain ones."""
        found = []
        for ops in (Ops(), self.ops):
            llama = Llama(Config(261, 24, 40, 2, 4, 2, 6, 96, tie_word_embeddings=True), seed=1, ops=ops)
            for name, place in llama.places().items():
                place.mul_(1 if "norm" in name else 9)
            llama.prepare()
            cache, made = KVCache.of(llama, 40, 2), []
            seqs = [cache.open(())[0] for _ in range(2)]
            for n in (20, 1, 3):
                made.append(llama(torch.arange(2 * n), cache.extend([(seq, range(i * n, i * n + n)) for i, seq in enumerate(seqs)])))
            request = Request(list(range(20)) + [7] * 6, Settings(0.8, seed=5, max_tokens=9))
            rounds = Round([request], [3], 250, llama.device, coin=partial(Keyed, picks=ops.pick), ops=ops)
            drafted, q = ops.draft(write_drafts, llama, cache, seqs[:1], [[7, 7]], rounds)
            assert cache.length(seqs[0]) == 28 and drafted.shape == (1, 3)
            found.append([*made, llama(torch.tensor([8]), cache.extend([(seqs[0], [8])])), q, drafted.double()])
        for plain, own in zip(*found):
            torch.testing.assert_close(own, plain, atol=1e-4 * plain.abs().max().item(), rtol=1e-3)

    def test_room_and_dtype(self):
        room = self.ops.room((1, 2, 3, 4, 6), torch.bfloat16, torch.device("cpu"))
        assert room.shape == (1, 2, 3, 4, 6) and room.dtype == torch.bfloat16 and room.untyped_storage().nbytes() == 288
        for stored in ROUNDING:
            assert self.ops.dtype(stored, 16, 1000) in ROUNDING
        assert self.ops.dtype(torch.float64, 8, 10) == torch.float64 and self.ops.dtype(torch.float32, 4, 10) == torch.float32


class Cached:
    """The keys and values of a cache."""

    def __init__(self, keys: Store, values: Store, dtype: torch.dtype, max_len: int):
        self.keys, self.values, self.dtype = keys, values, dtype
        self.max_len = max_len + (max_len < 64)                              # a block of 64 is a row of a contiguous cache


class TestPlain(Contract):
    ops = Ops()


@pytest.mark.skipif(triton is None or torch.cuda.is_available(), reason="needs Triton's interpreter")
class TestFlash(Contract):
    ops = Flash()
    dtypes = (torch.float32,)
    examples = 20

    test_products_and_look_ups = test_between_the_products = test_sampling = None          # those are the plain ones


def compiled_apart(*rows: int) -> list[list[int]]:
    """Registers, spills and matrix products for so many rows, by a process without the interpreter."""
    crosscompile = pytest.importorskip("gpu.crosscompile", reason="needs gpu/ to read what the compiler made")
    return [crosscompile.apart("test_kernels", "compiled_flash", M) for M in rows]


@pytest.mark.skipif(triton is None, reason="Triton exists for Linux only")
@pytest.mark.meanwhile(compiled_apart, 16, 64)
def test_the_flash_kernel_compiles_for_a_gpu_that_is_not_there(meanwhile):
    for registers, spills, matrix_products in meanwhile():
        assert spills == 0 and registers <= 255 and matrix_products > 0


def compiled_flash(rows: int) -> list[int]:
    """Registers, spills and matrix products of the kernel for Llama 3.1 8B on sm_90."""
    from gpu.crosscompile import compile_for
    from kernels import _flash
    types = dict(q="*bf16", k="*bf16", v="*bf16", out="*bf16", tables="*i32", starts="*i32", lengths="*i32", scale="fp32", most="i32", S="i32:16")
    report = compile_for(_flash, types, dict(G=8, R=4, D=128, WIDE=128, ROWS=rows, KEYS=32), 90)
    return [report.registers, report.spills, report.ptx.count("mma")]
