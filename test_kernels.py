"""Attention against two loops and a softmax; and the contract that every backend's `Ops` keeps."""

import math
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_map_only

import devices
import sampling
from conftest import examples
from flash import Flash, triton
from kernels import HeadNorm, Linear, Ops, attention, rotate, rotated
from kvcache import AttentionMetadata, Cache, KVSpec, SequenceSlice, Store
from model import Llama
from paged import PagedCache
from quant import KEY_GROUP, Bits, Quantized, quantize, spread
from request import Request, Settings
from sampling import TEXT, Keyed, accept_role, draft_role, mix, probabilities, uniform
from settings import SETTINGS
from speculative import Drawing, Proposal, Round, verify_block
from testing.models import model_chain, num_found, random_llama
from testing.programs import program
from testing.tensors import LAYOUTS, Tensors, amid, laid_out, poison, stands_for
from testing.toys import Place

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}  # about four roundings


def slow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The definition, in float64. q: [n, H, D]; k, v: [m, G, D]."""
    n, H, D = q.shape
    m, G, _ = k.shape
    out = torch.zeros(n, H, D, dtype=torch.float64)
    for i in range(n):
        num_keys = i + m - n + 1
        for h in range(H):
            g = h // (H // G)
            scores = k[:num_keys, g].double() @ q[i, h].double() / math.sqrt(D)
            weights = (scores - scores.max()).exp()
            out[i, h] = weights / weights.sum() @ v[:num_keys, g].double()
    return out


def random_qkv(
    n: int, m: int, G: int, R: int, D: int, dtype: torch.dtype, stored: bool, size: float = 1.0
) -> Tensors:
    """q, k and v as views, as a model has them: of one row, or k and v of a larger store."""
    qkv = torch.randn(m, G * R + 2 * G, D).to(dtype)
    q, k, v = qkv.split((G * R, G, G), dim=1)
    if stored:  # what lies beyond must not be read
        store = torch.full((2, 3, m + 4, G, D), math.nan, dtype=dtype)
        store[0, 1, :m] = k
        store[1, 1, :m] = v
        k = store[0, 1, :m]
        v = store[1, 1, :m]
    return q[m - n :] * size, k, v


def assert_close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected.double(), atol=tolerance, rtol=tolerance)


@given(
    n=st.integers(1, 5),
    past=st.integers(0, 6),
    G=st.integers(1, 3),
    R=st.integers(1, 4),
    D=st.sampled_from([2, 6, 16]),
    dtype=st.sampled_from(list(TOLERANCE)),
    stored=st.booleans(),
    size=st.sampled_from([1.0, 1.0, 1000.0]),
    seed=st.integers(0, 99),
)
def test_attention_equals_the_loops(n, past, G, R, D, dtype, stored, size, seed):
    """Also for scores whose exponentials would overflow."""
    torch.manual_seed(seed)
    q, k, v = random_qkv(n, n + past, G, R, D, dtype, stored, size)
    out = attention(q, k, v)
    assert out.dtype == dtype and out.shape == q.shape and out.isfinite().all()
    wanted = slow(q, k, v)
    tolerance = TOLERANCE[dtype]
    if size > 1:  # the rounding of a large score is a large part of its exponential
        tolerance = min(100 * tolerance, 0.3)
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)


def test_causal_mask_is_aligned_bottom_right():
    """Aligned top-left, the first query would see key 0 alone."""
    for n, dtype in product([1, 3, 6], TOLERANCE):
        zeros = torch.zeros(n, 2, 4, dtype=dtype)
        v = torch.arange(6, dtype=dtype)[:, None, None].expand(6, 1, 4)
        means = [sum(range(j)) / j for j in range(6 - n + 1, 7)]  # of what each query sees
        expected = torch.tensor(means)[:, None, None].expand(n, 2, 4)
        assert_close(attention(zeros, torch.zeros(6, 1, 4, dtype=dtype), v), expected, dtype)


# ---- The contract's sizes and helpers ------------------------------------------------------------

WHOLE = 64  # S of a contiguous cache, or more
TEXTS = st.lists(
    st.tuples(st.sampled_from([1, 1, 2, 4, 17, 20]), st.integers(0, 30)), min_size=1, max_size=3
)
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# Sizes at which a fast version goes another way: a second tile, program or share; a ragged group.
PRODUCTS = [  # T, N, K, columns that share a scale
    (1, 70, 160, 32),
    (40, 70, 544, 64),
    (3, 20, 48, 16),
]
BETWEEN = [(2, 1100, 10, 40.0), (3, 5, 4, 1e-3)]  # T, C, heads, size of the numbers
ATTENTION = [  # new and past tokens of each text, G, R, D, S, what is left to do with q and k
    ([(2, 9), (1, 31)], 2, 3, 20, WHOLE, ""),
    ([(17, 30), (1, 64), (4, 0)], 1, 4, 20, 5, "norm, rotate"),
    ([(4, 30), (1, 7), (3, 0)], 2, 2, 72, 5, "rotate"),
    ([(1, 575)], 1, 2, 16, WHOLE, ""),
]
LOGITS = [  # B, V, settings for each row, whole numbers
    (3, 200, False, False),
    (3, 2500, True, True),
]

WARM = Settings(0.8, seed=5)
COLD = Settings(0.0, seed=6)
PICKY = Settings(0.7, top_k=9, top_p=0.9, min_p=0.01, seed=7)
PASSES = [  # model, new tokens of each text, logits_indices
    (0, (20, 1, 3), None),
    (0, (1, 1, 1), None),
    (1, (7, 5, 3), torch.tensor([0, 14])),
    (1, (1, 1, 1), None),
    (0, (1, 1, 1), None),
    (0, (2, 1, 2), slice(-1, None)),
    (0, (2, 2, 2), None),
    (0, (2, 1, 2), None),
]
ROUNDS = [  # model, drafts and unread tokens of each text, coupled, settings
    (0, (2,), (3,), False, [WARM]),
    (0, (2,), (1,), False, [COLD]),
    (0, (2,), (1,), False, [PICKY]),
    (1, (3,), (1,), True, [WARM]),
    (1, (2, 0, 1), (2, 0, 1), False, [COLD, WARM, WARM]),
    (1, (1, 2, 2), (1, 2, 1), False, [WARM, COLD, WARM]),
]
SHAPE = dict(
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rms_norm_eps=0.1,
)


def random_rope(T: int, D: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(T, 1, D // 2) * 6
    return angles.cos().to(dtype), angles.sin().to(dtype)


def logits_of(llama: Llama, text: list[int]) -> torch.Tensor:
    """Logits of a text, by the model's plain loop, without a cache."""
    metadata = AttentionMetadata.without_cache(1, len(text))
    return llama.forward(torch.tensor(text), metadata, None)


def features_of(llama: Llama, text: list[int]) -> torch.Tensor:
    """What comes into layers 1 and 0: [T, 2, C], each by the layers before it alone."""
    metadata = AttentionMetadata.without_cache(1, len(text))
    embedded = llama.ops.embed(torch.tensor(text), llama.embed, llama.dtype)
    rope = llama.rope(metadata.positions)
    x, mlp_out = llama.decoder_layer(llama.layers[0], embedded, None, rope, metadata, 0)
    return torch.stack((x + mlp_out, embedded), 1)


def one_by_one(
    logits_of: Callable[[list[int]], torch.Tensor], request: Request, num_drafts: int, coupled: bool
) -> tuple[list[int], torch.Tensor]:
    """A text's drafts and their distributions, of 250 tokens: each from the whole text before."""
    seed = torch.tensor([request.settings.seed])
    settings = {name: getattr(request.settings, name) for name in SETTINGS}
    drafted = []
    p = torch.zeros(num_drafts, 250, dtype=torch.float64)
    for j in range(num_drafts):
        logits = logits_of(request.tokens + drafted)[-1:, :250]
        p[j] = probabilities(logits, **settings)[0]
        position = len(request.tokens) + j * coupled
        rng = Keyed(seed, torch.tensor([position]), TEXT if coupled else draft_role(j))
        drafted.append(int(rng.pick(p[j : j + 1])))
    return drafted, p


class Cached:
    """The keys and values of a cache."""

    write = Cache.write

    def __init__(self, keys: Store, values: Store, dtype: torch.dtype, block_size: int):
        self.keys = keys
        self.values = values
        layers, _, _, G, width = keys.parts[0].shape
        self.spec = KVSpec(layers, G, 2 * width if keys.bits == 4 else width)
        self.dtype = dtype
        self.block_size = block_size
        self.max_len = block_size  # a block of 64 is a row of a contiguous cache
        if block_size < WHOLE:
            self.max_len += 1
        self.backend: dict[str, Any] = {}


# ---- The contract --------------------------------------------------------------------------------


class Contract:
    """Ragged shapes, poisoned surroundings, against the definitions in float64.

    A backend's test has its own `ops` and `device`. Each test begins with the sizes above: in each
    dtype, or, where that is slow, the first in each and the others in one. Then the sizes are
    hypothesis's.
    """

    ops: Ops
    device = torch.device("cpu")  # of the operations; what is wanted is computed on the CPU
    dtypes = tuple(ROUNDING)
    examples = 15
    slow = False
    refuses = True  # logits that are NaN
    attention = ATTENTION

    @pytest.fixture(autouse=True)
    def short_tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("quant.DEQUANTIZED", 1024)

    def on(self, x: Any) -> Any:
        """x, or the tensors in it, on the device."""
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), x)

    def rounding(self, dtype: torch.dtype, bits: int) -> float:
        """bits: of keys or values."""
        return ROUNDING[dtype]

    def more_size(
        self, w: torch.Tensor | Quantized, x: torch.Tensor, wide: torch.Tensor
    ) -> torch.Tensor | float:
        """[T, N], added to Σ|x||w| where a product rounds x. wide: the numbers of W; float64."""
        return 0.0

    def close(
        self,
        out: torch.Tensor,
        wanted: torch.Tensor,
        dtype: torch.dtype,
        size: Any = 1.0,
        bits: int = 16,
    ) -> None:
        """size: what rounding is relative to."""
        assert out.dtype == dtype and out.shape == wanted.shape
        info = torch.finfo(dtype)
        least = max(1e-30, info.smallest_normal * info.eps)  # float16 ends at 6e-8
        error = (out.cpu().double() - wanted).abs()
        assert (error <= self.rounding(dtype, bits) * torch.as_tensor(size) + least).all()

    def check(self, sizes: list[tuple[Any, ...]], *strategies: Any) -> Any:
        """body(*sizes, dtype, seed): each of `sizes`; then hypothesis's."""

        def run(body: Callable[..., None]) -> None:
            for seed, (chosen, dtype) in enumerate(product(sizes, self.dtypes)):
                if chosen is sizes[0] or dtype is self.dtypes[0] or not self.slow:
                    body(*chosen, dtype, seed)
            more = given(*strategies, st.sampled_from(self.dtypes), st.integers(0, 2**30))
            examples(self.examples)(more(body))()

        return run

    def check_swiglu(
        self, out: torch.Tensor, gate_up: torch.Tensor, dtype: torch.dtype, size: torch.Tensor
    ) -> None:
        """gate_up: the product; size: what its rounding is relative to."""
        gate, up = gate_up.chunk(2, -1)
        gate_size, up_size = size.chunk(2, -1)
        wanted = gate * gate.sigmoid() * up
        size = 2 * wanted.abs() + 1.1 * gate_size * (up.abs() + 0.1 * up_size)
        self.close(out, wanted, dtype, size + gate.abs() * up_size)

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
            w = torch.randn(N, K).to(dtype)
            x = torch.randn(T, K).to(dtype)
            stored = laid_out(w, layout, group)
            bias = None if seed % 5 == 4 else torch.randn(N).to(dtype)
            wide, x_read, size = stands_for(stored, x)
            shift = torch.zeros(N, dtype=torch.float64) if bias is None else bias.double()
            packed = self.ops.pack_weight(self.on(Linear(stored, bias)), dtype)
            if x_read.equal(x.double()) or dtype != torch.float64:  # scales of x are float32's
                wanted = x_read @ wide.T + shift
                size = size + shift.abs() + self.more_size(stored, x_read, wide)
                x = amid(self.on(x))
                self.close(self.ops.linear(x, packed), wanted, dtype, size)
                if N % 2 == 0:
                    self.check_swiglu(self.ops.swiglu(x, packed), wanted, dtype, size)
            rows = torch.randperm(N)
            embedded = self.ops.embed(self.on(rows), packed, dtype)
            self.close(embedded, wide[rows], dtype, wide[rows].abs())

    def test_what_is_not_finite_is_seen(self):
        large = self.on(torch.full((1, 8), 1e20))  # its square is not finite
        assert self.ops.add_norm(large, None, large[0] / 1e20, 1e-5)[1].isnan().all()
        w = quantize(torch.randn(32, 32), 8)._replace(input_bits=8)
        packed = self.ops.pack_weight(self.on(Linear(w)), torch.float32)
        for bad in (math.nan, math.inf):
            x = self.on(torch.full((1, 32), bad))
            assert self.ops.linear(x, packed).isnan().all()
        for bits, bad, head in product(((8, 4), (4, 8)), (math.nan, math.inf), (1, 2)):
            cache = PagedCache(KVSpec(1, 1, 32, bits=bits, device=self.device, ops=self.ops), 1)
            seq, _ = cache.open(())
            qkv = torch.randn(2, 3, 32)  # a head of q, one of k, one of v
            qkv[0, head, 5] = bad
            out = self.ops.attend(self.on(qkv), 1, None, cache.extend([(seq, [0, 0])]), 0)
            assert not out.isfinite().any(), (bits, bad, head)

    def test_between_the_products(self):
        @self.check(
            BETWEEN,
            st.integers(0, 5),
            st.integers(1, 40),
            st.integers(1, 4),
            st.sampled_from([1e-3, 3.0, 40.0]),
        )
        def body(T, C, heads, scale, dtype, seed):
            torch.manual_seed(seed)
            before = [(torch.randn(T, C) * scale).to(dtype) for _ in range(2)]
            there = [amid(self.on(part)) for part in before]
            x, delta = before
            weight = torch.randn(C).to(dtype)
            is_first = seed % 3 == 2  # nothing is added yet
            added = None if is_first else there[1]
            total, normed = self.ops.add_norm(there[0], added, self.on(weight), 1e-5)
            wanted = x.double() if is_first else (x + delta).double()
            self.close(total, wanted, dtype, wanted.abs())
            wanted = wanted / (wanted.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            wanted = wanted * weight.double()
            self.close(normed, wanted, dtype, 2 * wanted.abs())

            qkv = torch.randn(T, heads + 2, 2 * C).to(dtype)
            rope = random_rope(T, 2 * C, dtype)
            q = qkv[:, :heads]
            cos, sin = (part.double() for part in rope)
            pairs = torch.complex(*q.double().chunk(2, -1)) * torch.complex(cos, sin)
            wanted = torch.cat((pairs.real, pairs.imag), -1)
            size = 4 * qkv.double().abs().amax(-1, keepdim=True)[:, :heads]
            self.close(rotate(q, rope), wanted, dtype, size)
            assert all(torch.equal(part.cpu(), old) for part, old in zip(there, before))

            weight, gate_up = self.on((weight, Linear(torch.randn(2, C).to(dtype))))
            x, delta, q = (self.on(part).clone().requires_grad_() for part in (x, delta, q))
            outputs = [*self.ops.add_norm(x, delta, weight, 1e-5), self.ops.swiglu(x, gate_up)]
            outputs.append(rotate(q, self.on(rope)))
            assert all(part.requires_grad for part in outputs)  # gradients pass

            norm = HeadNorm(torch.randn(4 * C).to(dtype), 1e-5)
            normed = rotated(qkv, 1, None, norm)[:2]
            for part, of_part, x in zip(normed, norm.weight.chunk(2), qkv.split((heads, 1, 1), 1)):
                wide = x.double()
                wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
                wanted = wanted * of_part.double()
                self.close(part, wanted, dtype, 2 * wanted.abs())

    @pytest.mark.parametrize("bits", [(16, 16), (8, 8), (8, 4), (4, 4)])
    def test_attention_reads_what_is_stored(self, bits: Bits):
        """Sequences in blocks anywhere, prompts and single tokens in one step, contiguous, too.

        Each is as if it were alone. What is stored is the cache's own encoding; beyond it nothing
        is read, and nothing else is written.
        """

        @self.check(
            self.attention,
            TEXTS,
            st.integers(1, 3),
            st.integers(1, 4),
            st.sampled_from([2, 6, 16, 20]),
            st.sampled_from([1, 2, 3, 4, 5, WHOLE]),
            st.sampled_from(["", "rotate", "norm, rotate"]),
        )
        def body(texts, G, R, D, S, left, dtype, seed):
            torch.manual_seed(seed)
            H = G * R
            T = sum(n for n, _ in texts)
            if S == WHOLE:
                S = max(WHOLE, *(n + past for n, past in texts))
            num_blocks = 2 + sum(-(-(n + past) // S) for n, past in texts)
            order = torch.randperm(num_blocks).tolist()
            slices = []
            for n, past in texts:
                table = [order.pop() for _ in range(-(-(n + past) // S))]
                slices.append(SequenceSlice(table, past, past + n))
            stores = []
            for width, group in zip(bits, (KEY_GROUP, None)):
                shape = (2, num_blocks, S, G, D)
                empty_kv = self.ops.empty_kv
                store = Store.empty(shape, width, dtype, self.device, empty_kv, group)
                stores.append(poison(store))
            all_slots = []
            for table, past, seq_len in slices:
                slots = torch.tensor([table[i // S] * S + i % S for i in range(seq_len)])
                all_slots.append(slots)
                for store in stores:
                    numbers = torch.randn(past, G, D).to(dtype)
                    store.write(1, self.on(slots[:past]), self.on(numbers))
            before = [part.cpu().clone() for store in stores for part in store.parts]
            cache = Cached(*stores, dtype, S)
            metadata = AttentionMetadata(slices, S, cache, self.device)
            qkv = torch.randn(T, H + 2 * G, D).to(dtype)
            qkv[-1, H:] = 0  # all-zero groups, too
            rope = random_rope(T, D, dtype) if left else None
            norm = HeadNorm(torch.randn(2 * D).to(dtype), 1e-3) if "norm" in left else None
            out = self.ops.attend(self.on(qkv), G, self.on(rope), metadata, 1, self.on(norm)).cpu()
            stores = [
                Store([part.cpu() for part in store.parts], store.bits, store.group)
                for store in stores
            ]
            q, k, v = rotated(qkv, G, rope, norm)

            counts = metadata.num_new_tokens
            parts = zip(*(x.split(counts) for x in (out, q, k, v)))
            for slots, (own_out, own_q, own_k, own_v) in zip(all_slots, parts):
                new = slots[-len(own_q) :]
                self.check_stored(stores[0], new, own_k, bool(left))
                self.check_stored(stores[1], new, own_v, False)
                keys, values = (store.read(1, slots, torch.float64) for store in stores)
                size = 4 * values.abs().amax() * (1 + own_q.double().abs().amax())
                self.close(own_out, slow(own_q, keys, values), dtype, size, min(bits))
            others = torch.ones(num_blocks * S, dtype=torch.bool)
            for slots, n in zip(all_slots, counts):
                others[slots[-n:]] = False
            for part, old in zip((part for store in stores for part in store.parts), before):
                assert same_bits(part[0], old[0])
                assert same_bits(part[1].flatten(0, 1)[others], old[1].flatten(0, 1)[others])

    def check_stored(
        self, store: Store, slots: torch.Tensor, x: torch.Tensor, rotated: bool
    ) -> None:
        """x is stored to the bit; half a step from it, if a rotation may have rounded it."""
        parts = [part[1].flatten(0, 1)[slots] for part in store.parts]
        encoded = store.encode(x)
        assert rotated or all(map(torch.equal, parts, encoded))
        step = 0
        rounding = ROUNDING[x.dtype]
        if store.bits != 16:
            step = spread(encoded[1].double(), store.group, x)
            rounding = max(rounding, 1e-6)
        error = (store.decode(parts, torch.float64) - x.double()).abs()
        assert (error <= 0.51 * step + 4 * rounding * x.double().abs().amax() + 1e-29).all()

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
            qkv = torch.randn(B * n, (R + 2) * G, D).to(dtype)
            metadata = AttentionMetadata.without_cache(B, n, self.device)
            out = self.ops.attend(self.on(qkv), G, None, metadata, 0)
            for own_out, own in zip(out.split(n), qkv.split(n)):
                q, k, v = own.split((R * G, G, G), 1)
                size = 4 * v.double().abs().amax() * (1 + q.double().abs().amax())
                self.close(own_out, slow(q, k, v), dtype, size)

    def test_sampling(self, monkeypatch):
        """A token that is forbidden, as a grammar forbids it, has a probability of just 0."""

        @self.check(LOGITS, st.integers(1, 4), st.integers(2, 300), st.booleans(), st.booleans())
        def body(B, V, each_row, ties, dtype, seed):
            random = Random(seed)
            torch.manual_seed(seed)
            logits = torch.randn(B, V) * 3
            logits = (logits.round() if ties else logits).to(dtype)
            choices = dict(
                temperature=[0.0, 0.7, 1.0, 2.0],
                top_k=[0, 1, 3, 40],
                top_p=[0.3, 0.8, 1.0],
                min_p=[0.0, 0.2],
            )
            assert choices.keys() == SETTINGS.keys()
            chosen = {}
            for name, values in choices.items():
                if each_row:
                    chosen[name] = torch.tensor(random.choices(values, k=B), dtype=torch.float64)
                elif random.random() < 0.8:
                    chosen[name] = random.choice([None, *values])
            forbidden = random.randrange(V)
            logits[:, forbidden] = -math.inf
            atol, rtol = (1e-12, 1e-12) if dtype == torch.float64 else (1e-6, 1e-5)
            for how in ({"temperature": 0.7}, chosen):
                wanted = probabilities(logits, **how)
                probs = self.ops.probabilities(amid(self.on(logits)), **self.on(how)).cpu()
                torch.testing.assert_close(probs, wanted, atol=atol, rtol=rtol)
                assert not probs[:, forbidden].any()
            rng = Keyed(torch.arange(2 * B) + seed, torch.arange(2 * B))[::2]
            for probs in (wanted, wanted.double() + 1e-9):
                picked = self.ops.pick(amid(self.on(probs)), self.on(rng.streams))
                assert torch.equal(picked.cpu(), rng.pick(probs))
            if self.refuses:
                logits[-1, -1] = math.nan
                with pytest.raises(ValueError, match="not finite"):
                    self.ops.probabilities(self.on(logits))

        self.check_fifth_setting(monkeypatch)

    def check_fifth_setting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A setting that no backend knows yet: it must reach the definition, by its name."""
        known = sampling.probabilities

        def with_ban(logits: torch.Tensor, ban: int | None = None, **settings: Any) -> torch.Tensor:
            logits = logits.clone()
            if ban is not None:
                logits[..., ban] = -math.inf
            return known(logits, **settings)

        monkeypatch.setattr(sampling, "probabilities", with_ban)
        logits = self.on(torch.randn(2, 9))
        for others in ({}, {"temperature": 0.7}, {"top_k": torch.tensor([3.0, 0.0])}):
            probs = self.ops.probabilities(logits, ban=4, **others)
            torch.testing.assert_close(probs, with_ban(logits, ban=4, **others))
            assert not probs[:, 4].any()

    def verifying_round(self, num_drafts: list[int], V: int, random: Random) -> Round:
        """A round of texts with seeds and lengths of their own."""
        settings = [Settings(seed=random.getrandbits(50)) for _ in num_drafts]
        requests = [Request([1] * random.randint(1, 9), one) for one in settings]
        rng = partial(Keyed, draw=self.ops.pick)
        place = Place(self.device, ops=self.ops)
        return Round(requests, num_drafts, Drawing(V, make_rng=rng), target=place)

    def test_verifying(self):
        """Texts with fewer drafts than others; drafts that were drawn from q, and some whose q is
        0; distributions with zeros, in every second text; p that is q."""

        @self.check(
            [(14, 4, 30, 0.5), (3, 4, 200, 0.0), (2, 1, 20_000, 0.5)],
            st.integers(1, 4),
            st.integers(1, 4),
            st.integers(1, 60),
            st.sampled_from([0.0, 0.5]),
        )
        def body(B, k, V, apart, dtype, seed):
            random = Random(seed)
            torch.manual_seed(seed)
            num_drafts = [k, *(random.randint(0, k) for _ in range(B - 1))]
            round = self.verifying_round(num_drafts, V, random)
            numbers = torch.rand(2, B, k + 1, V)
            numbers[:, ::2] *= torch.rand_like(numbers[:, ::2]) < 0.3
            numbers[..., -1] += 0.1  # no row is 0 everywhere
            numbers = numbers.to(torch.promote_types(dtype, torch.float32))
            q, other = numbers / numbers.sum(-1, keepdim=True)
            p = torch.lerp(q, other, apart)
            drafted = q[:, :k].flatten(0, 1).multinomial(1).view(B, k)
            impossible = torch.where(q > 0, 0, p).argmax(-1)  # q is 0, p as large as can be
            drafted[::4, 0] = impossible[::4, 0]
            for b, n in enumerate(num_drafts):
                drafted[b, n:] = -1
                q[b, n:] = 0
            p, q, drafted = self.on((p, q, drafted))
            rng = round.text_rng()
            wanted = verify_block(p, q, drafted, rng)
            accepted, token = self.ops.verify_block(verify_block, p, q, drafted, rng)
            assert [accepted.tolist(), token.tolist()] == [x.tolist() for x in wanted]

    def test_where_a_round_may_end_and_with_which_tokens(self):
        """After a draft that is 0.2 / 0.7 as likely under p, w p − q is above 0 for token 2 alone;
        p − q is for token 1, too. Where p is q, w is 1: every draft that q allows is accepted."""
        round = self.verifying_round([2] * 200, 3, Random(0))
        same = torch.tensor([0.7, 0.3, 0]).repeat(200, 3, 1)
        other = torch.tensor([0.2, 0.5, 0.3]).expand_as(same)
        q = same * torch.tensor([1, 1, 0])[:, None]  # none after the last draft
        for p, last, ends in (  # 10 times the accepted drafts, and the token after them
            (other, 0, {1, 2, 12, 20, 21, 22}),
            (same, 0, {20, 21}),
            (same, 2, {10, 11}),
        ):
            drafts = torch.tensor([0, last]).repeat(200, 1)
            accepted, token = round.verify(self.on(p), self.on(Proposal(drafts, q)))
            assert {*(10 * accepted + token).tolist()} == ends

    def test_a_draft_whose_q_is_nan_is_not_accepted(self):
        """The token after it is p's, as if nothing had been drafted there. A draft whose p is NaN
        is not accepted, either."""
        V = 7
        round = self.verifying_round([2] * 20, V, Random(0))
        right = torch.rand(20, 3, V, generator=torch.Generator().manual_seed(0)).softmax(-1)
        damaged = right.clone()
        damaged[::2, 0] = torch.nan
        damaged[1::2, 1] = torch.nan
        drafts = torch.full((20, 2), 3)  # each would be accepted
        without_third = torch.tensor([1, 1, 0])[:, None]
        proposals = [Proposal(drafts, q * without_third) for q in (damaged, right)]
        accepted, token = round.verify(self.on(right), self.on(proposals[0]))
        assert accepted.tolist() == [0, 1] * 10
        ended = self.on(right[range(20), accepted.cpu()])
        assert torch.equal(token, round.text_rng().pick(ended))
        accepted, _ = round.verify(self.on(damaged), self.on(proposals[1]))
        assert accepted.tolist() == [0, 1] * 10

    def test_each_draft_is_accepted_by_its_own_number(self):
        """That of accept_role(j). In text b, h of the b-th draft is just above its number, and that
        of the other drafts is just below theirs.

        Where a draft of the token 0 is certain, and p is w_j / w_j₋₁ there, h_j is
        (w_j − w_j₊₁) / (1 − w_j₊₁): so 1 − w_j is the product of 1 − h, from j on.
        """
        k = 6
        round = self.verifying_round([k] * (k + 1), 2, Random(0))
        roles = torch.tensor([accept_role(j) for j in range(k)])
        numbers = uniform(mix(round.text_rng().keys.cpu() ^ roles))  # [k + 1, k]
        above = torch.eye(k + 1, dtype=torch.bool)[:, 1:]
        h = torch.where(above, numbers * (1 + 1e-3), numbers * (1 - 1e-3))
        w = 1 - (1 - h).flip(1).cumprod(1).flip(1)
        before = torch.cat((torch.ones(k + 1, 1), w[:, :-1]), 1)
        p, q = torch.zeros(2, k + 1, k + 1, 2)
        p[:, :k, 0] = w / before
        p[:, :, 1] = 1 - p[:, :, 0]
        q[:, :k, 0] = 1
        proposal = Proposal(torch.zeros(k + 1, k, dtype=torch.int64), q)
        accepted, _ = round.verify(self.on(p), self.on(proposal))
        assert accepted.tolist() == [*range(k + 1)]

    @torch.inference_mode()
    def test_whole_passes_and_all_drafts_of_a_round(self):
        """Two models by turns over one cache, against each text alone, whole, in float64.

        Logits are those of each text without a cache; so are the drafts of a round, token by token,
        and their distributions.
        """
        how = dict(scale=9.0, **SHAPE)
        models = [
            random_llama(seed, self.ops, torch.float32, device=self.device, **how)
            for seed in (1, 2)
        ]
        exact = [
            partial(logits_of, random_llama(seed, Ops(), torch.float64, **how)) for seed in (1, 2)
        ]
        generator = torch.Generator()
        cache = PagedCache(models[0].kv_spec(), 40, 4)
        poison(cache.keys)
        poison(cache.values)
        seqs = [[cache.open(())[0] for _ in range(3)] for _ in models]
        texts = [[[], [], []], [[], [], []]]
        compared = []
        for model, counts, indices in PASSES:
            new = [torch.randint(261, (n,), generator=generator).tolist() for n in counts]
            metadata = cache.extend([*zip(seqs[model], new)])
            features = models[model].empty_features((1, 0), sum(counts))
            tokens = self.on(torch.tensor(sum(new, [])))
            logits = models[model](tokens, metadata, self.on(indices), features)
            texts[model] = [text + piece for text, piece in zip(texts[model], new)]
            wanted = torch.cat([exact[model](text)[-n:] for text, n in zip(texts[model], counts)])
            compared.append((logits, wanted if indices is None else wanted[indices]))
            wanted = []
            for text, n in zip(texts[model], counts):
                wanted.append(features_of(exact[model].args[0], text)[len(text) - n :])
            compared.append((features.values, torch.cat(wanted)))
        for seq, text in zip(sum(seqs, []), sum(texts, [])):
            cache.commit(seq, [*text, 0])
        for llama, reference, (text, *_) in zip(models, exact, texts):  # and without the cache
            logits = llama(self.on(torch.tensor(text)), logits_indices=slice(-2, None))
            compared.append((logits, reference(text)[-2:]))
        for logits, wanted in compared:  # a later pass does not touch them
            atol = 1e-4 * wanted.abs().max().item()
            torch.testing.assert_close(logits.cpu().double(), wanted, atol=atol, rtol=1e-3)
        for model, *one in ROUNDS:
            self.check_round(models[model], exact[model], cache, seqs[model], texts[model], *one)
        if self.refuses:
            models[0].norm.fill_(math.nan)
            round = Round([Request([7], WARM)], [1], Drawing(250), target=models[0])
            with pytest.raises(ValueError, match="not finite"):
                model_chain(models[0], cache, seqs[0], [[7]], round).draft(round)

    def check_round(self, llama, exact, cache, seqs, texts, num_drafts, unread, coupled, settings):
        """The drafts of one round; the cache is then as before."""
        new = [list(range(7, 7 + n)) for n in unread]
        requests = [Request(text + more, one) for text, more, one in zip(texts, new, settings)]
        rng = partial(Keyed, draw=self.ops.pick)
        round = Round(
            requests,
            num_drafts,
            Drawing(250, coupled, rng),
            target=Place(cache.device, ops=self.ops),
        )
        found_before = [num_found(cache, request.tokens) for request in requests]
        drafted, q = model_chain(llama, cache, seqs, new, round).draft(round)
        for b, (request, k, text) in enumerate(zip(requests, num_drafts, texts)):
            tokens, p = one_by_one(exact, request, k, coupled)
            assert drafted[b].tolist() == tokens + [-1] * (len(drafted[b]) - k)
            assert (q is None) == (coupled or settings == [COLD])
            if q is not None:
                torch.testing.assert_close(q[b, :k].cpu().double(), p, atol=1e-4, rtol=1e-3)
                assert not q[b, k:].any()
            assert cache.length(seqs[b]) == (len(request.tokens) + k - 1 if k else len(text))
            assert num_found(cache, request.tokens) == found_before[b]  # no block with a draft
            cache.truncate(seqs[b], len(text))

    def test_room_and_dtype(self):
        for dtype in (torch.bfloat16, torch.int16, torch.uint8):
            empty = self.ops.empty_kv((1, 2, 3, 4, 6), dtype, self.device)
            assert empty.shape == (1, 2, 3, 4, 6) and empty.dtype == dtype
            assert empty.untyped_storage().nbytes() == 144 * dtype.itemsize
        for stored, dtype in product(ROUNDING, ROUNDING):
            computed, _ = self.ops.dtypes([stored], None)
            assert computed == stored or (computed == torch.float32 and stored.itemsize == 2)
            assert self.ops.dtypes([stored, torch.float64], dtype) == (dtype, dtype)
            w = torch.randn(5, 8, dtype=stored)
            x = torch.randn(3, 8, dtype=dtype)
            kept = w.to(self.ops.dtypes([stored], dtype)[1])
            packed = self.ops.pack_weight(self.on(Linear(kept)), dtype)
            y = self.ops.linear(self.on(x), packed).cpu()
            wide = w.to(dtype).double()
            size = x.double().abs() @ wide.abs().T
            assert y.dtype == dtype
            assert ((y - x.double() @ wide.T).abs() <= ROUNDING[dtype] * size).all()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (x.contiguous().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


class TestPlain(Contract):
    ops = Ops()


@pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ or find_spec("triton") is None,
    reason="needs Triton's interpreter",
)
class TestFlash(Contract):
    """What `Flash` overrides."""

    ops = Flash()
    dtypes = (torch.float32, torch.float64)
    examples = 5
    slow = True
    test_products_and_look_ups = None
    test_between_the_products = None
    test_sampling = None
    test_whole_passes_and_all_drafts_of_a_round = None

    @pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
    def test_attention_reads_what_is_stored(self, bits):
        super().test_attention_reads_what_is_stored(bits)


COMPILED = """
import torch
from flash import Flash
from gpu.testing import compile_launches
from kvcache import KVSpec
from paged import PagedCache

def run():
    cache = PagedCache(KVSpec(1, 8, 128, torch.bfloat16, device="meta"), 16)
    for n in (1, 16):
        seq, _ = cache.open(())
        qkv = torch.empty(n, 48, 128, dtype=torch.bfloat16, device="meta")
        Flash().attend(qkv, 8, None, cache.extend([(seq, [0] * n)]), 0)

for report in compile_launches(run):
    print(report.registers, report.spills, report.ptx.count("mma"))
"""


@pytest.mark.gpu
@pytest.mark.skipif(triton is None, reason="Triton exists for Linux only")
def test_flash_compiles_for_a_gpu_that_is_not_there(monkeypatch):
    """For Llama 3.1 8B on sm_90; in a process without the interpreter."""
    pytest.importorskip("gpu.testing", reason="needs gpu/ to read what the compiler made")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = program("-c", COMPILED)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2  # 16 and 64 rows
    for line in lines:
        registers, spills, matrix_products = map(int, line.split())
        assert spills == 0 and registers <= 255 and matrix_products > 0


def test_memory_where_there_is_no_proc(monkeypatch):
    """On macOS: a share of it must be a size, not a share of the largest number."""
    monkeypatch.setattr(devices, "Path", lambda name: Path("/no/such/file"))
    assert 1e8 < devices.free_memory(torch.device("cpu")) < 1e14
