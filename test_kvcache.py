"""The cache against lists of vectors; and a text cut in any way gives the same logits."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from config import Config
from kernels import attention
from kvcache import CacheFull, KVCache, kv_bytes, tokens_that_fit
from model import Llama

L, G, H, D, N, S = 2, 2, 4, 6, 9, 3


def state(cache: KVCache) -> tuple:
    """All that an operation could change, to the bit (not-a-numbers and all)."""
    return dict(cache._lengths), list(cache._rows), cache.keys.view(torch.int64).clone(), cache.values.view(torch.int64).clone()


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
                store[:, seq, :, len(self.texts.get(seq, ())):] = math.nan

    def refused(self, error, match, operation):
        before = state(self.cache)
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
            self.refused(CacheFull, f"all {S} rows .* free a sequence", lambda: self.cache.open([1]))
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
            self.refused(CacheFull, f"sequence {seq} has {have} tokens and cannot take {n} more: a row holds {N}; ask for fewer, or .*max_len",
                         lambda: self.cache.extend([(seq, range(n)) for seq, n in wanted]))
        elif wanted:
            self.attend(wanted)

    def attend(self, wanted):
        step = self.cache.extend([(seq, range(n)) for seq, n in wanted])
        assert step.positions.tolist() == [len(self.texts[seq]) + i for seq, n in wanted for i in range(n)]
        T = sum(n for _, n in wanted)
        q, k, v = self.rand(L, T, H, D), self.rand(L, T, G, D), self.rand(L, T, G, D)
        outs = [step.attend(layer, q[layer], k[layer], v[layer]) for layer in range(L)]
        at = 0
        for seq, n in wanted:                                                # as if each had been alone
            self.texts[seq] += [(k[:, i], v[:, i]) for i in range(at, at + n)]
            for layer in range(L):
                keys, values = (torch.stack([token[i][layer] for token in self.texts[seq]], dim=1) for i in (0, 1))      # [G, m, D]
                torch.testing.assert_close(outs[layer][at:at + n], attention(q[layer, at:at + n], keys, values), atol=1e-12, rtol=1e-12)
            at += n

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 9))
    def refuse(self, i):
        """Refused whole: also when the first half of the request was good."""
        seq, other = self.pick(i), self.pick(i + 1)
        extend = self.cache.extend
        self.refused(ValueError, "at least one new token", lambda: extend([]))
        self.refused(ValueError, "at least one new token", lambda: extend([(seq, [1]), (other, [])]))
        self.refused(ValueError, f"twice in one step: .*{seq}", lambda: extend([(seq, [1]), (seq, [2])]))
        self.refused(ValueError, f"sequence {seq} has .* cannot be truncated to -1", lambda: self.cache.truncate(seq, -1))
        if len(self.texts[seq]) < N:
            self.refused(KeyError, "sequence 77 is not open; open ones: ", lambda: extend([(seq, [1]), (77, [1])]))

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 9), keep=st.integers(0, N + 2))
    def truncate(self, i, keep):
        seq = self.pick(i)
        if keep > len(self.texts[seq]):
            self.refused(ValueError, f"cannot be truncated to {keep}", lambda: self.cache.truncate(seq, keep))
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
        verbs = self.cache.length, self.cache.free, self.cache.fork, lambda s: self.cache.truncate(s, 0), lambda s: self.cache.fits([(s, 1)])
        for operation in (*verbs, lambda s: self.cache.extend([(s, [1])])):
            self.refused(KeyError, f"sequence {seq} is not open", lambda: operation(seq))

    @invariant()
    def rows_are_open_or_free_and_hold_their_texts(self):
        assert {seq: self.cache.length(seq) for seq in self.texts} == {seq: len(text) for seq, text in self.texts.items()}
        assert sorted([*self.texts, *self.cache._rows]) == list(range(S))
        for seq, text in self.texts.items():
            for i, store in enumerate((self.cache.keys, self.cache.values)):
                assert all(torch.equal(store[:, seq, :, t], token[i]) for t, token in enumerate(text))


CacheMachine.TestCase.settings = settings(deadline=None, max_examples=50, stateful_step_count=25)
test_any_history = CacheMachine.TestCase


def test_a_fork_and_its_origin_part_ways():
    cache = KVCache(1, 1, 2, max_len=4, sequences=2)
    old, _ = cache.open([])
    one = torch.ones(2, 1, 2)
    cache.extend([(old, [1, 2])]).attend(0, one, one, one)
    new = cache.fork(old)
    both = torch.tensor([[[3.0, 3]], [[9.0, 9]]])
    out = cache.extend([(old, [3]), (new, [9])]).attend(0, one * 0, one, both)                           # equal scores: means of 1, 1 and the new
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([5 / 3, 11 / 3]))
    cache.truncate(old, 0)
    assert (cache.length(old), cache.length(new)) == (0, 3) and cache.values[0, new, 0, :3, 0].tolist() == [1, 1, 9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_formula_is_the_allocation(dtype):
    cache = KVCache(3, 2, 8, max_len=11, sequences=2, dtype=dtype)
    real = sum(store.untyped_storage().nbytes() for store in (cache.keys, cache.values))
    assert cache.bytes == 2 * kv_bytes(3, 2, 8, 11, dtype) == kv_bytes(3, 2, 8, 22, dtype) == real == 2 * 2 * 3 * 2 * 8 * 11 * dtype.itemsize


def test_what_is_said_of_llamas():
    assert kv_bytes(32, 8, 128, 1, torch.bfloat16) == 131_072                       # Llama 3.1 8B, a token
    assert kv_bytes(80, 8, 128, 4096, torch.bfloat16) == 1_342_177_280              # Llama 2 70B: not the 80 GB of an article


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("wrong", ["layers", "kv_heads", "head_dim", "max_len", "sequences"])
def test_sizes_below_one_are_refused(wrong, value):
    with pytest.raises(ValueError, match=f"{wrong} is {value}: a cache needs at least 1"):
        KVCache(**{**dict(layers=1, kv_heads=1, head_dim=2, max_len=3, sequences=1), wrong: value})


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_a_dtype_that_is_no_number_format_of_a_cache_is_refused(dtype):
    with pytest.raises(ValueError, match=f"a cache of {dtype} is not supported; use one of float64, float32, bfloat16, float16"):
        KVCache(1, 1, 2, 3, dtype=dtype)


def test_a_cache_larger_than_the_memory_is_refused_with_its_size():
    with pytest.raises(CacheFull, match="a cache of 3 x 1000000000000 tokens needs 96000.0 GB, which cpu does not have: ask for a smaller max_len"):
        KVCache(1, 1, 4, 10**12, 3)


# ---- However a text is cut, the logits are the same

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
TEXT = st.lists(st.integers(0, 30), min_size=1, max_size=20)
CUTS = st.lists(st.integers(1, 20), max_size=8)


def loud(dtype: torch.dtype, heads: int, kv_heads: int) -> Llama:
    """A model whose logits are of order 1 and depend on everything."""
    llama = Llama(Config(vocab_size=31, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=heads,
                         num_key_value_heads=kv_heads, head_dim=10, max_position_embeddings=64), dtype=dtype, seed=3)
    with torch.no_grad():
        for name, place in llama.places().items():
            place.mul_(1 if "norm" in name else 10)
    return llama.pack()


MODELS = {(dtype, kv_heads): loud(dtype, 4, kv_heads) for dtype in TOLERANCE for kv_heads in (1, 2, 4)}
MODEL = st.sampled_from(list(MODELS.values()))


def parts(text: list[int], cuts: list[int]) -> list[list[int]]:
    """The text, cut at these places."""
    bounds = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    return [text[a:b] for a, b in zip(bounds, bounds[1:])]


def read(llama: Llama, cache: KVCache, *chunks: tuple[int, list[int]]) -> torch.Tensor:
    """Logits of one step."""
    return llama(torch.tensor(sum((chunk for _, chunk in chunks), [])), cache.extend(list(chunks)))


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=TOLERANCE[logits.dtype], rtol=TOLERANCE[logits.dtype])


@pytest.mark.parametrize("llama", MODELS.values(), ids=map(str, MODELS))
@torch.inference_mode()
def test_these_models_would_notice(llama):
    """Logits of order 1, in which one other token far back, or its place, is seen: without this, what follows proves nothing."""
    text = [7, 3, 11, 5, 3, 20, 1, 30, 2, 9]
    last, other, moved = (llama(torch.tensor(t))[-1] for t in (text, [8, *text[1:]], [3, 7, *text[2:]]))
    assert last.std() > 0.3 and (last - other).abs().max() > 0.01 and (last - moved).abs().max() > 0.01


@settings(deadline=None, max_examples=120)
@given(MODEL, TEXT, CUTS)
@torch.inference_mode()
def test_every_split_of_a_prompt(llama, text, cuts):
    cache = llama.cache(len(text))
    cache.keys.fill_(math.nan), cache.values.fill_(math.nan)
    seq, _ = cache.open(text)
    whole, cached = llama(torch.tensor(text)), [read(llama, cache, (seq, part)) for part in parts(text, cuts)]
    assert_same(torch.cat(cached), whole)
    cache.truncate(seq, 0)
    assert_same(torch.cat([read(llama, cache, (seq, [token])) for token in text]), whole)                # token by token


@settings(deadline=None, max_examples=60)
@given(MODEL, st.lists(st.tuples(TEXT, CUTS), min_size=2, max_size=3))
@torch.inference_mode()
def test_texts_packed_into_one_step_do_not_see_each_other(llama, texts):
    cache = llama.cache(20, sequences=3)
    cache.keys.fill_(math.nan), cache.values.fill_(math.nan)
    waiting = {cache.open(text)[0]: parts(text, cuts) for text, cuts in texts}
    out = {seq: [] for seq in waiting}
    while any(waiting.values()):
        step = [(seq, chunks.pop(0)) for seq, chunks in waiting.items() if chunks]
        for (seq, chunk), logits in zip(step, read(llama, cache, *step).split([len(chunk) for _, chunk in step])):
            out[seq].append(logits)
    for (text, _), logits in zip(texts, out.values()):
        assert_same(torch.cat(logits), llama(torch.tensor(text)))


@settings(deadline=None, max_examples=60)
@given(MODEL, TEXT, st.lists(st.tuples(TEXT, st.integers(0, 20)), max_size=3), TEXT, CUTS)
@torch.inference_mode()
def test_taking_tokens_back_is_as_if_they_had_never_been(llama, text, detours, more, cuts):
    cache = llama.cache(100, sequences=2)
    seq, _ = cache.open(text)
    read(llama, cache, (seq, text))
    for wrong, keep in detours:                                              # rejected drafts
        read(llama, cache, (seq, wrong))
        cache.truncate(seq, len(text) + min(keep, len(wrong)))
        cache.truncate(seq, len(text))
    other = cache.fork(seq)
    read(llama, cache, (other, [30, 29, 28]))                                # which must not show in what follows
    expected = llama(torch.tensor(text + more))[len(text):]
    assert_same(torch.cat([read(llama, cache, (seq, part)) for part in parts(more, cuts)]), expected)
    cache.truncate(other, len(text))
    assert_same(read(llama, cache, (other, more)), expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@torch.inference_mode()
def test_a_cache_of_another_dtype_reads_what_was_stored(stored):
    """Coarser than the model or finer: the result depends on what is stored, not on how the text was cut."""
    llama, text = MODELS[torch.float64, 2], [5, 9, 1, 22, 8, 17, 3]
    cache = llama.cache(len(text), sequences=2, dtype=stored)
    (one, _), (many, _) = cache.open(text), cache.open(text)
    whole = read(llama, cache, (one, text))
    assert_same(torch.cat([read(llama, cache, (many, [token])) for token in text]), whole)
    torch.testing.assert_close(whole, llama(torch.tensor(text)), atol=16 * torch.finfo(stored).eps, rtol=0)


def test_a_cache_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="max_len is 0: a cache needs at least 1"):
        MODELS[torch.float32, 1].cache(0)


@torch.inference_mode()
def test_rows_are_those_asked_for():
    llama, text = MODELS[torch.float64, 2], [5, 9, 1, 22, 8]
    cache, whole = llama.cache(10), llama(torch.tensor([5, 9, 1, 22, 8]))
    for rows in (slice(-1, None), slice(0, 0), torch.tensor([3, 0]), torch.tensor([], dtype=torch.int64)):
        seq, _ = cache.open(text)
        assert_same(llama(torch.tensor(text), cache.extend([(seq, text)]), rows), whole[rows])
        cache.free(seq)


def test_what_fits_is_a_share_of_the_memory_that_is_free(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1_000_000, 9_000_000))
    assert tokens_that_fit(2, 3, 5, torch.bfloat16, cuda, share=0.5) == 500_000 // kv_bytes(2, 3, 5, 1, torch.bfloat16)
    half, all_of_it = (tokens_that_fit(2, 2, 64, torch.float32, cpu, share) for share in (0.5, 1.0))
    assert half > 10 and 1.3 < all_of_it / half < 3                          # what is free changes between two looks
