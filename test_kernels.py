"""Attention against two loops and a softmax; and the contract of `Ops`, which every backend's operations keep (cpu/, gpu/)."""

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate, product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.config import Config
from checkpoint.load import fill
from kernels import Flash, Linear, Ops, attention, triton
from kvcache import AttentionMetadata, SequenceSlice, Store
from model import Llama
from paged import PagedCache
from quant import GROUP, STORED, Bits, Quantized, dequantize, int8, quantize, round_fp8, spread
from request import Request, Settings
from speculative import Round
from sampling import SETTINGS, TEXT, Keyed, draft_role, probabilities

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}  # about four roundings
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def slow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The definition, in float64."""
    (n, H, D), (G, m, _) = q.shape, k.shape
    out = torch.zeros(n, H, D, dtype=torch.float64)
    for i in range(n):
        for h in range(H):
            seen, g = i + m - n + 1, h // (H // G)
            scores = k[g, :seen].double() @ q[i, h].double() / math.sqrt(D)
            weights = (scores - scores.max()).exp()
            out[i, h] = weights / weights.sum() @ v[g, :seen].double()
    return out


def as_the_model_does(
    n: int, m: int, G: int, R: int, D: int, dtype: torch.dtype, of_a_cache: bool, loud: float = 1.0
) -> Tensors:
    """q out of a row of q, k and v together; k and v as views of a larger store, or transposed out of that same row. None contiguous."""
    qkv = torch.randn(m, G * R + 2 * G, D).to(dtype)
    q, k, v = qkv.split((G * R, G, G), dim=1)
    q, k, v = q[m - n :] * loud if loud != 1 else q[m - n :], k.transpose(0, 1), v.transpose(0, 1)
    if of_a_cache:
        store = torch.full(
            (2, 3, G, m + 4, D), math.nan, dtype=dtype
        )  # what lies beyond is not ours
        store[0, 1, :, :m], store[1, 1, :, :m] = k, v
        k, v = store[0, 1, :, :m], store[1, 1, :, :m]
    return q, k, v


@settings(deadline=None, max_examples=120)
@given(
    n=st.integers(1, 5),
    past=st.integers(0, 6),
    G=st.integers(1, 3),
    R=st.integers(1, 4),
    D=st.sampled_from([2, 6, 16]),
    dtype=st.sampled_from(list(TOLERANCE)),
    of_a_cache=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_loops(n, past, G, R, D, dtype, of_a_cache, seed):
    torch.manual_seed(seed)
    q, k, v = as_the_model_does(n, n + past, G, R, D, dtype, of_a_cache)
    out = attention(q, k, v)
    assert out.dtype == dtype and out.shape == q.shape
    torch.testing.assert_close(
        out.double(), slow(q, k, v), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("n, m", [(1, 1), (1, 300), (2, 300), (70, 300), (257, 257)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_longer_than_a_tile(n, m, dtype):
    torch.manual_seed(n)
    q, k, v = as_the_model_does(n, m, 2, 3, 8, dtype, True)
    wide = attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(
        attention(q, k, v).double(), wide, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    for i in {
        0,
        n // 2,
        n - 1,
    }:  # the loops, for a few queries: query i is the last of its own past
        torch.testing.assert_close(
            wide[i : i + 1],
            slow(q[i : i + 1], k[:, : m - n + i + 1], v[:, : m - n + i + 1]),
            atol=1e-12,
            rtol=1e-12,
        )


@pytest.mark.parametrize("n", [1, 3, 6])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_last_query_sees_everything_and_none_sees_its_future(n, dtype):
    """Aligned top-left, the first query would see key 0 alone and the result would not change with key 4."""
    q, k, v = (
        torch.zeros(n, 2, 4, dtype=dtype),
        torch.zeros(1, 6, 4, dtype=dtype),
        torch.arange(6, dtype=dtype)[None, :, None].expand(1, 6, 4),
    )
    expected = torch.tensor(
        [sum(range(j)) / j for j in range(6 - n + 1, 7)], dtype=dtype
    )  # equal scores: the mean of what is seen
    torch.testing.assert_close(
        attention(q, k, v),
        expected[:, None, None].expand(n, 2, 4),
        atol=TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
    )


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
    torch.testing.assert_close(
        out.double(), slow(q, k, v), atol=TOLERANCE[dtype], rtol=10 * TOLERANCE[dtype]
    )


# ---- The contract -------------------------------------------------------------------------------------------------------------

WHOLE = 64  # S of a contiguous cache, or more
TEXTS = st.lists(
    st.tuples(st.sampled_from([1, 1, 2, 4, 17, 20]), st.integers(0, 30)), min_size=1, max_size=3
)
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# Sizes at which a fast version goes another way: a second tile, program or share; a group that is not full.
PRODUCTS = [
    (1, 70, 160, 32),
    (40, 70, 544, 64),
    (3, 20, 48, 16),
]  # T, N, K, columns that share a scale
BETWEEN = [(2, 1100, 10, 40.0), (3, 5, 4, 1e-3)]  # T, C, heads, size of the numbers
ATTENTION = [
    (
        [(2, 9), (1, 31)],
        2,
        3,
        20,
        WHOLE,
        False,
    ),  # new and past tokens of each text, G, R, D, S, and
    ([(17, 30), (1, 64), (4, 0)], 1, 4, 20, 5, True),  # whether q and k are still to be rotated
    ([(4, 30), (1, 7), (3, 0)], 2, 2, 72, 5, True),
    ([(1, 575)], 1, 2, 16, WHOLE, False),
]
LOGITS = [
    (3, 200, False, False),
    (3, 2500, True, True),
]  # B, V, settings for each row, whole numbers

WARM, COLD, PICKY = (
    Settings(0.8, seed=5),
    Settings(0.0, seed=6),
    Settings(0.7, 9, 0.9, 0.01, seed=7),
)
PASSES = [
    (0, (20, 1, 3), None),
    (0, (1, 1, 1), None),  # model, new tokens of each text, rows
    (1, (7, 5, 3), torch.tensor([0, 14])),
    (1, (1, 1, 1), None),
    (0, (1, 1, 1), None),
    (0, (2, 1, 2), slice(-1, None)),
    (0, (2, 2, 2), None),
    (0, (2, 1, 2), None),
]
ROUNDS = [
    (0, (2,), (3,), False, False, [WARM]),  # model, γ and unread tokens of each text, coupled,
    (0, (2,), (1,), False, True, [COLD]),  # publish, settings
    (0, (2,), (1,), False, True, [PICKY]),
    (1, (3,), (1,), True, True, [WARM]),
    (1, (2, 0, 1), (2, 0, 1), False, False, [COLD, WARM, WARM]),
    (1, (1, 2, 2), (1, 2, 1), False, False, [WARM, COLD, WARM]),
]


def amid(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, not contiguous, among others that must not be used."""
    room = torch.full((*x.shape[:-1], x.shape[-1] + 3), 1000.0, dtype=x.dtype)
    room[..., :-3] = x
    return room[..., :-3]


LAYOUTS = [
    16,
    *STORED,
    "INT8 in groups",
    "INT8 with zeros",
    "INT4 in order",
    "INT8 by INT8",
    "FP8 by FP8",
]  # of weights


def laid_out(w: torch.Tensor, layout: int | str, group: int) -> torch.Tensor | Quantized:
    """W: [N, K] as it is, as `quantize` makes it, or as other programs' folders may have it."""
    (N, K), M = w.shape, -(-w.shape[1] // group)
    if layout == 16:
        return w
    if layout in STORED:
        return quantize(w, layout, group)
    if layout == "INT4 in order":
        return (q := quantize(w, 4, group))._replace(scale=q.scale.half(), order=torch.randperm(K))
    if layout in ("INT8 by INT8", "FP8 by FP8"):
        return quantize(w, 8 if layout[:4] == "INT8" else "fp8")._replace(inputs=8)
    values, scale = torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N, M)
    zero = (
        torch.randint(-128, 128, (N, M), dtype=torch.int16) if layout == "INT8 with zeros" else None
    )
    return Quantized(values, scale if zero is None else scale.half(), zero, K, group)


def stands_for(w: torch.Tensor | Quantized, x: torch.Tensor) -> Tensors:
    """The numbers of W, of x as W multiplies it, and of the sum of their sizes: float64."""
    wide = w.double() if isinstance(w, torch.Tensor) else dequantize(*w, dtype=torch.float64)
    if isinstance(w, Quantized) and w.inputs == 8:
        values, scale = int8(x) if w.bits == 8 else round_fp8(x)
        x = values.double() * scale.double()
    x = x.double()
    return wide, x, x.abs() @ wide.abs().T


def heads_first(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """[L, N, S, G, D], in memory with all tokens of a head together."""
    L, N, S, G, D = shape
    return torch.empty((L, G, N, S, D), dtype=dtype, device=device).permute(0, 2, 3, 1, 4)


def poison(kept: Store) -> None:
    for part in kept.parts:
        part.fill_(math.nan if part.is_floating_point() else 77)


def rope(T: int, D: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(T, 1, D // 2) * 6
    return angles.cos().repeat(1, 1, 2).to(dtype), torch.cat((-angles.sin(), angles.sin()), -1).to(
        dtype
    )


def random_llama(seed: int, ops: Ops, dtype: torch.dtype) -> Llama:
    """The same numbers in every dtype."""
    config = Config(261, 16, 40, 2, 2, 1, 8, 96, tie_word_embeddings=True, rms_norm_eps=0.1)
    numbers, llama = (
        Llama(config, seed=seed).named_tensors(),
        Llama(config, dtype=dtype, seed=None, ops=ops),
    )
    fill(llama, [(name, place * (1 if "norm" in name else 9)) for name, place in numbers.items()])
    return llama.pack_weights()


def published(cache: PagedCache, tokens: list[int]) -> int:
    """How many of them another text would find."""
    seq, have = cache.open(tokens)
    cache.free(seq)
    return have


class Contract:
    """Ragged shapes, poisoned surroundings, against the definitions in float64. A backend's test has its own `ops`.

    Each test begins with the sizes above: in each dtype, or, where that is slow, the first in each and the others in
    one. After them the sizes are hypothesis's."""

    ops: Ops
    dtypes = tuple(ROUNDING)
    examples, slow = 25, False
    refuses = True  # logits that are NaN

    @pytest.fixture(autouse=True)
    def short_tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kernels.DEQUANTIZED_TILE", 1024)

    def rounding(self, dtype: torch.dtype, bits: int) -> float:
        """bits: of keys or values."""
        return ROUNDING[dtype]

    def close(
        self,
        got: torch.Tensor,
        wanted: torch.Tensor,
        dtype: torch.dtype,
        size: Any = 1.0,
        bits: int = 16,
    ) -> None:
        """size: what rounding is relative to."""
        assert got.dtype == dtype and got.shape == wanted.shape
        least = max(
            1e-30, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        )  # float16 ends at 6e-8
        assert (
            (got.double() - wanted).abs()
            <= self.rounding(dtype, bits) * torch.as_tensor(size) + least
        ).all()

    def check(self, sizes: list[tuple[Any, ...]], *strategies: Any) -> Any:
        """body(*sizes, dtype, seed): each of `sizes`; then hypothesis, with this backend's number of examples."""

        def run(body: Callable[..., None]) -> None:
            for seed, (own, dtype) in enumerate(product(sizes, self.dtypes)):
                if own is sizes[0] or dtype is self.dtypes[0] or not self.slow:
                    body(*own, dtype, seed)
            more = given(*strategies, st.sampled_from(self.dtypes), st.integers(0, 2**30))
            settings(deadline=None, max_examples=self.examples)(more(body))()

        return run

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_products_and_look_ups(self, layout):
        @self.check(
            PRODUCTS,
            st.integers(0, 70),
            st.integers(1, 80),
            st.one_of(st.integers(1, 150), st.integers(1, 6).map(lambda n: 32 * n)),
            st.sampled_from([16, 32, 64, 128]),
        )
        def body(T, N, K, group, dtype, seed):
            torch.manual_seed(seed)
            w, x = torch.randn(N, K).to(dtype), amid(torch.randn(T, K).to(dtype))
            kept, bias = (
                laid_out(w, layout, group),
                None if seed % 5 == 4 else torch.randn(N).to(dtype),
            )
            wide, seen, size = stands_for(kept, x)
            more = torch.zeros(N, dtype=torch.float64) if bias is None else bias.double()
            ready = self.ops.pack_weight(Linear(kept, bias), dtype, "embed")
            if (
                seen.equal(x.double()) or dtype != torch.float64
            ):  # a product of integers has float32's scales
                self.close(
                    self.ops.linear(x, ready), seen @ wide.T + more, dtype, size + more.abs()
                )
            which = torch.randperm(N)
            self.close(self.ops.embed(which, ready, dtype), wide[which], dtype, wide[which].abs())

    def test_between_the_products(self):
        @self.check(
            BETWEEN,
            st.integers(0, 5),
            st.integers(1, 40),
            st.integers(1, 4),
            st.sampled_from([1e-3, 3.0, 40.0]),
        )
        def body(T, C, heads, large, dtype, seed):
            torch.manual_seed(seed)
            x, delta, wide = (
                amid((torch.randn(T, width) * large).to(dtype)) for width in (C, C, 2 * C)
            )
            weight, first, before = (
                torch.randn(C).to(dtype),
                seed % 3 == 2,
                [part.clone() for part in (x, delta, wide)],
            )
            total, y = self.ops.add_norm(x, None if first else delta, weight, 1e-5)
            whole = x.double() if first else (x + delta).double()
            self.close(total, whole, dtype, whole.abs())
            norm = whole / (whole.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
            self.close(y, norm, dtype, 2 * norm.abs())
            gate, up = wide.double().chunk(2, -1)
            wanted = gate * gate.sigmoid() * up
            self.close(self.ops.swiglu(wide), wanted, dtype, 2 * wanted.abs() + up.abs() * 2e-5)
            qkv, (cos, sin) = torch.randn(T, heads + 2, 2 * C).to(dtype), rope(T, 2 * C, dtype)
            q = qkv[:, :heads]
            a, b = q.double().chunk(2, -1)
            turned = q.double() * cos.double() + torch.cat((b, a), -1) * sin.double()
            largest = qkv.double().abs().amax(-1, keepdim=True)[:, :heads]
            self.close(self.ops.rotate(q, cos, sin), turned, dtype, 4 * largest)
            assert all(map(torch.equal, (x, delta, wide), before))
            x, wide, q = (part.clone().requires_grad_() for part in (x, wide, q))  # gradients pass
            made = (
                *self.ops.add_norm(x, delta, weight, 1e-5),
                self.ops.swiglu(wide),
                self.ops.rotate(q, cos, sin),
            )
            assert all(part.requires_grad for part in made)

    @pytest.mark.parametrize("bits", [(16, 16), (8, 8), (8, 4), (4, 4)])
    def test_attention_reads_what_is_stored(self, bits: Bits):
        """Sequences in blocks anywhere, prompts and single tokens in one step, a contiguous cache too: each as if it
        were alone. What is stored is the cache's own encoding; beyond it nothing is read, and nothing else written."""

        @self.check(
            ATTENTION,
            TEXTS,
            st.integers(1, 3),
            st.integers(1, 4),
            st.sampled_from([2, 6, 16, 20]),
            st.sampled_from([1, 2, 3, 4, 5, WHOLE]),
            st.booleans(),
        )
        def body(texts, G, R, D, S, rotates, dtype, seed):
            torch.manual_seed(seed)
            T, H, S = sum(n for n, _ in texts), G * R, max(S, *map(sum, texts)) if S == WHOLE else S
            blocks = [-(-(n + past) // S) for n, past in texts]
            order = torch.randperm(sum(blocks) + 2).tolist()
            spans = [
                ([order.pop() for _ in range(count)], past, past + n)
                for count, (n, past) in zip(blocks, texts)
            ]
            shape, cpu = (2, sum(blocks) + 2, S, G, D), torch.device("cpu")
            rooms = [
                Store.empty(shape, width, dtype, cpu, self.ops.empty_kv, group)
                for width, group in zip(bits, (GROUP, None))
            ]
            cache = Cached(*rooms, dtype, S)
            slots = [
                torch.tensor([table[i // S] * S + i % S for i in range(stop)])
                for table, _, stop in spans
            ]
            for kept in rooms:
                poison(kept)
                for (_, start, _), where in zip(spans, slots):
                    kept.write(1, where[:start], torch.randn(start, G, D).to(dtype))
            before = [part.clone() for kept in rooms for part in kept.parts]
            qkv, (cos, sin), step = (
                torch.randn(T, H + 2 * G, D).to(dtype),
                rope(T, D, dtype),
                AttentionMetadata([SequenceSlice(*s) for s in spans], S, cache),
            )
            qkv[-1, H:] = 0  # all-zero groups, too
            q, k, v = qkv.split((H, G, G), 1)
            if rotates:
                out = self.ops.attend(qkv, G, cos, sin, step, 1)
                q, k = Ops().rotate(qkv[:, :-G], cos, sin).split((H, G), 1)
            else:
                out = self.ops.store_and_attend(q, k, v, step, 1)
            ends = [*accumulate(step.num_new_tokens, initial=0)]
            for where, own in zip(slots, map(slice, ends, ends[1:])):
                new = where[own.start - own.stop :]
                self.stored(rooms[0], new, k[own], rotates)
                self.stored(rooms[1], new, v[own], False)
                past = [kept.read(1, where, torch.float64).transpose(0, 1) for kept in rooms]
                size = 4 * past[1].abs().amax() * (1 + q.double().abs().amax())
                self.close(out[own], slow(q[own], *past), dtype, size, min(bits))
            others = torch.ones(shape[1] * S, dtype=torch.bool)
            others[torch.cat([where[start:] for (_, start, _), where in zip(spans, slots)])] = False
            for part, was in zip((part for kept in rooms for part in kept.parts), before):
                a, b = (
                    x[1].flatten(0, 1)[others].contiguous().view(torch.uint8) for x in (part, was)
                )
                assert torch.equal(a, b) and torch.equal(
                    *(x[0].contiguous().view(torch.uint8) for x in (part, was))
                )

    def stored(self, kept: Store, slots: torch.Tensor, x: torch.Tensor, rotated: bool) -> None:
        """x, to the bit; half a step from it, if what was rounded may differ by the rounding of a rotation."""
        parts, coded = [part[1].flatten(0, 1)[slots] for part in kept.parts], kept.encode(x)
        assert rotated or all(map(torch.equal, parts, coded))
        step = 0 if kept.bits == 16 else spread(coded[1].double(), kept.group, x.shape[-1])
        rounding = (
            max(ROUNDING[x.dtype], 0 if kept.bits == 16 else 1e-6) * 4 * x.double().abs().amax()
        )
        assert (
            (kept.decode(parts, torch.float64) - x.double()).abs() <= 0.51 * step + rounding + 1e-29
        ).all()

    def test_attention_without_a_cache(self):
        """Texts of one length: none sees another, or its own future."""

        @self.check(
            [(2, 20, 2, 3, 6)],
            st.integers(1, 3),
            st.integers(1, 20),
            st.integers(1, 3),
            st.integers(1, 4),
            st.sampled_from([2, 6, 16]),
        )
        def body(B, n, G, R, D, dtype, seed):
            torch.manual_seed(seed)
            qkv, zero = (
                torch.randn(B * n, (R + 2) * G, D).to(dtype),
                torch.zeros(B * n, 1, D, dtype=dtype),
            )
            out = self.ops.attend(qkv, G, zero + 1, zero, AttentionMetadata.without_cache(B, n), 0)
            for got, own in zip(out.split(n), qkv.split(n)):
                q, k, v = own.split((R * G, G, G), 1)
                size = 4 * v.double().abs().amax() * (1 + q.double().abs().amax())
                self.close(got, slow(q, k.transpose(0, 1), v.transpose(0, 1)), dtype, size)

    def test_sampling(self):
        @self.check(LOGITS, st.integers(1, 4), st.integers(1, 300), st.booleans(), st.booleans())
        def body(B, V, each, whole, dtype, seed):
            random = Random(seed)
            torch.manual_seed(seed)
            logits = torch.randn(B, V) * 3
            logits = amid((logits.round() if whole else logits).to(dtype))
            choices = [0.0, 0.7, 1.0, 2.0], [0, 1, 3, 40], [0.3, 0.8, 1.0], [0.0, 0.2]
            values = [
                torch.tensor(random.choices(some, k=B), dtype=torch.float64)
                if each
                else random.choice([None, *some])
                for some in choices
            ]
            exact = (
                dict(atol=1e-12, rtol=1e-12)
                if dtype == torch.float64
                else dict(atol=1e-6, rtol=1e-5)
            )
            wanted, named = probabilities(logits, **{n: v for n, v in zip(SETTINGS, values)}), dict(zip(SETTINGS, values))
            probs = (
                self.ops.probabilities(logits, **named)
                if seed % 2
                else self.ops.probabilities(logits, **{n: v for n, v in zip(SETTINGS, values)})
            )
            torch.testing.assert_close(probs, wanted, **exact)
            coin = Keyed(torch.arange(2 * B) + seed, torch.arange(2 * B))[::2]
            for probs in (wanted, wanted.double() + 1e-9):
                assert torch.equal(self.ops.pick(amid(probs), coin.streams), coin.pick(probs))
            if self.refuses:
                logits[-1, -1] = math.nan
                with pytest.raises(ValueError, match="not finite"):
                    self.ops.probabilities(logits)

    @torch.inference_mode()
    def test_whole_passes_and_all_drafts_of_a_round(self):
        """Two models in turns over one cache. Logits are those of each text alone, whole, without a cache, in float64;
        and so are the drafts of a round, token by token, and their distributions."""
        models = [random_llama(seed, self.ops, torch.float32) for seed in (1, 2)]
        exact = [partial(whole, random_llama(seed, Ops(), torch.float64)) for seed in (1, 2)]
        cache, coin, generator = (
            PagedCache.of(models[0], 40, 4),
            partial(Keyed, pick=self.ops.pick),
            torch.Generator(),
        )
        seqs, texts, found = (
            [[cache.open(())[0] for _ in range(3)] for _ in models],
            [[[], [], []], [[], [], []]],
            [],
        )
        poison(cache.keys)
        poison(cache.values)
        for model, counts, rows in PASSES:
            new = [torch.randint(261, (n,), generator=generator).tolist() for n in counts]
            got = models[model](
                torch.tensor(sum(new, [])), cache.extend([*zip(seqs[model], new)]), rows
            )
            texts[model] = [text + piece for text, piece in zip(texts[model], new)]
            wanted = torch.cat([exact[model](text)[-n:] for text, n in zip(texts[model], counts)])
            found.append((got, wanted if rows is None else wanted[rows]))
        for llama, reference, (text, *_) in zip(models, exact, texts):  # and without the cache
            found.append((llama(torch.tensor(text), logits_indices=slice(-2, None)), reference(text)[-2:]))
        for got, wanted in found:  # a later pass does not touch them
            torch.testing.assert_close(
                got.double(), wanted, atol=1e-4 * wanted.abs().max().item(), rtol=1e-3
            )
        for model, gammas, unread, coupled, publish, own in ROUNDS:
            new = [torch.randint(250, (n,), generator=generator).tolist() for n in unread]
            requests = [
                Request(text + piece, each) for text, piece, each in zip(texts[model], new, own)
            ]
            rounds = Round(
                requests, gammas, 250, cache.device, coin=coin, coupled=coupled, ops=self.ops
            )
            known = [published(cache, request.tokens) for request in requests]
            drafted, q = self.ops.draft(
                models[model], cache, seqs[model], new, rounds, publish
            )
            for b, (request, gamma, text) in enumerate(zip(requests, gammas, texts[model])):
                tokens, p = one_by_one(exact[model], request, gamma, coupled)
                assert drafted[b].tolist() == tokens + [-1] * (len(drafted[b]) - gamma)
                torch.testing.assert_close(q[b, :gamma].double(), p, atol=1e-4, rtol=1e-3)
                assert not q[b, gamma:].any()
                assert cache.length(seqs[model][b]) == (
                    len(request.tokens) + gamma - 1 if gamma else len(text)
                )
                shared = published(
                    cache, request.tokens
                )  # the full blocks before the round, or more
                assert shared >= len(text) // 4 * 4 if publish and gamma else shared == known[b]
                cache.truncate(seqs[model][b], len(text))
        if self.refuses:
            models[0].norm.fill_(math.nan)
            rounds = Round([Request([7], WARM)], [1], 250, cache.device)
            with pytest.raises(ValueError, match="not finite"):
                self.ops.draft(models[0], cache, seqs[0], [[7]], rounds)

    def test_room_and_dtype(self):
        for dtype in (torch.bfloat16, torch.int16, torch.uint8):
            room = self.ops.empty_kv((1, 2, 3, 4, 6), dtype, torch.device("cpu"))
            assert room.shape == (1, 2, 3, 4, 6) and room.dtype == dtype
            assert room.untyped_storage().nbytes() == 144 * dtype.itemsize
        for stored, dtype in product(ROUNDING, ROUNDING):
            found = self.ops.compute_dtype(stored)
            assert found == stored or found == torch.float32 and stored.itemsize == 2
            assert (
                self.ops.weight_dtype([stored, torch.float64], dtype) == dtype
            )  # numbers of 16 and 32 bits
            kept, w, x = (
                self.ops.weight_dtype([stored], dtype),
                torch.randn(5, 8, dtype=stored),
                torch.randn(3, 8, dtype=dtype),
            )
            y, wide = (
                self.ops.linear(x, self.ops.pack_weight(Linear(w.to(kept), None), dtype, "o")),
                w.to(dtype).double(),
            )
            assert (
                y.dtype == dtype
                and (
                    (y - x.double() @ wide.T).abs()
                    <= ROUNDING[dtype] * (x.double().abs() @ wide.abs().T)
                ).all()
            )


def whole(llama: Llama, text: list[int]) -> torch.Tensor:
    """Logits of a text, by the pass that `Ops.forward` is given."""
    return llama.forward(torch.tensor(text), AttentionMetadata.without_cache(1, len(text)), None)


def one_by_one(
    llama: Callable[[list[int]], torch.Tensor], request: Request, gamma: int, coupled: bool
) -> tuple[list[int], torch.Tensor]:
    """A text's drafts and their distributions, of 250 tokens: each from the whole text before it."""
    drafted, p = [], torch.zeros(gamma, 250, dtype=torch.float64)
    for j in range(gamma):
        logits = llama(request.tokens + drafted)[-1:, :250]
        p[j] = probabilities(logits, **{name: getattr(request.settings, name) for name in SETTINGS})[0]
        place, role = len(request.tokens) + j * coupled, TEXT if coupled else draft_role(j)
        coin = Keyed(torch.tensor([request.settings.seed]), torch.tensor([place]), role)
        drafted.append(int(coin.pick(p[j : j + 1])))
    return drafted, p


class Cached:
    """The keys and values of a cache."""

    def __init__(self, keys: Store, values: Store, dtype: torch.dtype, max_len: int):
        self.keys, self.values, self.dtype = keys, values, dtype
        self.backend = {}; self.max_len = max_len + (max_len < 64)  # a block of 64 is a row of a contiguous cache


class TestPlain(Contract):
    ops = Ops()


@pytest.mark.skipif(
    triton is None or torch.cuda.is_available(), reason="needs Triton's interpreter"
)
class TestFlash(Contract):
    ops = Flash()
    dtypes = (torch.float32, torch.float64)
    examples, slow = 10, True

    test_products_and_look_ups = test_between_the_products = test_sampling = (
        None  # those are the plain ones
    )
    test_whole_passes_and_all_drafts_of_a_round = None


def compiled_apart(*rows: int) -> list[list[int]]:
    """Registers, spills and matrix products for so many rows, by a process without the interpreter."""
    beside = pytest.importorskip(
        "gpu.test_crosscompile", reason="needs gpu/ to read what the compiler made"
    )
    return [beside.apart("test_kernels", "compiled_flash", M) for M in rows]


@pytest.mark.skipif(triton is None, reason="Triton exists for Linux only")
@pytest.mark.meanwhile(compiled_apart, 16, 64)
def test_the_flash_kernel_compiles_for_a_gpu_that_is_not_there(meanwhile):
    for registers, spills, matrix_products in meanwhile():
        assert spills == 0 and registers <= 255 and matrix_products > 0


def compiled_flash(rows: int) -> list[int]:
    """Registers, spills and matrix products of the kernel for Llama 3.1 8B on sm_90."""
    from gpu.crosscompile import compile_for
    from kernels import _flash

    types = dict(
        q="*bf16",
        k="*bf16",
        v="*bf16",
        out="*bf16",
        tables="*i32",
        starts="*i32",
        lengths="*i32",
        scale="fp32",
        most="i32",
        S="i32:16",
    )
    report = compile_for(_flash, types, dict(G=8, R=4, D=128, WIDE=128, ROWS=rows, KEYS=32), 90)
    return [report.registers, report.spills, report.ptx.count("mma")]
