"""4-bit keys: each query sees its own group as it is, and what came before by channel in 4 bits, however the text came there."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Engine
from kernels import attention
from kivi import GROUP, RING, ChannelKVCache, ChannelPagedCache, ring_bytes
from kvcache import CacheFull, kv_bytes, tokens_that_fit
from pretrained import Model
from quant import from_int4, int4

L, G, D, R = 2, 2, 6, 2
MAKE = {"contiguous": lambda texts=3, **kw: ChannelKVCache(L, G, D, 160, texts, dtype=torch.float64, bits=(4, 4), **kw),
        "paged": lambda texts=3, **kw: ChannelPagedCache(L, G, D, 16, texts=texts, dtype=torch.float64, bits=(4, 4), **kw),
        "wide blocks": lambda texts=3, **kw: ChannelPagedCache(L, G, D, 9, block_size=32, texts=texts, dtype=torch.float64, bits=(4, 4), **kw)}


def data(length: int, seed: int) -> tuple[torch.Tensor, ...]:
    """q: [L, length, R · G, D]; k, v: [L, length, G, D]; some channels of k large."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(L, length, heads, D, generator=generator, dtype=torch.float64) for heads in (R * G, G, G))
    return q, k * torch.tensor([9.0, 1, 1, 0.1, 1, 1]), v


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: int) -> torch.Tensor:
    """What the token `at` sees, written as plainly as can be: [R · G, D]."""
    own = at // GROUP * GROUP
    keys, values = k[:at + 1].clone(), from_int4(*int4(v[:at + 1]), torch.float64)
    for start in range(0, own, GROUP):
        for g in range(G):
            keys[start:start + GROUP, g] = from_int4(*int4(k[start:start + GROUP, g], dim=-2), torch.float64)
    return attention(q[at:at + 1], keys.transpose(0, 1), values.transpose(0, 1))[0]


@settings(deadline=None, max_examples=18)
@given(st.sampled_from(sorted(MAKE)), st.integers(0, 99), st.lists(st.tuples(st.integers(1, 50), st.integers(0, 60)), min_size=1, max_size=6), st.booleans())
def test_a_token_sees_its_own_group_as_it_is_and_the_others_in_4_bits(layout, seed, moves, fork):
    """The text grows, and is cut back, in many ways, beside another; what a token sees goes by its position alone."""
    cache, (q, k, v) = MAKE[layout](), data(160, seed)
    for kept in (cache.rings.keys, *cache.keys.parts, *cache.values.parts):
        kept.fill_(float("nan") if kept.is_floating_point() else 77)                     # what was never written is never read
    seq, other = cache.open(())[0], cache.open(())[0]
    beside, longest = data(160, seed + 1), 0
    for grows, cut in moves:
        before, mate = cache.length(seq), cache.length(other)
        grows = min(grows, 150 - before)
        if grows < 1 or mate + 3 > 150:
            continue
        step = cache.extend([(other, [1] * 3), (seq, [0] * grows)])
        assert step.positions.tolist() == [*range(mate, mate + 3), *range(before, before + grows)]
        for layer in range(L):
            packed = [torch.cat((b[layer, mate:mate + 3], x[layer, before:before + grows])) for b, x in zip(beside, (q, k, v))]
            out = step.attend(layer, *packed)
            for i, at in enumerate(range(mate, mate + 3)):
                torch.testing.assert_close(out[i], expected(*(x[layer] for x in beside), at))
            for i, at in enumerate(range(before, before + grows)):
                torch.testing.assert_close(out[3 + i], expected(q[layer], k[layer], v[layer], at))
        longest, length = max(longest, cache.length(seq)), max(0, cache.length(seq) - cut)
        cache.truncate(seq, length)
        assert length - GROUP < cache.length(seq) <= length
        assert cache.length(seq) == length or length // GROUP * GROUP < longest - RING    # the ring of its longest state has the last 32
        if fork:
            new = cache.fork(seq)
            cache.free(seq)
            seq = new


@pytest.mark.parametrize("layout", MAKE)
def test_a_cut_into_a_rounded_group_forgets_the_group(layout):
    cache = MAKE[layout]()
    seq, _ = cache.open(())
    cache.extend([(seq, [1] * 70)])                                                      # the ring has 38 to 69; whole groups from 48
    for length, left in ((70, 70), (53, 53), (48, 48), (47, 32), (20, 16), (16, 16), (3, 0)):
        cache.truncate(seq, length)
        assert cache.length(seq) == left
    cache.extend([(seq, [1] * 20)])                                                      # all of it is in the ring
    cache.truncate(seq, 5)
    assert cache.length(seq) == 5
    with pytest.raises(ValueError, match="cannot be truncated to 6"):
        cache.truncate(seq, 6)
    assert cache.length(seq) == 5


@pytest.mark.parametrize("size", [16, 32])
def test_a_shared_beginning_and_a_copied_block(size):
    """Of a fork, whoever writes first gets a block of his own, with the groups that are full in it."""
    cache, (q, k, v) = ChannelPagedCache(L, G, D, 12, block_size=size, dtype=torch.float64, bits=(4, 4)), data(100, 3)

    def grow(seq: int, count: int) -> None:
        before = cache.length(seq)
        step = cache.extend([(seq, list(range(before, before + count)))])
        for layer in range(L):
            out = step.attend(layer, *(x[layer, before:before + count] for x in (q, k, v)))
            for i in range(count):
                torch.testing.assert_close(out[i], expected(q[layer], k[layer], v[layer], before + i))

    seq, _ = cache.open(())
    grow(seq, 53)
    twin = cache.fork(seq)
    for one in (twin, seq, twin):
        grow(one, 9)
    cache.free(seq)
    found, have = cache.open(range(100))
    assert have == 53 // size * size and cache.rings.since[found] == have
    grow(found, 30)
    cache.check()


def test_bytes_by_formula_and_as_allocated():
    for D in (64, 80, 128):
        formula, bf16 = (kv_bytes(3, 2, D, 160, torch.bfloat16, bits) for bits in ((4, 4), (16, 16)))
        assert formula == 3 * 2 * 160 * (D // 2 + 4 * D / 16 + D // 2 + 4) <= 0.33 * bf16
        for cache in (ChannelKVCache(3, 2, D, 40, 4, dtype=torch.bfloat16, bits=(4, 4)), ChannelPagedCache(3, 2, D, 10, texts=4, dtype=torch.bfloat16, bits=(4, 4))):
            assert cache.bytes - ring_bytes(3, 2, D, 4, torch.bfloat16) == sum(part.nbytes for part in (*cache.keys.parts, *cache.values.parts))
            assert cache.bytes - ring_bytes(3, 2, D, 4, torch.bfloat16) == (formula if isinstance(cache, ChannelPagedCache) else 4 * kv_bytes(3, 2, D, 40, torch.bfloat16, (4, 4)))
    some = torch.device("cpu")
    assert tokens_that_fit(3, 2, 64, torch.bfloat16, some, bits=(4, 4)) > 2.8 * tokens_that_fit(3, 2, 64, torch.bfloat16, some)


def test_the_engine_counts_the_rings():
    model = Model.load("tiny", "cpu", torch.bfloat16)
    engine = Engine(model, None, 0, 64, 3, kv_memory=2**20, kv_bits=4)
    assert engine.caches[0].bytes <= 2**20 < engine.caches[0].bytes + 16 * 4096
    with pytest.raises(ValueError, match="does not hold a block"):
        Engine(model, None, 0, 64, 300, kv_memory=2**20, kv_bits=4)


def test_what_is_refused():
    with pytest.raises(ValueError, match="head_dim is 5: .* use 8 bits"):
        ChannelKVCache(1, 1, 5, 20, bits=(4, 4))
    for wrong in (dict(block_size=8), dict(block_size=24), dict(texts=0)):
        with pytest.raises(ValueError, match="block_size is .* a multiple of 16"):
            ChannelPagedCache(1, 1, 4, 5, bits=(4, 4), **wrong)
    for layout in MAKE:
        cache = MAKE[layout](texts=1)
        seq, _ = cache.open(())
        for again in (lambda: cache.open(()), lambda: cache.fork(seq)):
            with pytest.raises(CacheFull, match="text"):
                again()
        cache.free(seq)
        cache.open(())
