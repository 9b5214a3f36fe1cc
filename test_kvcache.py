"""The cache against lists of vectors; and a text cut in any way gives the same logits."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from checkpoint.config import Config
from conftest import SMALL
from generate import Engine, Model
from kernels import Ops, attention, ops_for
from kvcache import CacheFull, KVCache, Store, kv_bytes, layout, tokens_that_fit
from model import Llama
from paged import PagedCache
from quant import GROUP, WIDTHS, widths
from test_kernels import heads_first, poison

L, G, H, D, N, S = 2, 2, 4, 6, 9, 3
OPS = ops_for("cpu")


def state(cache: KVCache) -> tuple:
    """All that an operation could change, to the bit (not-a-numbers and all)."""
    return (
        {seq: list(text.tokens) for seq, text in cache._texts.items()},
        list(cache._rows),
        *(kept.parts[0].clone().view(torch.int64) for kept in (cache.keys, cache.values)),
    )


def same(a: tuple, b: tuple) -> bool:
    return a[:2] == b[:2] and torch.equal(a[2], b[2]) and torch.equal(a[3], b[3])


class CacheMachine(RuleBasedStateMachine):
    """Every operation on the cache beside the same on Python lists: {seq: [(k, v) of each token, for all layers]}."""

    def __init__(self):
        super().__init__()
        self.cache, self.texts = KVCache(L, G, D, N, S, dtype=torch.float64), {}
        self.poison()
        self.random = torch.Generator().manual_seed(0)

    def poison(self):
        """What is not stored, or no longer, must never be read: make it unmistakable."""
        for seq in range(S):
            for store in (self.cache.keys, self.cache.values):
                store.parts[0][:, seq, len(self.texts.get(seq, ())) :] = math.nan

    def refused(self, error, match, *operations):
        before = state(self.cache)
        for operation in operations:
            with pytest.raises(error, match=match):
                operation()
        assert same(before, state(self.cache))

    def rand(self, *shape):
        return torch.randn(*shape, dtype=torch.float64, generator=self.random)

    def pick(self, i):
        return sorted(self.texts)[i % len(self.texts)]

    @rule()
    def open(self):
        if len(self.texts) == S:
            self.refused(
                CacheFull, f"all {S} rows .* free a sequence", lambda: self.cache.open([1])
            )
        else:
            seq, have = self.cache.open([1, 2])
            assert have == 0 and seq not in self.texts
            self.texts[seq] = []

    @precondition(lambda self: self.texts)
    @rule(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=S), backwards=st.booleans())
    def extend(self, sizes, backwards):
        wanted = [(seq, n) for seq, n in zip(sorted(self.texts, reverse=backwards), sizes) if n]
        before = state(self.cache)
        fits = self.cache.fits(wanted)
        assert same(before, state(self.cache))
        full = [(seq, n) for seq, n in wanted if len(self.texts[seq]) + n > N]
        assert fits == (not full)
        if full:
            (seq, n), have = full[0], len(self.texts[full[0][0]])
            self.refused(
                CacheFull,
                f"sequence {seq} has {have} tokens and cannot take {n} more: the limit is {N}; ask for fewer, or .*max_len",
                lambda: self.cache.extend([(seq, range(n)) for seq, n in wanted]),
            )
        elif wanted:
            self.attend(wanted)

    def attend(self, wanted):
        step = self.cache.extend([(seq, range(n)) for seq, n in wanted])
        assert step.places.positions.tolist() == [
            len(self.texts[seq]) + i for seq, n in wanted for i in range(n)
        ]
        T = sum(n for _, n in wanted)
        q, k, v = self.rand(L, T, H, D), self.rand(L, T, G, D), self.rand(L, T, G, D)
        outs = [OPS.look_back(q[layer], k[layer], v[layer], step, layer) for layer in range(L)]
        at = 0
        for seq, n in wanted:  # as if each had been alone
            self.texts[seq] += [(k[:, i], v[:, i]) for i in range(at, at + n)]
            for layer in range(L):
                keys, values = (
                    torch.stack([token[i][layer] for token in self.texts[seq]], dim=1)
                    for i in (0, 1)
                )  # [G, m, D]
                torch.testing.assert_close(
                    outs[layer][at : at + n],
                    attention(q[layer, at : at + n], keys, values),
                    atol=1e-12,
                    rtol=1e-12,
                )
            at += n

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 9))
    def refuse(self, i):
        """Refused whole: also when the first half of the request was good."""
        seq, other = self.pick(i), self.pick(i + 1)
        extend = self.cache.extend
        self.refused(
            ValueError,
            "at least one new token",
            lambda: extend([]),
            lambda: extend([(seq, [1]), (other, [])]),
        )
        self.refused(
            ValueError, f"twice in one step: .*{seq}", lambda: extend([(seq, [1]), (seq, [2])])
        )
        self.refused(
            ValueError,
            f"sequence {seq} has .* cannot be truncated to -1",
            lambda: self.cache.truncate(seq, -1),
        )
        if len(self.texts[seq]) < N:
            self.refused(
                KeyError,
                "sequence 77 is not open; open ones: ",
                lambda: extend([(seq, [1]), (77, [1])]),
            )

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 9), keep=st.integers(0, N + 2))
    def truncate(self, i, keep):
        seq = self.pick(i)
        if keep > len(self.texts[seq]):
            self.refused(
                ValueError, f"cannot be truncated to {keep}", lambda: self.cache.truncate(seq, keep)
            )
        else:
            self.cache.truncate(seq, keep)
            del self.texts[seq][keep:]
            self.poison()

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 9))
    def fork(self, i):
        seq = self.pick(i)
        if len(self.texts) == S:
            self.refused(CacheFull, "free a sequence", lambda: self.cache.fork(seq))
        else:
            new = self.cache.fork(seq)
            assert new not in self.texts
            self.texts[new] = list(self.texts[seq])
            self.poison()

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 9))
    def free(self, i):
        seq = self.pick(i)
        self.cache.free(seq)
        del self.texts[seq]
        self.poison()
        verbs = (
            self.cache.length,
            self.cache.free,
            self.cache.fork,
            lambda s: self.cache.truncate(s, 0),
            lambda s: self.cache.fits([(s, 1)]),
            lambda s: self.cache.extend([(s, [1])]),
        )
        self.refused(
            KeyError, f"sequence {seq} is not open", *(partial(verb, seq) for verb in verbs)
        )

    @invariant()
    def rows_are_open_or_free_and_hold_their_texts(self):
        assert {seq: self.cache.length(seq) for seq in self.texts} == {
            seq: len(text) for seq, text in self.texts.items()
        }
        assert sorted([*self.texts, *self.cache._rows]) == list(range(S))
        for seq, text in self.texts.items():
            for i, store in enumerate((self.cache.keys, self.cache.values)):
                assert not text or torch.equal(
                    store.parts[0][:, seq, : len(text)],
                    torch.stack([token[i] for token in text], 1),
                )


CacheMachine.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)
test_any_history = CacheMachine.TestCase


def test_a_fork_and_its_origin_part_ways():
    cache = KVCache(1, 1, 2, max_len=4, sequences=2)
    old, _ = cache.open([])
    one = torch.ones(2, 1, 2)
    OPS.look_back(one, one, one, cache.extend([(old, [1, 2])]), 0)
    new = cache.fork(old)
    both = torch.tensor([[[3.0, 3]], [[9.0, 9]]])
    out = OPS.look_back(
        one * 0, one, both, cache.extend([(old, [3]), (new, [9])]), 0
    )  # equal scores: means of 1, 1 and the new
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([5 / 3, 11 / 3]))
    cache.truncate(old, 0)
    assert (cache.length(old), cache.length(new)) == (0, 3) and cache.values.parts[0][
        0, new, :3, 0, 0
    ].tolist() == [1, 1, 9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_formula_is_the_allocation(dtype):
    cache = KVCache(3, 2, 8, max_len=11, sequences=2, dtype=dtype)
    real = sum(store.parts[0].untyped_storage().nbytes() for store in (cache.keys, cache.values))
    assert (
        cache.bytes
        == 2 * kv_bytes(3, 2, 8, 11, dtype)
        == kv_bytes(3, 2, 8, 22, dtype)
        == real
        == 2 * 2 * 3 * 2 * 8 * 11 * dtype.itemsize
    )


def test_what_is_said_of_llamas():
    assert kv_bytes(32, 8, 128, 1, torch.bfloat16) == 131_072  # Llama 3.1 8B, a token
    assert (
        kv_bytes(80, 8, 128, 4096, torch.bfloat16) == 1_342_177_280
    )  # Llama 2 70B: not the 80 GB of an article


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("wrong", ["layers", "kv_heads", "head_dim", "max_len", "sequences"])
def test_sizes_below_one_are_refused(wrong, value):
    with pytest.raises(ValueError, match=f"{wrong} is {value}: a cache needs at least 1"):
        KVCache(**{**dict(layers=1, kv_heads=1, head_dim=2, max_len=3, sequences=1), wrong: value})


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_a_dtype_that_is_no_number_format_of_a_cache_is_refused(dtype):
    with pytest.raises(
        ValueError,
        match=f"a cache of {dtype} is not supported; use one of float64, float32, bfloat16, float16",
    ):
        KVCache(1, 1, 2, 3, dtype=dtype)


def test_a_cache_larger_than_the_memory_is_refused_with_its_size():
    with pytest.raises(
        CacheFull,
        match="a cache of 3 x 1000000000000 tokens needs 96000.0 GB, which cpu does not have: ask for less",
    ):
        KVCache(1, 1, 4, 10**12, 3)


# ---- However a text is cut, the logits are the same

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
TEXT = st.lists(st.integers(0, 30), min_size=1, max_size=14)
CUTS = st.lists(st.integers(1, 14), max_size=6)


def loud(dtype: torch.dtype, heads: int, kv_heads: int) -> Llama:
    """A model whose logits are of order 1 and depend on everything."""
    llama = Llama(
        Config(
            vocab_size=31,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=10,
            max_position_embeddings=64,
        ),
        dtype=dtype,
        seed=3,
    )
    with torch.no_grad():
        for name, place in llama.places().items():
            place.mul_(1 if "norm" in name else 10)
    return llama.prepare()


MODELS = {
    (dtype, kv_heads): loud(dtype, 4, kv_heads) for dtype in TOLERANCE for kv_heads in (1, 2, 4)
}
MODEL = st.sampled_from(list(MODELS.values()))


def parts(text: list[int], cuts: list[int]) -> list[list[int]]:
    """The text, cut at these places."""
    bounds = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    return [text[a:b] for a, b in zip(bounds, bounds[1:])]


def read(llama: Llama, cache: KVCache, *chunks: tuple[int, list[int]]) -> torch.Tensor:
    """Logits of one step."""
    return llama(torch.tensor(sum((chunk for _, chunk in chunks), [])), cache.extend(list(chunks)))


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        logits, expected, atol=TOLERANCE[logits.dtype], rtol=TOLERANCE[logits.dtype]
    )


@pytest.mark.parametrize("llama", MODELS.values(), ids=map(str, MODELS))
@torch.inference_mode()
def test_these_models_would_notice(llama):
    """Logits of order 1, in which one other token far back, or its place, is seen: without this, what follows proves nothing."""
    text = [7, 3, 11, 5, 3, 20, 1, 30, 2, 9]
    last, other, moved = (
        llama(torch.tensor(t))[-1] for t in (text, [8, *text[1:]], [3, 7, *text[2:]])
    )
    assert (
        last.std() > 0.3 and (last - other).abs().max() > 0.01 and (last - moved).abs().max() > 0.01
    )


@settings(deadline=None, max_examples=50)
@given(MODEL, TEXT, CUTS)
@torch.inference_mode()
def test_every_split_of_a_prompt(llama, text, cuts):
    cache = KVCache.of(llama, len(text))
    poison(cache.keys), poison(cache.values)
    seq, _ = cache.open(text)
    whole, cached = (
        llama(torch.tensor(text)),
        [read(llama, cache, (seq, part)) for part in parts(text, cuts)],
    )
    assert_same(torch.cat(cached), whole)
    cache.truncate(seq, 0)
    assert_same(
        torch.cat([read(llama, cache, (seq, [token])) for token in text]), whole
    )  # token by token


@settings(deadline=None, max_examples=30)
@given(MODEL, st.lists(st.tuples(TEXT, CUTS), min_size=2, max_size=3))
@torch.inference_mode()
def test_texts_packed_into_one_step_do_not_see_each_other(llama, texts):
    cache = KVCache.of(llama, 20, sequences=3)
    poison(cache.keys), poison(cache.values)
    waiting = {cache.open(text)[0]: parts(text, cuts) for text, cuts in texts}
    out = {seq: [] for seq in waiting}
    while any(waiting.values()):
        step = [(seq, chunks.pop(0)) for seq, chunks in waiting.items() if chunks]
        for (seq, chunk), logits in zip(
            step, read(llama, cache, *step).split([len(chunk) for _, chunk in step])
        ):
            out[seq].append(logits)
    for (text, _), logits in zip(texts, out.values()):
        assert_same(torch.cat(logits), llama(torch.tensor(text)))


@settings(deadline=None, max_examples=30)
@given(MODEL, TEXT, st.lists(st.tuples(TEXT, st.integers(0, 20)), max_size=3), TEXT, CUTS)
@torch.inference_mode()
def test_taking_tokens_back_is_as_if_they_had_never_been(llama, text, detours, more, cuts):
    cache = KVCache.of(llama, 100, sequences=2)
    seq, _ = cache.open(text)
    read(llama, cache, (seq, text))
    for wrong, keep in detours:  # rejected drafts
        read(llama, cache, (seq, wrong))
        cache.truncate(seq, len(text) + min(keep, len(wrong)))
        cache.truncate(seq, len(text))
    other = cache.fork(seq)
    read(llama, cache, (other, [30, 29, 28]))  # which must not show in what follows
    expected = llama(torch.tensor(text + more))[len(text) :]
    assert_same(
        torch.cat([read(llama, cache, (seq, part)) for part in parts(more, cuts)]), expected
    )
    cache.truncate(other, len(text))
    assert_same(read(llama, cache, (other, more)), expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@torch.inference_mode()
def test_a_cache_of_another_dtype_reads_what_was_stored(stored):
    """Coarser than the model or finer: the result depends on what is stored, not on how the text was cut."""
    llama, text = MODELS[torch.float64, 2], [5, 9, 1, 22, 8, 17, 3]
    cache = KVCache.of(llama, len(text), sequences=2, dtype=stored)
    (one, _), (many, _) = cache.open(text), cache.open(text)
    whole = read(llama, cache, (one, text))
    assert_same(torch.cat([read(llama, cache, (many, [token])) for token in text]), whole)
    torch.testing.assert_close(
        whole, llama(torch.tensor(text)), atol=16 * torch.finfo(stored).eps, rtol=0
    )


def test_a_cache_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="max_len is 0: a cache needs at least 1"):
        KVCache.of(MODELS[torch.float32, 1], 0)


@torch.inference_mode()
def test_rows_are_those_asked_for():
    llama, text = MODELS[torch.float64, 2], [5, 9, 1, 22, 8]
    cache, whole = KVCache.of(llama, 10), llama(torch.tensor([5, 9, 1, 22, 8]))
    for rows in (
        slice(-1, None),
        slice(0, 0),
        torch.tensor([3, 0]),
        torch.tensor([], dtype=torch.int64),
    ):
        seq, _ = cache.open(text)
        assert_same(llama(torch.tensor(text), cache.extend([(seq, text)]), rows), whole[rows])
        cache.free(seq)


def test_what_fits_is_a_share_of_the_memory_that_is_free(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1_000_000, 9_000_000))
    assert tokens_that_fit(2, 3, 5, torch.bfloat16, cuda, share=0.5) == 500_000 // kv_bytes(
        2, 3, 5, 1, torch.bfloat16
    )
    half, all_of_it = (tokens_that_fit(2, 2, 64, torch.float32, cpu, share) for share in (0.5, 1.0))
    assert half > 10 and 1.3 < all_of_it / half < 3  # what is free changes between two looks


# ---- Fewer bits: the same text, however it was cut


@pytest.mark.parametrize("D", [64, 80, 72, 128])
def test_bytes_by_formula_and_as_allocated(D):
    bf16 = kv_bytes(3, 2, D, 11, torch.bfloat16)
    for name, most in (("16", 1.0), ("8", 0.54), ("8/4", 0.42), ("4", 0.33 if D != 72 else 0.35)):
        bits = widths(name)
        cache = KVCache(3, 2, D, 11, dtype=torch.bfloat16, bits=bits)
        formula = kv_bytes(3, 2, D, 11, torch.bfloat16, bits)
        assert cache.bytes == formula <= most * bf16
        assert (
            sum(
                part.untyped_storage().nbytes()
                for kept in (cache.keys, cache.values)
                for part in kept.parts
            )
            == formula
        )
    assert tokens_that_fit(
        3, 2, D, torch.bfloat16, torch.device("cpu"), bits=(8, 8)
    ) > 1.8 * tokens_that_fit(3, 2, D, torch.bfloat16, torch.device("cpu"))


def random_llama(seed: int = 1) -> Llama:
    llama = Llama(Config(**SMALL), dtype=torch.float64, seed=seed)
    for place in llama.places().values():
        place.mul_(10)
    return llama


@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 4)])
@torch.inference_mode()
def test_the_logits_do_not_depend_on_cuts_layouts_forks_or_what_was_taken_back(bits):
    llama, text = (
        random_llama(),
        torch.randint(256, (41,), generator=torch.Generator().manual_seed(2)),
    )
    whole = KVCache.of(llama, 50, bits=bits)
    expected = llama(text, whole.extend([(whole.open(())[0], text.tolist())]))
    plain = KVCache.of(llama, 50)
    exact = llama(text, plain.extend([(plain.open(())[0], text.tolist())]))
    assert (expected - exact).abs().max() > 1e-4 * exact.abs().max()  # quantized it is
    for make in (
        lambda: KVCache.of(llama, 50, 3, bits=bits),
        lambda: PagedCache.of(llama, 12, 16, 50, bits=bits),
    ):
        for sizes in ([41], [1] * 41, [20, 1, 20], [7, 33, 1]):
            cache, parts = make(), []
            seq, _ = cache.open(text.tolist())
            for chunk in text.split(sizes):
                step = cache.extend(
                    [(seq, [*chunk.tolist(), 9, 9])]
                )  # two too many, which are taken back
                parts.append(llama(torch.cat((chunk, torch.tensor([9, 9]))), step)[:-2])
                cache.truncate(seq, cache.length(seq) - 2)
                other, seq = seq, cache.fork(seq)
                cache.free(other)
            torch.testing.assert_close(torch.cat(parts), expected, atol=1e-9, rtol=1e-9)
    cache = PagedCache.of(llama, 12, 16, 50, bits=bits)
    for _ in range(2):  # the second finds the blocks of the first
        seq, have = cache.open(text.tolist())
        logits = llama(text[have:], cache.extend([(seq, text[have:].tolist())]))
        cache.free(seq)
    assert have == 32
    torch.testing.assert_close(logits, expected[32:], atol=1e-9, rtol=1e-9)


def test_what_fits_grows():
    model = Model.load("tiny", "cpu", torch.bfloat16)
    blocks = {
        name: Engine(model, None, 0, 64, 1, kv_memory=2**20, kv_bits=name).caches[0].pool.total
        for name in WIDTHS
    }
    assert blocks["8"] >= blocks["16"] / 0.54 - 1 and blocks["8/4"] >= blocks["16"] / 0.42 - 1
    assert blocks["4"] >= blocks["16"] / 0.33 - 1


def test_fewer_bits_hardly_change_what_the_embedded_model_expects():
    model = Model.load("tiny", "cpu", torch.float32)
    text = model.encode(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog."
    )
    losses = {}
    for name in WIDTHS:
        cache = KVCache.of(model.llama, len(text), bits=widths(name))
        logits = model.llama(torch.tensor(text), cache.extend([(cache.open(())[0], text)]))
        losses[name] = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(text[1:])).item()
    for name, most in (("8", 0.005), ("8/4", 0.05), ("4", 0.05)):
        assert abs(losses[name] / losses["16"] - 1) < most


def test_what_is_refused():
    for wrong in ("3", 2, "4/8", ""):
        with pytest.raises(ValueError, match="kv_bits is .*: it must be 16, 8, 4 or 8/4"):
            widths(wrong)
    with pytest.raises(ValueError, match="head_dim is 5: .* use 8 bits"):
        KVCache(1, 1, 5, 4, bits=(8, 4))


@pytest.mark.parametrize("room", [Ops().room, heads_first])
@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([(16, None), (8, None), (4, GROUP), (4, None)]),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(0, 99),
)
def test_a_store_changes_the_slots_it_is_told_and_reads_what_it_holds(
    room, kind, heads, half, seed
):
    (bits, group), D, generator = kind, 2 * half, torch.Generator().manual_seed(seed)
    kept = Store.empty((2, 3, 4, heads, D), bits, torch.float32, torch.device("cpu"), room, group)
    assert [tuple(part.shape[:4]) for part in kept.parts] == [(2, 3, 4, heads)] * len(kept.parts)
    assert kept.nbytes == 2 * 3 * 4 * heads * sum(
        width * kind.itemsize for width, kind in layout(D, bits, torch.float32, group)
    )
    every, x = torch.arange(12), torch.randn(12, heads, D, generator=generator) * 3
    for layer in (0, 1):
        kept.write(layer, every, x * (layer + 1))
    expected = kept.decode(kept.encode(x), torch.float32).clone()
    assert torch.equal(kept.read(0, every, torch.float32), expected) and torch.equal(
        kept.read(0, slice(2, 7), torch.float32), expected[2:7]
    )
    new, slots = (
        torch.randn(2, heads, D, generator=generator),
        torch.randperm(12, generator=generator)[:2],
    )
    kept.write(0, slots, new)
    expected[slots] = kept.decode(kept.encode(new), torch.float32)
    assert (
        torch.equal(kept.read(0, every, torch.float32), expected)
        and kept.read(0, every[:1], torch.float64).dtype == torch.float64
    )
    kept.copy(2, 0, 3)
    expected[:3] = expected[8:11]
    assert torch.equal(kept.read(0, every, torch.float32), expected)
    assert torch.equal(
        kept.read(1, every[3:8], torch.float32), kept.decode(kept.encode(2 * x), torch.float32)[3:8]
    )
