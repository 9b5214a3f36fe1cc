"""The paged cache: every operation beside the same on Python lists, with planted collisions and faults; logits beside a cold run's."""

import math
import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from checkpoint.config import Config
from conftest import SMALL
from kernels import attention, ops_for
from kvcache import CacheFull, KVCache
from model import Llama
from paged import PagedCache, Pool, blocks_that_fit
from test_kernels import poison

L, G, H, D, BLOCKS, S = 2, 2, 4, 6, 9, 3


class Colliding(tuple):
    """A key whose hash says almost nothing."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 0


@cache
def numbers(*text: int) -> torch.Tensor:
    """k (and −v) of each token of a text in each layer: [L, len, G, D], different for every text and place."""
    codes = [
        [float(hash((text[: i + 1], layer)) % 100003) for i in range(len(text))]
        for layer in range(L)
    ]
    return (
        torch.tensor(codes, dtype=torch.float64)[..., None, None] + torch.arange(G * D).view(G, D)
    ).sin()


class PagedMachine(RuleBasedStateMachine):
    """Texts of tokens 0 and 1, so that many begin alike. The keys and values of a token are made from its whole text: a block that
    is shared wrongly, or written to while others read it, shows."""

    def __init__(self):
        super().__init__()
        self.cache = PagedCache(L, G, D, BLOCKS, S, max_len=22, dtype=torch.float64)
        self.texts: dict[int, list[int]] = {}  # what each sequence has stored
        poison(self.cache.keys), poison(self.cache.values)

    @initialize(collide=st.booleans())
    def keys(self, collide):
        if collide:
            self.cache._key = lambda parent, tokens: Colliding((parent, tokens))

    def state(self):
        pool = self.cache.pool
        return (
            {
                s: (list(t.tokens), list(t.blocks), list(t.chain))
                for s, t in self.cache._texts.items()
            },
            list(pool.free),
            list(pool.cached),
            list(pool.references),
            dict(pool.published),
            dict(pool.known),
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
        seq, have = self.cache.open(tokens)
        assert have < len(tokens) and have % S == 0 and seq not in self.texts
        self.texts[seq] = tokens[:have]

    @precondition(lambda self: self.texts)
    @rule(
        pieces=st.lists(
            st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=3
        ),
        first=st.integers(0, 5),
    )
    def extend(self, pieces, first):
        seqs = sorted(self.texts)
        wanted = list(
            {seqs[(first + i) % len(seqs)]: piece for i, piece in enumerate(pieces)}.items()
        )
        before = self.state()
        fits = self.cache.fits([(seq, len(piece)) for seq, piece in wanted])
        self.unchanged(before)
        if not fits:
            self.refused(
                CacheFull,
                "are free or cached: free a sequence|the limit is 22",
                lambda: self.cache.extend(wanted),
            )
            return
        free, cached, _ = self.cache.check()
        needed = self.cache._blocks_needed([(seq, len(piece)) for seq, piece in wanted])
        self.attend(wanted)
        assert sum(self.cache.check()[:2]) == free + cached - needed

    def attend(self, wanted):
        step = self.cache.extend(wanted)
        starts = {seq: len(self.texts[seq]) for seq, _ in wanted}
        for seq, piece in wanted:
            self.texts[seq] = self.texts[seq] + piece
        assert step.places.positions.tolist() == [
            i for seq, piece in wanted for i in range(starts[seq], starts[seq] + len(piece))
        ]
        for layer in range(L):
            new = torch.cat([numbers(*self.texts[seq])[layer, starts[seq] :] for seq, _ in wanted])
            q = torch.randn(
                len(new), H, D, dtype=torch.float64, generator=torch.Generator().manual_seed(layer)
            )
            out, at = ops_for("cpu").look_back(q, new, -new, step, layer), 0
            for seq, piece in wanted:
                all_k = numbers(*self.texts[seq])[layer].transpose(0, 1)
                expected = attention(q[at : at + len(piece)], all_k, -all_k)
                assert torch.allclose(out[at : at + len(piece)], expected, atol=1e-12)
                at += len(piece)

    @precondition(lambda self: self.texts)
    @rule(i=st.integers(0, 5), share=st.floats(0, 1))
    def truncate(self, i, share):
        seq = self.pick(i)
        length = round(share * len(self.texts[seq]))
        keys = self.cache.keys.parts[0].clone().view(torch.int64)
        self.cache.truncate(seq, length)
        self.texts[seq] = self.texts[seq][:length]
        assert torch.equal(keys, self.cache.keys.parts[0].view(torch.int64))

    @precondition(lambda self: self.texts and len(self.texts) < 5)
    @rule(i=st.integers(0, 5))
    def fork(self, i):
        seq = self.pick(i)
        free = self.cache.check()[:2]
        self.texts[self.cache.fork(seq)] = list(self.texts[seq])
        assert self.cache.check()[:2] == free

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

        seq, take = self.pick(i), self.cache.pool.take
        n = len(self.texts[seq])
        self.cache.pool.take = fail
        if n + len(tokens) <= 22:
            self.refused(MemoryError, "planted", lambda: self.cache.extend([(seq, tokens)]))
        self.cache.pool.take = take
        self.refused(ValueError, "at least one new token", lambda: self.cache.extend([(seq, [])]))
        self.refused(
            ValueError, "occurs twice", lambda: self.cache.extend([(seq, [1]), (seq, [1])])
        )
        self.refused(
            ValueError,
            f"has {n} tokens: it cannot be truncated to {n + 1}",
            lambda: self.cache.truncate(seq, n + 1),
        )
        self.refused(
            KeyError,
            "sequence 999 is not open",
            lambda: self.cache.extend([(seq, [1]), (999, [1])] if n < 22 else [(999, [1])]),
        )

    @invariant()
    def everything_is_where_it_should_be(self):
        self.cache.check()
        for seq, tokens in self.texts.items():
            text = self.cache._texts[seq]
            assert (
                text.tokens == tokens
                and self.cache.length(seq) == len(tokens)
                and len(text.blocks) == -(-len(tokens) // S)
            )
            keys, values = (
                kept.parts[0][:, text.blocks].flatten(1, 2)[:, : len(tokens)]
                for kept in (self.cache.keys, self.cache.values)
            )
            assert torch.equal(keys, numbers(*tokens)) and torch.equal(values, -keys)
        used = {block: 0 for text in self.cache._texts.values() for block in text.blocks}
        for text in self.cache._texts.values():
            for i, block in enumerate(text.blocks):
                used[block] = max(used[block], min(S, len(text.tokens) - i * S))
        assert self.cache.waste() == pytest.approx(
            1 - sum(used.values()) / (len(used) * S) if used else 0
        )


TestPaged = PagedMachine.TestCase
TestPaged.settings = settings(max_examples=70, stateful_step_count=30, deadline=None)


# ---- With a model


@pytest.fixture(scope="module")
def llama() -> Llama:
    llama = Llama(Config(**SMALL), dtype=torch.float64, seed=3)
    for place in llama.places().values():
        place.mul_(8)
    return llama


def paged(llama: Llama, blocks: int = 60, size: int = 4, **how) -> PagedCache:
    return PagedCache.of(llama, blocks, size, 96, **how)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 32),
    st.lists(
        st.tuples(st.integers(1, 30), st.lists(st.integers(1, 20), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 99),
)
def test_a_ragged_step_equals_the_contiguous_caches(size, texts, seed):
    """Prompts, chunks, single tokens and a few at once, in the same steps."""
    llama = Llama(
        Config(**{**SMALL, "num_key_value_heads": 1 + seed % 2}), dtype=torch.float64, seed=seed
    )
    tokens = [
        torch.randint(
            256, (n + sum(later),), generator=torch.Generator().manual_seed(seed + i)
        ).tolist()
        for i, (n, later) in enumerate(texts)
    ]
    caches = (
        paged(llama, 4 * (-(-111 // size)), size, prefix_sharing=False),
        KVCache.of(llama, 96, len(texts)),
    )
    caches[0].max_len = 96
    seqs = [[cache.open(text)[0] for text in tokens] for cache in caches]
    at = [0] * len(texts)
    for turn in range(5):
        pieces = [
            (i, ([n, *later][turn : turn + 1] or [0])[0]) for i, (n, later) in enumerate(texts)
        ]
        pieces = [(i, n) for i, n in pieces if n and at[i] + n <= 96]
        if not pieces:
            continue
        new = torch.tensor([token for i, n in pieces for token in tokens[i][at[i] : at[i] + n]])
        both = [
            llama(new, cache.extend([(seq[i], tokens[i][at[i] : at[i] + n]) for i, n in pieces]))
            for cache, seq in zip(caches, seqs)
        ]
        assert torch.allclose(*both, atol=1e-12)
        for i, n in pieces:
            at[i] += n


def logits_after(
    llama: Llama, cache: PagedCache, tokens: list[int]
) -> tuple[torch.Tensor, int, int]:
    seq, have = cache.open(tokens)
    out = llama(
        torch.tensor(tokens[have:]), cache.extend([(seq, tokens[have:])]), rows=slice(-1, None)
    )
    return out[0], have, seq


def test_a_prefix_hit_equals_a_cold_run(llama):
    tokens, cache = (
        torch.randint(256, (40,), generator=torch.Generator().manual_seed(1)).tolist(),
        paged(llama),
    )
    cold = llama(torch.tensor(tokens))
    for length, expected in ((40, 0), (40, 36), (37, 36), (36, 32), (21, 20), (4, 0), (5, 4)):
        logits, have, seq = logits_after(llama, cache, tokens[:length])
        assert have == expected and torch.allclose(logits, cold[length - 1], atol=1e-12)
        cache.free(seq)
    other = tokens[:20] + [7] + tokens[21:]
    logits, have, seq = logits_after(llama, cache, other)
    assert have == 20 and torch.allclose(logits, llama(torch.tensor(other))[-1], atol=1e-12)


def test_hits_after_eviction_and_reuse(llama):
    """A pool of 12 blocks, and texts that need 10 each: what is found again must be what it was."""
    cache, generator = paged(llama, 12), torch.Generator().manual_seed(2)
    texts = [torch.randint(256, (38,), generator=generator).tolist() for _ in range(3)]
    texts.append(texts[0][:20] + texts[1][20:])
    found = []
    for i in (0, 0, 1, 0, 3, 3, 2, 1, 1, 3, 0):
        logits, have, seq = logits_after(llama, cache, texts[i])
        assert torch.allclose(logits, llama(torch.tensor(texts[i]))[-1], atol=1e-12)
        found.append(have)
        cache.free(seq)
        assert cache.check()[2] == 0
    assert found[1] == 36 and found[2] == 0 and max(found[2:]) == 36 and found[4] >= 16


def test_the_least_recently_used_goes_first_and_beginnings_stay_longest(llama):
    cache = paged(llama, 8)
    a, b = list(range(16)), list(range(100, 116))
    for text in (a, b):
        cache.free(logits_after(llama, cache, text)[2])
    assert cache.check() == (0, 8, 0)
    seq, _ = cache.open([200] * 9)
    cache.extend([(seq, [200] * 9)])  # takes three blocks: a's tail
    assert [cache.open(text + [1])[1] for text in (b, a)] == [16, 4]


def test_a_key_without_its_parent_would_be_wrong(llama):
    """Two texts whose second blocks hold the same tokens after different first ones."""
    cache = paged(llama)
    a, b = [1, 2, 3, 4, 9, 9, 9, 9, 5], [4, 3, 2, 1, 9, 9, 9, 9, 5]
    cache.free(logits_after(llama, cache, a)[2])
    assert cache.open(b)[1] == 0
    logits, have, seq = logits_after(llama, cache, b[:4] + [8])
    cache.free(seq)
    logits, have, _ = logits_after(llama, cache, b)
    assert have == 4 and torch.allclose(logits, llama(torch.tensor(b))[-1], atol=1e-12)


def test_what_may_be_truncated_is_not_found_yet(llama):
    cache = paged(llama)
    _, _, seq = logits_after(llama, cache, list(range(8)))
    assert cache.open(list(range(9)))[1] == 0  # drafts, perhaps
    cache.truncate(seq, 6)
    cache.extend([(seq, [50, 51])])
    assert cache.open(list(range(9)))[1] == 4 and cache.open([0, 1, 2, 3, 4, 5, 50, 51, 0])[1] == 4
    cache.free(seq)
    assert cache.open([0, 1, 2, 3, 4, 5, 50, 51, 0])[1] == 8


def test_without_sharing_nothing_is_found(llama):
    cache = paged(llama, prefix_sharing=False)
    cache.free(logits_after(llama, cache, list(range(20)))[2])
    assert cache.open(list(range(20)))[1] == 0 and cache.check()[1] == 0


@pytest.mark.parametrize(
    "wrong, says",
    [
        (dict(blocks=0), "blocks is 0"),
        (dict(block_size=0), "block_size is 0"),
        (dict(max_len=0), "max_len is 0"),
        (dict(dtype=torch.int8), "torch.int8 is not supported"),
    ],
)
def test_sizes_that_are_none(wrong, says):
    with pytest.raises(ValueError, match=says):
        PagedCache(**(dict(layers=1, kv_heads=1, head_dim=2, blocks=2) | wrong))


def test_a_pool_that_memory_does_not_hold():
    with pytest.raises(CacheFull, match="a cache of 1099511627776 x 16 tokens needs .* GB"):
        PagedCache(80, 8, 128, 2**40)


def test_blocks_that_fit():
    cpu, one = torch.device("cpu"), 2 * 2 * 2 * 6 * 16 * 4
    assert blocks_that_fit(10_000, one, cpu) == 10_000 // one
    all_of_it, half = (blocks_that_fit(share, one, cpu) for share in (1.0, 0.5))
    assert all_of_it > 1000 and half / all_of_it == pytest.approx(0.5, rel=0.2)
    for memory, says in (
        (0, "it must be a share"),
        (-3, "it must be a share"),
        (math.nan, "it must be a share"),
        (100, "does not hold a block, which takes 3,072 bytes"),
    ):
        with pytest.raises(ValueError, match=says):
            blocks_that_fit(memory, one, cpu)


def test_the_same_texts_take_fewer_bytes_than_reserved_rows():
    contiguous, cache = KVCache(2, 2, 6, 96, 8), PagedCache(2, 2, 6, 16, 16)
    seqs = [cache.open([i] * 20)[0] for i in range(8)]
    cache.extend([(seq, [i] * 20) for i, seq in enumerate(seqs)])
    assert cache.bytes * 3 == contiguous.bytes and cache.waste() == pytest.approx(1 - 20 / 32)


def filled(sharing: bool = True) -> PagedCache:
    return PagedCache(1, 1, 1, 20, 3, dtype=torch.float64, prefix_sharing=sharing)


def test_a_block_that_is_written_anew_is_no_longer_found_by_what_it_held():
    cache = filled()
    seq, _ = cache.open(())
    cache.extend([(seq, [0] * 6)])
    cache.extend([(seq, [0])])  # publishes the two that are full
    assert cache.open([0] * 8)[1] == 6
    cache = filled()
    seq, _ = cache.open(())
    cache.extend([(seq, [0] * 6)])
    cache.extend([(seq, [0])])
    cache.truncate(seq, 4)
    cache.extend([(seq, [1, 1, 1])])
    assert (
        cache.open([0] * 8)[1] == 3 and cache.open([0, 0, 0, 0, 1, 1, 1])[1] == 3
    )  # the second: published only when it is extended again


def test_what_comes_after_a_rewritten_block_has_another_identity():
    """A twin keeps the old beginning alive: the new end must not be found behind it."""
    cache = filled()
    a, _ = cache.open(())
    cache.extend([(a, [0] * 7)])
    b = cache.fork(a)
    cache.extend(
        [
            (a, [0]),
        ]
    )
    cache.truncate(a, 1)
    cache.extend([(a, [1, 1, 0, 0, 0, 5, 5, 5])])
    cache.extend([(a, [5])])
    cache.extend([(b, [0])])
    assert (
        cache.open([0] * 6 + [5] * 4)[1] == 6 and cache.open([0, 1, 1, 0, 0, 0, 5, 5, 5, 5])[1] == 9
    )


def test_what_is_wasted_of_the_live_blocks_on_a_mix_of_lengths():
    """Lengths log-normal with mean 300, 32 texts in flight, averaged over time; a contiguous cache would reserve 1024 for each."""
    coin, cache = random.Random(1), PagedCache(1, 1, 1, 32 * 64, 16, prefix_sharing=False)
    texts, paged, reserved = {}, [], []
    for _ in range(400):
        while len(texts) < 32:
            length = min(1024, max(8, round(coin.lognormvariate(math.log(300) - 0.18, 0.6))))
            seq, _ = cache.open(())
            cache.extend([(seq, range(length // 3))])
            texts[seq] = length
        cache.extend([(seq, [0]) for seq in texts])
        stored, allocated = sum(map(cache.length, texts)), 16 * cache.check()[2]
        assert cache.waste() == pytest.approx(1 - stored / allocated)
        paged.append(cache.waste())
        reserved.append(1 - stored / (32 * 1024))
        for seq in [seq for seq, length in texts.items() if cache.length(seq) >= length]:
            cache.free(seq)
            del texts[seq]
    assert sum(paged) / len(paged) < 0.04 and sum(reserved) / len(reserved) > 0.6


# ---- The block pool by itself: which block goes first, and what can be found


def test_free_blocks_go_first_then_the_least_recently_used():
    pool = Pool(4)
    a, b, c = pool.take(3)
    for block, tokens in ((a, (1,)), (b, (2,)), (c, (3,))):
        pool.publish(block, (0, tokens))
    for block in (b, a, c):
        pool.release(block)
    assert list(pool.cached) == [b, a, c] and pool.available == 4
    found, _ = pool.find((0, (2,)))
    pool.share(found)
    pool.release(found)
    assert found == b and list(pool.cached) == [a, c, b]
    taken = pool.take(2)
    assert (
        a in taken
        and len(pool.cached) == 2
        and pool.find((0, (1,))) is None
        and pool.find((0, (3,))) is not None
    )


def test_more_than_there_is_is_refused_before_anything_changed():
    pool = Pool(3)
    (block,) = pool.take(1)
    pool.publish(block, (0, (1,)))
    pool.release(block)
    with pytest.raises(CacheFull, match="4 more blocks are needed and 3 are free or cached"):
        pool.take(4)
    assert pool.find((0, (1,))) and len(pool.take(3)) == 3


def test_an_identity_is_never_given_twice():
    pool, seen = Pool(1), set()
    for i in range(5):
        (block,) = pool.take(1)
        seen.add(pool.publish(block, (0, (i % 2,))))
        pool.release(block)
    assert len(seen) == 5


def test_the_first_block_with_some_tokens_is_the_one_that_is_found():
    pool = Pool(2)
    a, b = pool.take(2)
    assert pool.publish(a, (0, (1,))) == pool.publish(b, (0, (1,)))
    pool.release(b)
    assert pool.find((0, (1,)))[0] == a and list(pool.cached) == [] and b in pool.free
    pool.withdraw(a)
    pool.withdraw(a)
    assert pool.find((0, (1,))) is None


def test_a_block_has_one_identity_even_if_its_parent_comes_back_as_another():
    """The key it was published under must not stay behind: whoever met it again would look for a block that is not known."""
    pool = Pool(4)
    first, twin, block, _ = pool.take(4)
    parent = pool.publish(first, (0, (1, 2)))
    assert (
        pool.publish(twin, (0, (1, 2))) == parent
    )  # its twin is not published, and goes by the other's identity
    identity = pool.publish(block, (parent, (3, 4)))
    pool.withdraw(first)  # the parent goes; the twin is published in its place
    again = pool.publish(twin, (0, (1, 2)))
    assert again != parent and pool.publish(block, (again, (3, 4))) == identity
    assert len(pool.published) == len(pool.known) and all(
        pool.published[key] == b for b, (key, _) in pool.known.items()
    )
    pool.withdraw(block)
    assert pool.find((parent, (3, 4))) is None and pool.publish(block, (parent, (3, 4))) > identity
