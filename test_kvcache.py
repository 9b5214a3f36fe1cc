"""The cache against lists of vectors; and a text cut in any way gives the same logits."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from errors import UserError
from kernels import Ops, attention, ops_for
from kvcache import (
    AttentionMetadata,
    CacheFull,
    KVCache,
    KVSpec,
    SequenceSlice,
    Store,
    check_free,
    stored_parts,
)
from model import Llama
from paged import PagedCache
from quant import KEY_GROUP, widths
from testing.models import random_llama
from testing.tensors import attend, heads_first, poison

L, G, H, D, N, S = 2, 2, 4, 6, 9, 3
OPS = ops_for("cpu")
CPU = torch.device("cpu")


# ---- Attention metadata


def test_metadata_says_where_each_token_belongs():
    """Blocks of 4 tokens; the second sequence begins in the middle of a block."""
    sequences = [SequenceSlice([7], 0, 2), SequenceSlice([5, 0, 3], 3, 9)]
    metadata = AttentionMetadata(sequences, 4)
    assert metadata.num_new_tokens == [2, 6] and metadata.positions.dtype == torch.int32
    assert metadata.positions.tolist() == [0, 1, 3, 4, 5, 6, 7, 8]
    assert metadata.slot_mapping.tolist() == [28, 29, 23, 0, 1, 2, 3, 12]
    assert metadata.cu_seqlens.tolist() == [0, 2, 8] and metadata.seq_lens.tolist() == [2, 9]
    assert metadata.block_tables.tolist() == [[7, 0, 0], [5, 0, 3]]
    assert [slots.tolist() for slots in metadata.slots] == [
        [28, 29],
        [20, 21, 22, 23, 0, 1, 2, 3, 12],
    ]


# ---- Every operation beside the same on Python lists


def state(cache: KVCache) -> tuple:
    """All that an operation could change, to the bit (not-a-numbers and all)."""
    return (
        {seq: list(sequence.tokens) for seq, sequence in cache._sequences.items()},
        list(cache._free_rows),
        *(store.parts[0].clone().view(torch.int64) for store in (cache.keys, cache.values)),
    )


def same(a: tuple, b: tuple) -> bool:
    return a[:2] == b[:2] and torch.equal(a[2], b[2]) and torch.equal(a[3], b[3])


class CacheMachine(RuleBasedStateMachine):
    """Beside {seq: [(k, v) of each token, for all layers]}."""

    def __init__(self):
        super().__init__()
        self.cache = KVCache(KVSpec(L, G, D, dtype=torch.float64), N, S)
        self.texts = {}
        self.poison()
        self.random = torch.Generator().manual_seed(0)

    def poison(self):
        """What is not stored, or no longer, must never be read."""
        for seq in range(S):
            length = len(self.texts.get(seq, ()))
            for store in (self.cache.keys, self.cache.values):
                store.parts[0][:, seq, length:] = math.nan

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
            self.refused(CacheFull, f"all {S} rows .* free a", lambda: self.cache.open([1]))
            return
        seq, num_cached = self.cache.open([1, 2])
        assert num_cached == 0 and seq not in self.texts
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
            seq, n = full[0]
            match = (
                f"sequence {seq} has {len(self.texts[seq])} tokens and cannot take {n} more: "
                f"the limit is {N}; ask for fewer, or .*max_len"
            )
            extend = self.cache.extend
            self.refused(CacheFull, match, lambda: extend([(seq, range(n)) for seq, n in wanted]))
        elif wanted:
            self.attend(wanted)

    def attend(self, wanted):
        metadata = self.cache.extend([(seq, range(n)) for seq, n in wanted])
        T = sum(n for _, n in wanted)
        q = self.rand(L, T, H, D)
        k = self.rand(L, T, G, D)
        v = self.rand(L, T, G, D)
        outs = [attend(OPS, q[i], k[i], v[i], metadata, i) for i in range(L)]
        first = 0
        for seq, n in wanted:  # as if each had been alone
            own = slice(first, first + n)
            self.texts[seq] += [(k[:, t], v[:, t]) for t in range(first, first + n)]
            keys, values = (torch.stack(x, dim=1) for x in zip(*self.texts[seq]))  # [L, m, G, D]
            for i in range(L):
                expected = attention(q[i, own], keys[i], values[i])
                torch.testing.assert_close(outs[i][own], expected, atol=1e-12, rtol=1e-12)
            first += n

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 9))
    def refuse(self, i):
        """Refused whole: also when the first half of the request was good."""
        seq = self.pick(i)
        other = self.pick(i + 1)
        extend = self.cache.extend
        self.refused(
            ValueError,
            "at least one new token",
            lambda: extend([]),
            lambda: extend([(seq, [1]), (other, [])]),
        )
        twice = [(seq, [1]), (seq, [2])]
        self.refused(ValueError, f"twice in a step: .*{seq}", lambda: extend(twice))
        self.refused(ValueError, "cannot be cut to -1", lambda: self.cache.truncate(seq, -1))
        if len(self.texts[seq]) < N:
            unknown = [(seq, [1]), (77, [1])]
            self.refused(KeyError, "77 is not open; open ones: ", lambda: extend(unknown))

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 9), keep=st.integers(0, N + 2))
    def truncate(self, i, keep):
        seq = self.pick(i)
        if keep > len(self.texts[seq]):
            match = f"cannot be cut to {keep}"
            self.refused(ValueError, match, lambda: self.cache.truncate(seq, keep))
            return
        self.cache.truncate(seq, keep)
        del self.texts[seq][keep:]
        self.poison()

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 9))
    def free(self, i):
        seq = self.pick(i)
        cache = self.cache
        cache.free(seq)
        del self.texts[seq]
        self.poison()
        verbs = (
            cache.length,
            cache.free,
            lambda seq: cache.truncate(seq, 0),
            lambda seq: cache.fits([(seq, 1)]),
            lambda seq: cache.extend([(seq, [1])]),
        )
        calls = [partial(verb, seq) for verb in verbs]
        self.refused(KeyError, f"sequence {seq} is not open", *calls)

    @invariant()
    def rows_are_open_or_free_and_hold_their_texts(self):
        lengths = {seq: len(text) for seq, text in self.texts.items()}
        assert {seq: self.cache.length(seq) for seq in self.texts} == lengths
        assert sorted([*self.texts, *self.cache._free_rows]) == list(range(S))
        for seq, text in self.texts.items():
            for store, vectors in zip((self.cache.keys, self.cache.values), zip(*text)):
                stored = store.parts[0][:, seq, : len(text)]
                assert torch.equal(stored, torch.stack(vectors, 1))


CacheMachine.TestCase.settings = settings(stateful_step_count=20)
test_any_history = CacheMachine.TestCase


def test_commit_keeps_the_text_without_its_last_token():
    """Drafts that only the device knew (0) become known; rejected ones are forgotten."""
    cache = KVCache(KVSpec(1, 1, 2), 9)
    seq, _ = cache.open(())
    cache.extend([(seq, [5, 6, 0, 0, 0])])
    cache.commit(seq, [5, 6, 7, 8])  # of three drafts one is accepted; 8 is the correction
    assert cache.sequence(seq).tokens == [5, 6, 7]
    cache.extend([(seq, [8])])
    cache.commit(seq, [5, 6, 7, 8, 9])
    assert cache.sequence(seq).tokens == [5, 6, 7, 8]
    cache.truncate(seq, 1)  # and other tokens follow
    cache.extend([(seq, [3, 0])])
    cache.commit(seq, [5, 3, 4, 2])
    assert cache.sequence(seq).tokens == [5, 3, 4]


# ---- Bytes


def allocated(cache: KVCache) -> int:
    parts = [*cache.keys.parts, *cache.values.parts]
    return sum(part.untyped_storage().nbytes() for part in parts)


def test_bytes_by_formula_and_as_allocated():
    assert KVSpec(32, 8, 128, dtype=torch.bfloat16).bytes(1) == 131_072  # Llama 3.1 8B, a token
    assert KVSpec(80, 8, 128, dtype=torch.bfloat16).bytes(4096) == 1_342_177_280  # Llama 2 70B
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        spec = KVSpec(3, 2, 8, dtype=dtype)
        cache = KVCache(spec, 11, 2)
        formula = spec.bytes(2 * 16)  # 11 rounded up to eights, which keeps layers aligned
        assert cache.bytes == allocated(cache) == formula == 2 * 2 * 3 * 2 * 8 * 16 * dtype.itemsize
    for D in (64, 80, 72, 128):
        plain = KVSpec(3, 2, D, dtype=torch.bfloat16).bytes(16)
        most = {"16": 1.0, "8": 0.54, "8/4": 0.42, "4": 0.35 if D == 72 else 0.33}
        for name, share in most.items():
            spec = KVSpec(3, 2, D, dtype=torch.bfloat16, bits=widths(name))
            cache = KVCache(spec, 16)
            assert cache.bytes == allocated(cache) == spec.bytes(16) <= share * plain
            assert spec.tokens_in(10.5 * spec.bytes(1)) == 10


def test_impossible_caches_are_refused():
    for wrong in (dict(max_len=0), dict(sequences=0), dict(max_len=-1)):
        with pytest.raises(UserError, match="a cache of .* tokens: both must be at least 1"):
            KVCache(KVSpec(1, 1, 2), **(dict(max_len=3) | wrong))
    for dtype in (torch.int8, torch.bool):
        with pytest.raises(UserError, match=f"a cache of {dtype} is not supported: use float64"):
            KVCache(KVSpec(1, 1, 2, dtype=dtype), 3)
    with pytest.raises(CacheFull, match="3 x 10{12} tokens needs 96000.0 GB, and cpu does not"):
        KVCache(KVSpec(1, 1, 4), 10**12, 3)
    with pytest.raises(UserError, match="head_dim is 5: .* use 8 bits"):
        KVCache(KVSpec(1, 1, 5, bits=(8, 4)), 4)
    for wrong in ("3", 2, "4/8", ""):
        with pytest.raises(UserError, match="kv_bits is .*: it must be 16, 8, 4 or 8/4"):
            widths(wrong)


# ---- However a text is cut, the logits are the same

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
TEXT = st.lists(st.integers(0, 30), min_size=1, max_size=14)
CUTS = st.lists(st.integers(1, 14), max_size=6)
SHAPE = dict(vocab_size=31, num_hidden_layers=3, head_dim=10, max_position_embeddings=64)
SHAPE |= dict(tie_word_embeddings=False)
MODELS = {}
for dtype, kv_heads in ((torch.float32, 2), (torch.float64, 1), (torch.float64, 4)):
    MODELS[dtype, kv_heads] = random_llama(3, dtype=dtype, num_key_value_heads=kv_heads, **SHAPE)
MODEL = st.sampled_from(list(MODELS.values()))
WIDE = MODELS[torch.float64, 4]


def chunks_of(text: list[int], cuts: list[int]) -> list[list[int]]:
    """The text, cut at these places."""
    bounds = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    return [text[a:b] for a, b in zip(bounds, bounds[1:])]


def read(llama: Llama, cache: KVCache, *chunks: tuple[int, list[int]]) -> torch.Tensor:
    """Logits of one step."""
    tokens = torch.tensor(sum((chunk for _, chunk in chunks), []))
    return llama(tokens, cache.extend(list(chunks)))


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[logits.dtype]
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def test_these_models_would_notice():
    """Logits of order 1, in which one other token far back, or its position, shows."""
    text = [7, 3, 11, 5, 3, 20, 1, 30, 2, 9]
    for llama in MODELS.values():
        last, other, moved = (
            llama(torch.tensor(t))[-1] for t in (text, [8, *text[1:]], [3, 7, *text[2:]])
        )
        assert last.std() > 0.3
        assert (last - other).abs().max() > 0.01 and (last - moved).abs().max() > 0.01


@given(MODEL, st.lists(st.tuples(TEXT, CUTS), min_size=2, max_size=3))
@torch.inference_mode()
def test_texts_packed_into_one_step_do_not_see_each_other(llama, texts):
    cache = KVCache(llama.kv_spec(), 20, 3)
    poison(cache.keys)
    poison(cache.values)
    waiting = {cache.open(text)[0]: chunks_of(text, cuts) for text, cuts in texts}
    logits = {seq: [] for seq in waiting}
    while any(waiting.values()):
        step = [(seq, chunks.pop(0)) for seq, chunks in waiting.items() if chunks]
        parts = read(llama, cache, *step).split([len(chunk) for _, chunk in step])
        for (seq, _), part in zip(step, parts):
            logits[seq].append(part)
    for (text, _), parts in zip(texts, logits.values()):
        assert_same(torch.cat(parts), llama(torch.tensor(text)))


@given(MODEL, TEXT, st.lists(st.tuples(TEXT, st.integers(0, 20)), max_size=3), TEXT, CUTS)
@torch.inference_mode()
def test_truncated_tokens_are_as_if_they_had_never_been(llama, text, detours, more, cuts):
    cache = KVCache(llama.kv_spec(), 100, 2)
    seq, _ = cache.open(text)
    read(llama, cache, (seq, text))
    for wrong, keep in detours:  # rejected drafts
        read(llama, cache, (seq, wrong))
        cache.truncate(seq, len(text) + min(keep, len(wrong)))
        cache.truncate(seq, len(text))
    other, _ = cache.open(text)
    read(llama, cache, (other, [*text, 30, 29, 28]))  # which must not show in what follows
    expected = llama(torch.tensor(text + more))[len(text) :]
    logits = [read(llama, cache, (seq, chunk)) for chunk in chunks_of(more, cuts)]
    assert_same(torch.cat(logits), expected)
    cache.truncate(other, len(text))
    assert_same(read(llama, cache, (other, more)), expected)


@torch.inference_mode()
def test_a_cache_of_another_dtype_reads_what_was_stored():
    """Coarser than the model or finer: the result depends on what is stored, not on the cuts."""
    text = [5, 9, 1, 22, 8, 17, 3]
    for stored in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        cache = KVCache(replace(WIDE.kv_spec(), dtype=stored), len(text), 2)
        one, _ = cache.open(text)
        many, _ = cache.open(text)
        whole = read(WIDE, cache, (one, text))
        assert_same(torch.cat([read(WIDE, cache, (many, [token])) for token in text]), whole)
        atol = 16 * torch.finfo(stored).eps
        torch.testing.assert_close(whole, WIDE(torch.tensor(text)), atol=atol, rtol=0)


# ---- Fewer bits: the same text, however it was cut


@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 4)])
@torch.inference_mode()
def test_quantized_logits_do_not_depend_on_cuts_layouts_or_truncated_tokens(bits):
    llama = random_llama(1)
    text = torch.randint(256, (41,), generator=torch.Generator().manual_seed(2))
    tokens = text.tolist()
    cache = KVCache(llama.kv_spec(bits=bits), 50)
    expected = llama(text, cache.extend([(cache.open(())[0], tokens)]))
    exact = llama(text)
    assert (expected - exact).abs().max() > 1e-4 * exact.abs().max()  # quantized it is
    for make in (
        lambda: KVCache(llama.kv_spec(bits=bits), 50, 3),
        lambda: PagedCache(llama.kv_spec(bits=bits), 12, 16, max_len=50),
    ):
        for sizes in ([1] * 41, [20, 1, 20], [7, 33, 1]):
            cache = make()
            seq, _ = cache.open(tokens)
            logits = []
            for chunk in text.split(sizes):
                with_drafts = torch.cat((chunk, torch.tensor([9, 9])))  # two that are rejected
                metadata = cache.extend([(seq, with_drafts.tolist())])
                logits.append(llama(with_drafts, metadata)[:-2])
                cache.truncate(seq, cache.length(seq) - 2)
            torch.testing.assert_close(torch.cat(logits), expected, atol=1e-9, rtol=1e-9)
    for _ in range(2):  # in the paged cache; the second finds the blocks of the first
        seq, num_cached = cache.open(tokens)
        logits = llama(text[num_cached:], cache.extend([(seq, tokens[num_cached:])]))
        cache.commit(seq, [*tokens, 0])
        cache.free(seq)
    assert num_cached == 32
    torch.testing.assert_close(logits, expected[32:], atol=1e-9, rtol=1e-9)


@given(
    st.sampled_from([Ops().empty_kv, heads_first]),
    st.sampled_from([(16, None), (8, None), (4, KEY_GROUP), (4, None)]),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(0, 99),
)
def test_a_store_changes_its_slots_alone_and_reads_them(empty_kv, kind, heads, half, seed):
    bits, group = kind
    D = 2 * half
    generator = torch.Generator().manual_seed(seed)
    store = Store.empty((2, 3, 4, heads, D), bits, torch.float32, CPU, empty_kv, group)
    assert all(part.shape[:4] == (2, 3, 4, heads) for part in store.parts)
    widths = stored_parts(D, bits, torch.float32, group)
    assert store.nbytes == 2 * 3 * 4 * heads * sum(width * d.itemsize for width, d in widths)
    every = torch.arange(12)
    x = torch.randn(12, heads, D, generator=generator) * 3
    for layer in (0, 1):
        store.write(layer, every, x * (layer + 1))
    expected = store.decode(store.encode(x), torch.float32).clone()
    assert torch.equal(store.read(0, every, torch.float32), expected)
    new = torch.randn(2, heads, D, generator=generator)
    slots = torch.randperm(12, generator=generator)[:2]
    store.write(0, slots, new)
    expected[slots] = store.decode(store.encode(new), torch.float32)
    assert torch.equal(store.read(0, every, torch.float32), expected)
    assert store.read(0, every[:1], torch.float64).dtype == torch.float64
    doubled = store.decode(store.encode(2 * x), torch.float32)
    assert torch.equal(store.read(1, every[3:8], torch.float32), doubled[3:8])


def test_all_free_memory_may_be_asked_for_and_no_more(monkeypatch):
    monkeypatch.setattr("kvcache.free_memory", lambda device: 100)
    check_free(100, CPU)
    with pytest.raises(UserError, match="101 bytes of memory, and 100 are free"):
        check_free(101, CPU)
