"""The block pool by itself: who goes first, and what can be found."""
import pytest

from blocks import Pool
from kvcache import CacheFull


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
    assert a in taken and len(pool.cached) == 2 and pool.find((0, (1,))) is None and pool.find((0, (3,))) is not None


def test_more_than_there_is_is_refused_before_anything_changed():
    pool = Pool(3)
    block, = pool.take(1)
    pool.publish(block, (0, (1,)))
    pool.release(block)
    with pytest.raises(CacheFull, match="4 more blocks are needed and 3 are free or cached"):
        pool.take(4)
    assert pool.find((0, (1,))) and len(pool.take(3)) == 3


def test_an_identity_is_never_given_twice():
    pool, seen = Pool(1), set()
    for i in range(5):
        block, = pool.take(1)
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
    assert pool.publish(twin, (0, (1, 2))) == parent                     # its twin is not published, and goes by the other's identity
    identity = pool.publish(block, (parent, (3, 4)))
    pool.withdraw(first)                                                 # the parent goes; the twin is published in its place
    again = pool.publish(twin, (0, (1, 2)))
    assert again != parent and pool.publish(block, (again, (3, 4))) == identity
    assert len(pool.published) == len(pool.known) and all(pool.published[key] == b for b, (key, _) in pool.known.items())
    pool.withdraw(block)
    assert pool.find((parent, (3, 4))) is None and pool.publish(block, (parent, (3, 4))) > identity
