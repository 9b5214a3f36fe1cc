"""The paged KV cache: blocks of tokens, on demand, shared between texts that begin alike.

A contiguous cache reserves room for the longest possible text, for every text. Here memory is cut into blocks of
`block_size` tokens. A text has a *table* of its blocks, gets a block when it needs one, and wastes less than a block.
A full block is published under (identity of the block before it, its tokens), and `open` follows this chain from a
text's first block: a system prompt is read once. Blocks of freed texts stay until their space is needed.

  - `open` never finds the whole text: at least one token must be computed, for its logits.
  - A block is published at its text's next `extend`, or at `free`: rejected tokens have been truncated by then.
  - `extend` writes into a block that no other text has, and withdraws it from sharing first; a shared one is copied.
  - `truncate` drops references and writes nothing. `free` releases the tail first, so beginnings stay longest.
  - `fork` shares all blocks: several samples of one prompt compute the prompt once.

Invariant (`check`): free + cached + live == total, and a block has as many references as tables that hold it.
Not covered: moving blocks to the CPU's memory; sharing blocks that are not full.
Kwon et al. 2023, PagedAttention (arXiv:2309.06180); Zheng et al. 2023, RadixAttention (2312.07104).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

import torch

from errors import UserError
from kernels import Ops, free_memory
from kvcache import Cache, CacheFull, Text
from quant import Bits

Key = tuple[int, tuple[int, ...]]  # identity of the block before (0: none), tokens of this block


class Pool:
    """`total` blocks, numbered from 0. Live blocks have references; cached ones have none, and are published."""

    def __init__(self, total: int):
        self.total, self.references = total, [0] * total
        self.free = list(reversed(range(total)))
        self.cached = OrderedDict[int, None]()  # the least recently used first
        self.published: dict[Key, int] = {}  # -> block
        self.known: dict[int, tuple[Key, int]] = {}  # published block -> its key, its identity
        self.identities = count(1)

    @property
    def available(self) -> int:
        return len(self.free) + len(self.cached)

    def take(self, wanted: int) -> list[int]:
        """Blocks with one reference each: free ones, then the least recently used. CacheFull before any change."""
        if wanted > self.available:
            raise CacheFull(
                f"{wanted} more blocks are needed and {self.available} are free or cached: "
                "free a sequence, or make a cache of more blocks"
            )
        while len(self.free) < wanted:
            block, _ = self.cached.popitem(last=False)
            self.withdraw(block)
            self.free.append(block)
        taken = [self.free.pop() for _ in range(wanted)]
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
        """Publish a block -> its identity: the one it has, that of the block published under this key, or a new one."""
        if block in self.known:  # its key may name an older identity of its parent
            return self.known[block][1]
        if key not in self.published:
            self.published[key], self.known[block] = block, (key, next(self.identities))
        return self.known[self.published[key]][1]

    def withdraw(self, block: int) -> None:
        if block in self.known:
            key, _ = self.known.pop(block)
            del self.published[key]

    def find(self, key: Key) -> tuple[int, int] | None:
        """(block, identity) published under this key."""
        return None if (block := self.published.get(key)) is None else (block, self.known[block][1])


def blocks_that_fit(memory: float, one: int, device: torch.device) -> int:
    """How many blocks of `one` bytes fit into `memory`: a share of the free memory, or, above 1, bytes."""
    blocks = (
        int(memory * free_memory(device) if memory <= 1 else memory) // one if memory > 0 else 0
    )  # NaN: 0
    if blocks < 1:
        raise UserError(
            f"the memory for keys and values is {memory}: that does not hold a block, which takes {one:,} "
            "bytes; it must be a share of what is free (up to 1), or a number of bytes"
        )
    return blocks


class PagedCache(Cache):
    """Keys and values of any number of texts, in `blocks` blocks of `block_size` tokens."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        blocks: int,
        block_size: int = 16,
        max_len: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        prefix_sharing: bool = True,
        bits: Bits = (16, 16),
        ops: Ops | None = None,
    ):
        sizes = dict(
            layers=layers,
            blocks=blocks,
            block_size=block_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
        )
        longest = blocks * block_size
        super().__init__(
            sizes, longest if max_len is None else min(max_len, longest), dtype, device, bits, ops
        )
        self.prefix_sharing, self.pool, self._seqs = prefix_sharing, Pool(blocks), count(1)

    @classmethod
    def of(
        cls,
        llama: Any,
        blocks: int,
        block_size: int = 16,
        max_len: int | None = None,
        prefix_sharing: bool = True,
        bits: Bits = (16, 16),
        dtype: torch.dtype | None = None,
    ) -> "PagedCache":
        """A cache of this model's shape."""
        c = llama.config
        longest = (
            c.max_position_embeddings
            if max_len is None
            else min(max_len, c.max_position_embeddings)
        )
        return cls(
            c.num_hidden_layers,
            c.num_key_value_heads,
            c.head_dim,
            blocks,
            block_size,
            longest,
            llama.device,
            dtype or llama.dtype,
            prefix_sharing,
            bits,
            llama.ops,
        )

    def open(self, tokens: Sequence[int]) -> tuple[int, int]:
        """A new sequence for the text `tokens` -> (seq, have): `have` tokens are stored already, but never all."""
        text, parent, S = Text(), 0, self.block_size
        for start in range(0, (len(tokens) - 1) // S * S if self.prefix_sharing else 0, S):
            piece = tuple(tokens[start : start + S])
            if (found := self.pool.find(self._key(parent, piece))) is None:
                break
            block, parent = found
            self.pool.share(block)
            text.tokens += piece
            text.blocks.append(block)
            text.chain.append(parent)
        seq = next(self._seqs)
        self._texts[seq] = text
        return seq, len(text.tokens)

    def _key(self, parent: int, tokens: tuple[int, ...]) -> Key:
        return parent, tokens

    def _blocks_needed(self, requests: Sequence[tuple[int, int]]) -> int:
        """The number of new blocks for n more tokens of each (seq, n), copies of shared blocks included."""
        new, writers = (
            0,
            Counter[int](),
        )  # of each last block; the last owner of a block need not copy it
        for seq, n in requests:
            text = self._text(seq)
            new += -(-(len(text.tokens) + n) // self.block_size) - len(text.blocks)
            if n and len(text.tokens) % self.block_size:
                writers[text.blocks[-1]] += 1
        return new + sum(min(n, self.pool.references[block] - 1) for block, n in writers.items())

    def fits(self, requests: Sequence[tuple[int, int]]) -> bool:
        return super().fits(requests) and self._blocks_needed(requests) <= self.pool.available

    def _add_blocks(self, requests: Sequence[tuple[int, Sequence[int]]], publish: bool) -> None:
        fresh = iter(
            self.pool.take(self._blocks_needed([(seq, len(tokens)) for seq, tokens in requests]))
        )
        for seq, tokens in requests:
            text = self._texts[seq]
            if publish:
                self._publish(text)
            if len(text.tokens) % self.block_size:
                self._own_last_block(text, fresh)
            text.blocks += islice(
                fresh, -(-(len(text.tokens) + len(tokens)) // self.block_size) - len(text.blocks)
            )

    def _publish(self, text: Text) -> None:
        S = self.block_size
        for i in range(len(text.chain), len(text.tokens) // S if self.prefix_sharing else 0):
            key = self._key(
                text.chain[-1] if text.chain else 0, tuple(text.tokens[i * S : (i + 1) * S])
            )
            text.chain.append(self.pool.publish(text.blocks[i], key))

    def _own_last_block(self, text: Text, fresh: Iterator[int]) -> None:
        """Before a write into a text's last block, not full: make it one that no other text has or can find."""
        if self.pool.references[block := text.blocks[-1]] == 1:
            self.pool.withdraw(block)
            return
        text.blocks[-1] = next(fresh)
        for kept in (self.keys, self.values):
            kept.copy(block, text.blocks[-1])
        self.pool.release(block)

    def truncate(self, seq: int, length: int) -> None:
        super().truncate(seq, length)
        text = self._texts[seq]
        del text.chain[length // self.block_size :]
        while len(text.blocks) > -(-length // self.block_size):
            self.pool.release(text.blocks.pop())

    def fork(self, seq: int) -> int:
        """A second sequence with the same past; nothing is copied until one of them writes."""
        text, new = self._text(seq), next(self._seqs)
        for block in text.blocks:
            self.pool.share(block)
        self._texts[new] = Text(text.tokens[:], text.blocks[:], text.chain[:])
        return new

    def free(self, seq: int) -> None:
        """Release all blocks. Full ones can still be found until their space is needed."""
        self._publish(self._text(seq))
        self.truncate(seq, 0)
        del self._texts[seq]

    def check(self) -> tuple[int, int, int]:
        """The numbers of (free, cached, live) blocks. RuntimeError if the invariant is broken."""
        pool, held = (
            self.pool,
            Counter(block for text in self._texts.values() for block in text.blocks),
        )
        if sorted([*pool.free, *pool.cached, *held]) != list(range(pool.total)) or any(
            pool.references[block] != held[block] for block in range(pool.total)
        ):
            raise RuntimeError(
                f"blocks are lost or have two owners: {len(pool.free)} free + {len(pool.cached)} cached "
                f"+ {len(held)} live, of {pool.total}"
            )
        if sorted(pool.published.items()) != sorted(
            (key, block) for block, (key, _) in pool.known.items()
        ):
            raise RuntimeError("what is published and what blocks are known for differ")
        return len(pool.free), len(pool.cached), len(held)

    def waste(self) -> float:
        """The share of empty places in the live blocks."""
        used = dict(
            sorted(
                (block, min(self.block_size, len(text.tokens) - i * self.block_size))
                for text in self._texts.values()
                for i, block in enumerate(text.blocks)
            )
        )
        return 1 - sum(used.values()) / (len(used) * self.block_size) if used else 0.0


if __name__ == "__main__":  # prints how many tables hold each block; ·: none
    cache = PagedCache(1, 1, 2, blocks=40, block_size=4)
    for text in (
        b"Once upon a time, a dog",
        b"Once upon a time, a big girl",
        b"Once upon a time, a big, big girl",
    ):
        seq, have = cache.open(text)  # a byte is a token
        cache.extend([(seq, text[have:])])
        cache.extend(
            [(cache.fork(seq), b".")]
        )  # publishes the full blocks, and copies one that is not full
        row = [str(count or "·") for count in cache.pool.references]
        print(
            "".join(row),
            "{} free + {} cached + {} live:".format(*cache.check()),
            f"{have} of {len(text)} tokens found",
        )
