"""The paged KV cache: blocks allocated on demand, and shared by sequences with the same prefix.

A contiguous cache reserves room for the longest possible sequence, for every sequence. Here, memory
is divided into blocks of `block_size` tokens. A sequence has a *block table*, gets a block when it
needs one, and wastes less than one block.

Prefix caching: a full block is looked up by (hash of the previous block, its own tokens). `open`
follows this chain from a prompt's first block, so a system prompt is read only once. Blocks of
freed sequences stay cached until their space is needed. The hash of a block is a serial number
here, assigned when the block is cached. The tokens themselves are compared, so two different
prefixes never have the same hash.

  - `open` never finds the whole prompt, because at least one token must be computed for its logits.
  - `commit` caches full blocks after it has dropped the rejected drafts, so no cached block holds
    one. Several samples of one prompt read the prompt once, except for its last block.
  - Only cached blocks are shared, and `truncate` does not cut into them. So `extend` only writes
    into blocks that no other sequence uses.
  - `truncate` drops references and writes nothing. `free` releases the last blocks first, so that
    the beginnings of prompts stay cached for longest.

Invariant (`check`): free + idle + live == total, and a block has one reference for each table that
holds it. (A live block has references. An idle one has none, and is kept for `open` to find. `open`
may find any cached block, live or idle.)
Not covered: moving blocks to the CPU's memory; finding blocks that are not full.

Kwon et al. 2023, PagedAttention (arXiv:2309.06180); Zheng et al. 2023, RadixAttention (2312.07104).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import count

import torch

from devices import free_memory
from errors import UserError
from kvcache import Cache, CachedSequence, CacheFull, KVSpec, NewTokens, check_free
from settings import Options

BLOCK_SIZE = 16  # tokens
BlockKey = tuple[int, tuple[int, ...]]  # hash of the previous block (0: none), this block's tokens


class BlockPool:
    """`total` blocks. Live blocks have references; idle ones have none but are cached; the rest are
    free."""

    def __init__(self, total: int):
        self.total = total
        self.references = [0] * total
        self.free = list(reversed(range(total)))
        self.idle = OrderedDict[int, None]()  # least recently used first
        self.cached: dict[BlockKey, int] = {}  # -> block
        self.key_of: dict[int, BlockKey] = {}  # each cached block -> its key
        self.hash_of: dict[int, int] = {}  # each cached block -> its hash
        self._next_hash = count(1)

    @property
    def available(self) -> int:
        return len(self.free) + len(self.idle)

    def take(self, wanted: int) -> list[int]:
        """Take blocks, first free and then idle ones, and give each one reference. CacheFull, with
        nothing changed, if there are too few."""
        if wanted > self.available:
            raise CacheFull(
                f"{wanted} more blocks are needed and {self.available} are free or idle: "
                "free a sequence, or make a cache of more blocks"
            )
        while len(self.free) < wanted:
            block, _ = self.idle.popitem(last=False)
            self.evict(block)
            self.free.append(block)
        taken = [self.free.pop() for _ in range(wanted)]
        for block in taken:
            self.references[block] = 1
        return taken

    def share(self, block: int) -> None:
        self.idle.pop(block, None)
        self.references[block] += 1

    def release(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] > 0:
            return
        if block in self.key_of:
            self.idle[block] = None
        else:
            self.free.append(block)

    def cache_block(self, block: int, key: BlockKey) -> int:
        """Let `open` find this full block -> its hash. If another block already has this key, that
        block stays cached, and its hash is returned."""
        if key not in self.cached:
            self.cached[key] = block
            self.key_of[block] = key
            self.hash_of[block] = next(self._next_hash)
        return self.hash_of[self.cached[key]]

    def evict(self, block: int) -> None:
        """Remove this block from the cached ones, so that `open` no longer finds it."""
        del self.cached[self.key_of.pop(block)]
        del self.hash_of[block]


class PagedCache(Cache):
    """Keys and values of any number of sequences, in `num_blocks` blocks of `block_size` tokens."""

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        max_len: int | None = None,
        prefix_caching: bool = True,
    ):
        if num_blocks < 1 or block_size < 1:
            raise UserError(f"{num_blocks} blocks of {block_size} tokens: both must be at least 1")
        longest = num_blocks * block_size
        if max_len is not None:
            longest = min(max_len, longest)
        super().__init__(spec, num_blocks, block_size, longest)
        self.prefix_caching = prefix_caching
        self.lookahead = spec.lookahead
        self.pool = BlockPool(num_blocks)
        self._next_seq = count(1)

    def _block_key(self, parent: int, tokens: Sequence[int], i: int) -> BlockKey:
        """The key of a sequence's block i. `parent`, the hash of the previous block, represents all
        earlier tokens. With a lookahead, the block also depends on the token after it."""
        S = self.block_size
        return parent, tuple(tokens[i * S : (i + 1) * S + self.lookahead])

    def blocks_for(self, tokens: int) -> int:
        """The number of blocks that this many tokens need."""
        return math.ceil(tokens / self.block_size)

    # ---- The verbs

    def open(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Make a sequence for `tokens` -> (seq, num_cached). The first num_cached tokens are stored
        already; at least one token is not."""
        sequence = CachedSequence()
        if self.prefix_caching:
            self._find_prefix(sequence, tokens)
        seq = next(self._next_seq)
        self._sequences[seq] = sequence
        return seq, len(sequence.tokens)

    def _find_prefix(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Share the longest prefix of `tokens` that is in cached blocks. The last token is always
        computed. With a lookahead, so is the one before it: an EAGLE head drafts from it."""
        parent = 0
        num_full = (len(tokens) - 1 - self.lookahead) // self.block_size
        for i in range(num_full):
            key = self._block_key(parent, tokens, i)
            block = self.pool.cached.get(key)
            if block is None:
                return
            self.pool.share(block)
            parent = self.pool.hash_of[block]
            sequence.tokens += tokens[i * self.block_size : (i + 1) * self.block_size]
            sequence.block_table.append(block)
            sequence.block_hashes.append(parent)

    def _num_new_blocks(self, counts: Sequence[tuple[int, int]]) -> int:
        """The number of blocks that `_add_blocks` takes for n more tokens of each (seq, n)."""
        num_new = 0
        for seq, n in counts:
            sequence = self.sequence(seq)
            num_new += self.blocks_for(len(sequence.tokens) + n) - len(sequence.block_table)
        return num_new

    def fits(self, counts: Sequence[tuple[int, int]]) -> bool:
        return super().fits(counts) and self._num_new_blocks(counts) <= self.pool.available

    def _add_blocks(self, new_tokens: NewTokens) -> None:
        new_blocks = self.pool.take(
            self._num_new_blocks([(seq, len(tokens)) for seq, tokens in new_tokens])
        )
        for seq, tokens in new_tokens:
            sequence = self._sequences[seq]
            while len(sequence.block_table) < self.blocks_for(len(sequence.tokens) + len(tokens)):
                sequence.block_table.append(new_blocks.pop())

    def commit(self, seq: int, text: Sequence[int]) -> None:
        super().commit(seq, text)
        if self.prefix_caching:
            self._cache_full_blocks(self.sequence(seq))

    def _cache_full_blocks(self, sequence: CachedSequence) -> None:
        num_done = len(sequence.block_hashes)
        num_full = (len(sequence.tokens) - self.lookahead) // self.block_size
        for i in range(num_done, num_full):
            parent = sequence.block_hashes[-1] if sequence.block_hashes else 0
            key = self._block_key(parent, sequence.tokens, i)
            block_hash = self.pool.cache_block(sequence.block_table[i], key)
            sequence.block_hashes.append(block_hash)

    def truncate(self, seq: int, length: int) -> None:
        sequence = self.sequence(seq)
        num_cached = len(sequence.block_hashes) * self.block_size
        if length < num_cached:
            raise ValueError(
                f"sequence {seq} cannot be cut to {length}: `open` may find its first {num_cached} "
                "tokens; open another sequence"
            )
        super().truncate(seq, length)
        while len(sequence.block_table) > self.blocks_for(length):
            self.pool.release(sequence.block_table.pop())

    def free(self, seq: int) -> None:
        """Release all blocks. Cached ones can still be found, until their space is needed."""
        sequence = self.sequence(seq)
        while sequence.block_table:
            self.pool.release(sequence.block_table.pop())
        del self._sequences[seq]

    # ---- The invariant

    def check(self) -> tuple[int, int, int]:
        """The numbers of (free, idle, live) blocks. RuntimeError if the invariant is broken."""
        pool = self.pool
        owners = Counter[int]()
        for sequence in self._sequences.values():
            owners.update(sequence.block_table)
        counts = (len(pool.free), len(pool.idle), len(owners))
        if sorted([*pool.free, *pool.idle, *owners]) != list(range(pool.total)):
            raise RuntimeError(f"blocks are lost, or in two states: {counts} of {pool.total}")
        if any(pool.references[block] != owners[block] for block in range(pool.total)):
            raise RuntimeError("a block's reference count is not the number of tables with it")
        if pool.cached != {key: block for block, key in pool.key_of.items()}:
            raise RuntimeError("cached blocks and their keys differ")
        return counts


# ---- Cache sizes ---------------------------------------------------------------------------------


def blocks_that_fit(memory: float, block_bytes: int, device: torch.device) -> int:
    """How many blocks fit into `memory`. Up to 1, it is a share of the free memory; above 1, it is
    a number of bytes."""
    num_bytes = memory * free_memory(device) if memory <= 1 else memory
    if not num_bytes >= block_bytes:  # also true for NaN
        raise UserError(
            f"the memory for keys and values is {memory}: that does not hold a block, which takes "
            f"{block_bytes:,} bytes; it must be a share of the free memory (up to 1), or bytes"
        )
    return int(num_bytes) // block_bytes


def paged_caches(
    specs: Sequence[KVSpec], limits: Sequence[int], tokens: int, options: Options
) -> list[Cache]:
    """A cache for each model, with as many blocks as kv_memory holds or, if it is None, as `tokens`
    need. limits: the most tokens of a sequence in each cache. UserError if there is too little
    memory."""
    device = torch.device(specs[0].device)
    block_bytes = sum(spec.bytes(BLOCK_SIZE) for spec in specs)
    if options.kv_memory is None:
        needed = math.ceil(tokens / BLOCK_SIZE) + options.max_batch  # last blocks are partly filled
        blocks = min(needed, blocks_that_fit(0.8, block_bytes, device))
    else:
        if options.kv_memory > 1:
            check_free(options.kv_memory, device)
        blocks = blocks_that_fit(options.kv_memory, block_bytes, device)
    return [
        PagedCache(spec, blocks, max_len=limit, prefix_caching=options.prefix_caching)
        for spec, limit in zip(specs, limits)
    ]


def main() -> None:
    """Demonstration: how many block tables hold each block; · means none."""
    cache = PagedCache(KVSpec(1, 1, 2), num_blocks=40, block_size=4)
    for text in (
        b"Once upon a time, a dog",
        b"Once upon a time, a big girl",
        b"Once upon a time, a big, big girl",
    ):
        seq, num_cached = cache.open(text)  # a byte is a token
        cache.extend([(seq, text[num_cached:])])
        cache.commit(seq, text + b".")  # as if a round had generated a full stop
        row = "".join(str(number or "·") for number in cache.pool.references)
        free, idle, live = cache.check()
        print(
            f"{row} {free} free + {idle} idle + {live} live: {num_cached} of {len(text)} tokens "
            "were cached"
        )


if __name__ == "__main__":
    main()
