"""The block pool: who has which block, what is published, and what is free. It knows nothing of numbers.

A block is *free*, or *live*, with a reference from every table it stands in, or *cached*: nobody's, but published, so that a text which
begins like one that has gone may find it. What is published is found by its key, (identity of the block before it, its tokens).
Identities are given once and never again, so a key says what all the tokens up to the end of its block are; and a dictionary compares keys,
not hashes, so two chains whose hashes collide are still two.

Invariant: free + cached + live == total; a block is in `known` if and only if its key in `published` leads to it.
Cost: a dictionary look-up a block. A cached block is taken when no free one is left, the least recently used first; the blocks that came
after it can then no longer be found by its identity, and go the same way in time.
"""
from collections import OrderedDict

from kvcache import CacheFull

Key = tuple[int, tuple[int, ...]]                       # identity of the block before (0: none), tokens of this one


class Pool:
    """`total` blocks, numbered from 0."""

    def __init__(self, total: int):
        self.total, self.references = total, [0] * total
        self.free = list(reversed(range(total)))
        self.cached = OrderedDict[int, None]()          # published, and nobody's: the least recently used first
        self.published: dict[Key, int] = {}             # -> block
        self.known: dict[int, tuple[Key, int]] = {}     # block -> its key, its identity
        self.identities = 0

    @property
    def available(self) -> int:
        return len(self.free) + len(self.cached)

    def take(self, count: int) -> list[int]:
        """Blocks for one owner each: those that are free, then the least recently used of the cached. CacheFull before anything changed."""
        if count > self.available:
            raise CacheFull(f"{count} more blocks are needed and {self.available} are free or cached: free a sequence, or make a cache of more blocks")
        while len(self.free) < count:
            block, _ = self.cached.popitem(last=False)
            self.withdraw(block)
            self.free.append(block)
        taken = [self.free.pop() for _ in range(count)]
        for block in taken:
            self.references[block] = 1
        return taken

    def share(self, block: int) -> None:
        self.cached.pop(block, None)
        self.references[block] += 1

    def release(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0 and block in self.known:
            self.cached[block] = None
        elif self.references[block] == 0:
            self.free.append(block)

    def publish(self, block: int, key: Key) -> int:
        """The identity of what this block holds: the one it has, that of a block which holds the same and was there first, or a new one."""
        if block in self.known:                         # under a parent that has gone since, and has come back as another
            return self.known[block][1]
        if key in self.published:
            return self.known[self.published[key]][1]
        self.identities += 1
        self.published[key], self.known[block] = block, (key, self.identities)
        return self.identities

    def withdraw(self, block: int) -> None:
        if block in self.known:
            key, _ = self.known.pop(block)
            del self.published[key]

    def find(self, key: Key) -> tuple[int, int] | None:
        """(block, identity) of what is published under this key."""
        block = self.published.get(key)
        return None if block is None else (block, self.known[block][1])
