"""The paged cache beside Python lists, with planted collisions and faults; logits of a cold run."""

import math
from functools import cache

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from errors import UserError
from kernels import attention, ops_for
from kvcache import CacheFull, KVSpec
from model import Llama
from paged import BlockPool, PagedCache, blocks_that_fit
from testing.models import random_llama
from testing.tensors import attend, poison

L, G, H, D, BLOCKS, S = 2, 2, 4, 6, 9, 3


class Colliding(tuple):
    """A key whose hash says almost nothing."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 0


@cache
def keys_of(*text: int) -> torch.Tensor:
    """k (and −v) of each token of a text: [L, len, G, D], different for every text and position."""
    codes = torch.empty(L, len(text), dtype=torch.float64)
    for layer in range(L):
        for i in range(len(text)):
            codes[layer, i] = hash((text[: i + 1], layer)) % 100003
    return (codes[..., None, None] + torch.arange(G * D).view(G, D)).sin()


class PagedMachine(RuleBasedStateMachine):
    """Texts of tokens 0 and 1, so that many begin alike.

    The keys and values of a token are made from its whole text: a block that is shared wrongly, or
    written to while others read it, shows.
    """

    def __init__(self):
        super().__init__()
        self.cache = PagedCache(KVSpec(L, G, D, dtype=torch.float64), BLOCKS, S, max_len=22)
        self.texts: dict[int, list[int]] = {}  # what each sequence has stored
        poison(self.cache.keys)
        poison(self.cache.values)

    @initialize(collide=st.booleans())
    def plant_collisions(self, collide):
        if collide:
            key = self.cache._block_key
            self.cache._block_key = lambda *where: Colliding(key(*where))

    def state(self):
        pool = self.cache.pool
        sequences = {}
        for seq, s in self.cache._sequences.items():
            sequences[seq] = (list(s.tokens), list(s.block_table), list(s.block_hashes))
        return (
            sequences,
            list(pool.free),
            list(pool.idle),
            list(pool.references),
            dict(pool.cached),
            dict(pool.key_of),
            dict(pool.hash_of),
            self.cache.keys.parts[0].clone().view(torch.int64),
        )

    def unchanged(self, before):
        after = self.state()
        assert after[:-1] == before[:-1] and torch.equal(after[-1], before[-1])

    def refused(self, error, match, operation):
        before = self.state()
        with pytest.raises(error, match=match):
            operation()
        self.unchanged(before)

    def pick(self, i):
        return sorted(self.texts)[i % len(self.texts)]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def open(self, tokens):
        seq, num_cached = self.cache.open(tokens)
        assert num_cached < len(tokens) and num_cached % S == 0 and seq not in self.texts
        self.texts[seq] = tokens[:num_cached]

    @precondition(lambda self: self.texts)
    @rule(
        pieces=st.lists(
            st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=3
        ),
        first=st.integers(0, 5),
    )
    def extend(self, pieces, first):
        seqs = sorted(self.texts)
        wanted = {}
        for i, piece in enumerate(pieces):
            wanted[seqs[(first + i) % len(seqs)]] = piece
        counts = [(seq, len(piece)) for seq, piece in wanted.items()]
        before = self.state()
        fits = self.cache.fits(counts)
        self.unchanged(before)
        if not fits:
            match = "are free or idle: free a sequence|the limit is 22"
            self.refused(CacheFull, match, lambda: self.cache.extend([*wanted.items()]))
            return
        free, cached, _ = self.cache.check()
        num_new = self.cache._num_new_blocks(counts)
        self.attend(wanted)
        assert sum(self.cache.check()[:2]) == free + cached - num_new

    def attend(self, wanted):
        metadata = self.cache.extend([*wanted.items()])
        starts = {seq: len(self.texts[seq]) for seq in wanted}
        for seq, piece in wanted.items():
            self.texts[seq] = self.texts[seq] + piece
        for layer in range(L):
            new = [keys_of(*self.texts[seq])[layer, starts[seq] :] for seq in wanted]
            k = torch.cat(new)
            generator = torch.Generator().manual_seed(layer)
            q = torch.randn(len(k), H, D, dtype=torch.float64, generator=generator)
            out = attend(ops_for("cpu"), q, k, -k, metadata, layer)
            counts = [len(piece) for piece in wanted.values()]
            for seq, own_q, own_out in zip(wanted, q.split(counts), out.split(counts)):
                keys = keys_of(*self.texts[seq])[layer]
                assert torch.allclose(own_out, attention(own_q, keys, -keys), atol=1e-12)

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 5), share=st.floats(0, 1))
    def truncate(self, i, share):
        seq = self.pick(i)
        length = round(share * len(self.texts[seq]))
        num_cached = S * len(self.cache.sequence(seq).block_hashes)
        if length < num_cached:
            match = f"`open` may find its first {num_cached} tokens"
            self.refused(ValueError, match, lambda: self.cache.truncate(seq, length))
            return
        keys = self.cache.keys.parts[0].clone().view(torch.int64)
        self.cache.truncate(seq, length)
        self.texts[seq] = self.texts[seq][:length]
        assert torch.equal(keys, self.cache.keys.parts[0].view(torch.int64))

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 5))
    def commit(self, i):
        """All that is stored is kept. What was read before is found at once."""
        seq = self.pick(i)
        text = self.texts[seq]
        self.cache.commit(seq, [*text, 0])
        found, num_cached = self.cache.open([*text, 0])
        assert num_cached == len(text) // S * S
        self.cache.free(found)

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 5))
    def free(self, i):
        seq = self.pick(i)
        self.cache.free(seq)
        del self.texts[seq]
        self.refused(KeyError, f"sequence {seq} is not open", lambda: self.cache.free(seq))

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 5), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=7))
    def refuse(self, i, tokens):
        def fail(count):
            raise MemoryError("planted")

        seq = self.pick(i)
        n = len(self.texts[seq])
        extend = self.cache.extend
        take = self.cache.pool.take
        self.cache.pool.take = fail
        if n + len(tokens) <= 22:
            self.refused(MemoryError, "planted", lambda: extend([(seq, tokens)]))
        self.cache.pool.take = take
        self.refused(ValueError, "at least one new token", lambda: extend([(seq, [])]))
        self.refused(ValueError, "occurs twice", lambda: extend([(seq, [1]), (seq, [1])]))
        match = f"has {n} tokens: it cannot be cut to {n + 1}"
        self.refused(ValueError, match, lambda: self.cache.truncate(seq, n + 1))
        unknown = [(seq, [1]), (999, [1])] if n < 22 else [(999, [1])]
        self.refused(KeyError, "sequence 999 is not open", lambda: extend(unknown))

    @invariant()
    def everything_is_where_it_should_be(self):
        self.cache.check()
        for seq, tokens in self.texts.items():
            sequence = self.cache.sequence(seq)
            assert sequence.tokens == tokens and self.cache.length(seq) == len(tokens)
            assert len(sequence.block_table) == -(-len(tokens) // S)
            stores = (self.cache.keys, self.cache.values)
            keys, values = (store.parts[0][:, sequence.block_table] for store in stores)
            assert torch.equal(keys.flatten(1, 2)[:, : len(tokens)], keys_of(*tokens))
            assert torch.equal(values.flatten(1, 2)[:, : len(tokens)], -keys_of(*tokens))


TestPaged = PagedMachine.TestCase
TestPaged.settings = settings(stateful_step_count=25)


# ---- With a model


@pytest.fixture(scope="module")
def llama() -> Llama:
    return random_llama(3, scale=8.0)


def paged(llama: Llama, num_blocks: int = 60, block_size: int = 4, **settings) -> PagedCache:
    prefix_caching = settings.pop("prefix_caching", True)
    return PagedCache(
        llama.kv_spec(**settings), num_blocks, block_size, max_len=96, prefix_caching=prefix_caching
    )


def random_text(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (length,), generator=generator).tolist()


@torch.inference_mode()
def last_logits(
    llama: Llama, cache: PagedCache, tokens: list[int]
) -> tuple[torch.Tensor, int, int]:
    """The logits after a text, how many of its tokens were cached, and its sequence."""
    seq, num_cached = cache.open(tokens)
    metadata = cache.extend([(seq, tokens[num_cached:])])
    logits = llama(torch.tensor(tokens[num_cached:]), metadata, slice(-1, None))
    cache.commit(seq, [*tokens, 0])
    return logits[0], num_cached, seq


def test_prefix_hit_equals_a_cold_run(llama):
    tokens = random_text(40, 1)
    cache = paged(llama)
    cold = llama(torch.tensor(tokens))
    for length, expected in ((40, 0), (40, 36), (37, 36), (36, 32), (21, 20), (4, 0), (5, 4)):
        logits, num_cached, seq = last_logits(llama, cache, tokens[:length])
        assert num_cached == expected and torch.allclose(logits, cold[length - 1], atol=1e-12)
        cache.free(seq)
    other = tokens[:20] + [7] + tokens[21:]
    logits, num_cached, _ = last_logits(llama, cache, other)
    assert num_cached == 20
    assert torch.allclose(logits, llama(torch.tensor(other))[-1], atol=1e-12)


# ---- What is found, and what goes first


def small_cache(num_blocks: int = 20, block_size: int = 3, **settings) -> PagedCache:
    spec = KVSpec(1, 1, 1, dtype=torch.float64)
    return PagedCache(spec, num_blocks, block_size, **settings)


def stored(cache: PagedCache, tokens: list[int]) -> int:
    """A new sequence with these tokens."""
    seq, num_cached = cache.open(tokens)
    cache.extend([(seq, tokens[num_cached:])])
    cache.commit(seq, [*tokens, 0])
    return seq


@pytest.mark.parametrize("is_used_again", [False, True])
def test_least_recently_used_goes_first_and_beginnings_stay_longest(is_used_again):
    """A free block goes before both."""
    cache = small_cache(9, 4)
    a = list(range(16))
    b = list(range(100, 116))
    for text in (a, b):
        cache.free(stored(cache, text))
    if is_used_again:
        cache.free(cache.open([*a, 1])[0])
    assert cache.check() == (1, 8, 0)
    stored(cache, [200] * 9)  # takes three blocks: the free one, and a tail
    found = [cache.open([*text, 1])[1] for text in (b, a)]
    assert found == ([8, 16] if is_used_again else [16, 8])


def test_what_may_be_truncated_is_not_found_yet():
    cache = small_cache(block_size=4)
    seq, _ = cache.open([0])
    cache.extend([(seq, list(range(8)))])
    cache.free(seq)
    assert cache.open(list(range(9)))[1] == 0  # drafts, perhaps
    seq, _ = cache.open([0])
    cache.extend([(seq, list(range(8)))])
    cache.commit(seq, [0, 1, 2, 3, 4, 5, 50])  # 6 and 7 were rejected
    cache.extend([(seq, [50, 51])])
    corrected = [0, 1, 2, 3, 4, 5, 50, 51, 0]
    assert cache.open(list(range(9)))[1] == 4 and cache.open(corrected)[1] == 4
    cache.commit(seq, corrected)
    assert cache.open(corrected)[1] == 8


def test_with_a_lookahead_the_last_two_tokens_are_not_found():
    cache = PagedCache(KVSpec(1, 1, 1, dtype=torch.float64, lookahead=1), 20, 4)
    cache.free(stored(cache, list(range(9))))
    assert [cache.open(list(range(n)))[1] for n in (9, 10)] == [4, 8]


def test_without_prefix_caching_nothing_is_found():
    cache = small_cache(prefix_caching=False)
    cache.free(stored(cache, list(range(20))))
    assert cache.open(list(range(20)))[1] == 0 and cache.check()[1] == 0


# ---- Sizes


def test_impossible_caches_are_refused():
    for wrong, match in (
        (dict(num_blocks=0), "0 blocks of 16 tokens: both must be at least 1"),
        (dict(block_size=0), "2 blocks of 0 tokens"),
    ):
        with pytest.raises(UserError, match=match):
            PagedCache(KVSpec(1, 1, 2), **(dict(num_blocks=2) | wrong))
    with pytest.raises(CacheFull, match="a cache of 1099511627776 x 16 tokens needs .* GB"):
        PagedCache(KVSpec(80, 8, 128), 2**40)


def test_blocks_that_fit():
    cpu = torch.device("cpu")
    block_bytes = 2 * 2 * 2 * 6 * 16 * 4
    assert blocks_that_fit(10_000, block_bytes, cpu) == 10_000 // block_bytes
    whole, half = (blocks_that_fit(share, block_bytes, cpu) for share in (1.0, 0.5))
    assert whole > 1000 and half / whole == pytest.approx(0.5, rel=0.2)
    for memory, match in (
        (0, "it must be a share"),
        (-3, "it must be a share"),
        (math.nan, "it must be a share"),
        (100, "does not hold a block, which takes 3,072 bytes"),
    ):
        with pytest.raises(UserError, match=match):
            blocks_that_fit(memory, block_bytes, cpu)


# ---- The block pool by itself


def test_a_hash_is_never_given_twice():
    pool = BlockPool(1)
    hashes = set()
    for i in range(5):
        (block,) = pool.take(1)
        hashes.add(pool.cache_block(block, (0, (i % 2,))))
        pool.release(block)
    assert len(hashes) == 5


def test_the_first_block_with_some_tokens_is_the_one_that_is_found():
    pool = BlockPool(2)
    a, b = pool.take(2)
    assert pool.cache_block(a, (0, (1,))) == pool.cache_block(b, (0, (1,)))
    pool.release(b)
    assert pool.cached == {(0, (1,)): a} and not pool.idle and b in pool.free
    pool.evict(a)
    assert not pool.cached and not pool.key_of and not pool.hash_of
