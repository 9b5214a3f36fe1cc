"""The paged KV cache: blocks of tokens, on demand, shared between texts that begin alike.

A contiguous cache reserves the longest text that may come, for every text; most of it is never written. Here memory is cut into
blocks of `block_size` tokens, a text has a *table* of the blocks that hold it, in order, and gets the next block when it needs it. What is
allocated and not used is less than one block a text:

    reserved                 [ text ██████░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░ ]        wasted: 1 − length / longest
    paged       [██████] → [██████] → [██░░░░]                                   wasted: under block_size tokens a text

And a block may stand in several tables. A full block is published under (the block before it, its tokens), so whoever opens a
text finds the blocks of its beginning by walking that chain: a system prompt is read once. Blocks whose texts have gone stay until
their space is needed (blocks.py). The verbs are those of kvcache.py; what is particular here:

  - `open` never finds the whole text: at least one token must be computed, for its logits.
  - A block is published at its text's next `extend`, or at `free`: by then all that had to be truncated has been. Not at one with publish=False.
  - `extend` writes into a block that only this text has, after withdrawing it from sharing; one that others have too is copied.
  - `truncate` drops references and writes nothing. `free` releases the tail first, so beginnings stay longest.
  - `fork` shares everything: several samples of one prompt cost one prompt.

Invariant, at any time (`check`): free + cached + live == total, and a block's references are its occurrences in the tables.

Not covered: moving blocks to the CPU's memory; blocks that are shared before they are full.

Kwon et al. 2023, PagedAttention (arXiv:2309.06180); Zheng et al. 2023, RadixAttention (2312.07104).

    L layers · N blocks · S block_size · G, D heads, head size
"""
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blocks import Key, Pool
from kernels import in_place
from kvcache import CACHE_DTYPES, CacheFull, Step, free_memory, kv_bytes
from kvquant import GROUP, Bits, KVStore, store
from nativestep import NativeStep, attends
from pagedstep import PagedStep, in_order


@dataclass
class Text:
    """What one sequence has. Invariant: blocks are ceil(len(tokens) / block_size) many; `chain` are the identities of the first."""
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)


def blocks_that_fit(memory: float, one: int, device: torch.device) -> int:
    """How many blocks of `one` byte each `memory` holds: bytes, or, up to 1, a share of what is free on the device now.

    ValueError if not one.
    """
    if not memory > 0:
        raise ValueError(f"the memory for keys and values is {memory}: it must be a share of what is free (up to 1), or a number of bytes")
    blocks = int(memory * free_memory(device) if memory <= 1 else memory) // one
    if blocks < 1:
        raise ValueError(f"the memory for keys and values is {memory}: that does not hold a block, which takes {one:,} bytes")
    return blocks


def room_for_blocks(shape: Sequence[int], bits: int, device: torch.device | str, dtype: torch.dtype,
                    group: int | None = None) -> Tensor | KVStore:
    """[L, N, S, G, D], uninitialized. Kernels read it block by block; plain torch, head by head, so that in
    memory the heads are outermost there: what is read together lies together."""
    L, N, S, G, D = shape
    if in_place(torch.device(device), dtype if bits == 16 else torch.float32):
        return store(shape, bits, device, dtype, group)
    return store((L, G, N, S, D), bits, device, dtype, group).transpose(1, 2).transpose(2, 3)


class PagedCache:
    """Keys and values of any number of texts, in `blocks` blocks of `block_size` tokens."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, blocks: int, block_size: int = 16, max_len: int | None = None,
                 device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, prefix_sharing: bool = True, bits: Bits = (16, 16)):
        longest = blocks * block_size if max_len is None else min(max_len, blocks * block_size)
        for name, value in dict(layers=layers, kv_heads=kv_heads, head_dim=head_dim, blocks=blocks, block_size=block_size, max_len=longest).items():
            if value < 1:
                raise ValueError(f"{name} is {value}: a cache needs at least 1")
        if dtype not in CACHE_DTYPES:
            raise ValueError(f"a cache of {dtype} is not supported; use one of {', '.join(str(d)[6:] for d in CACHE_DTYPES)}")
        try:
            shape = (layers, blocks, block_size, kv_heads, head_dim)
            self.keys = room_for_blocks(shape, bits[0], device, dtype, GROUP)
            self.values = room_for_blocks(shape, bits[1], device, dtype)
        except RuntimeError:                                             # out of memory, whatever the device calls it
            size = kv_bytes(layers, kv_heads, head_dim, blocks * block_size, dtype, bits)
            raise CacheFull(f"{blocks} blocks of {block_size} tokens need {size / 1e9:.1f} GB, which {device} does not have: ask for fewer") from None
        self.rows = [kept.flatten(1, 2).transpose(1, 2) for kept in (self.keys, self.values)]            # the same, as [L, G, N · S, D]
        self.block_size, self.max_len, self.prefix_sharing = block_size, longest, prefix_sharing
        self.device, self.dtype = torch.device(device), dtype
        self.pool, self._texts, self._opened = Pool(blocks), dict[int, Text](), 0

    @property
    def bytes(self) -> int:
        """What is allocated."""
        return self.keys.nbytes + self.values.nbytes

    def open(self, tokens: Sequence[int]) -> tuple[int, int]:
        """A new sequence for the text `tokens` -> (seq, have): so many of its tokens are stored already, at most all but one."""
        text, parent, S = Text(), 0, self.block_size
        for start in range(0, (len(tokens) - 1) // S * S if self.prefix_sharing else 0, S):
            piece = tuple(tokens[start:start + S])
            found = self.pool.find(self._key(parent, piece))
            if found is None:
                break
            block, parent = found
            self.pool.share(block)
            text.tokens += piece
            text.blocks.append(block)
            text.chain.append(parent)
        self._opened += 1
        self._texts[self._opened] = text
        return self._opened, len(text.tokens)

    def _key(self, parent: int, tokens: tuple[int, ...]) -> Key:
        return parent, tokens

    def _text(self, seq: int) -> Text:
        if seq not in self._texts:
            raise KeyError(f"sequence {seq} is not open; open ones: {sorted(self._texts)}")
        return self._texts[seq]

    def length(self, seq: int) -> int:
        """How many tokens of this sequence are stored."""
        return len(self._text(seq).tokens)

    def _blocks_needed(self, requests: Sequence[tuple[int, int]]) -> int:
        """New blocks for n more tokens of each (seq, n), copies of shared ones among them."""
        new, writers = 0, Counter[int]()
        for seq, n in requests:
            text = self._text(seq)
            new += -(-(len(text.tokens) + n) // self.block_size) - len(text.blocks)
            if n and len(text.tokens) % self.block_size:
                writers[text.blocks[-1]] += 1
        return new + sum(min(count, self.pool.references[block] - 1) for block, count in writers.items())     # the last owner writes in place

    def fits(self, requests: Sequence[tuple[int, int]]) -> bool:
        """Is there room for n more tokens of each (seq, n)? Changes nothing."""
        return all(self.length(seq) + n <= self.max_len for seq, n in requests) and self._blocks_needed(requests) <= self.pool.available

    def extend(self, requests: Sequence[tuple[int, Sequence[int]]], publish: bool = True) -> "PagedStep | Step":
        """Make room for these tokens of each (seq, tokens); they are stored when the step's `attend` runs in each layer.

        publish: share the full blocks that came before; not where another model stored some of them (drafters.SelfDrafter). A token that is
        not known yet is −1, until `settle` says: a block with one among its tokens is never found.
        Raises CacheFull, ValueError or KeyError before anything has changed.
        """
        if not requests or any(len(tokens) == 0 for _, tokens in requests):
            raise ValueError("a step needs at least one new token of every sequence in it")
        if len({seq for seq, _ in requests}) < len(requests):
            raise ValueError(f"a sequence occurs twice in one step: {[seq for seq, _ in requests]}")
        sizes = [(seq, len(tokens)) for seq, tokens in requests]
        for seq, n in sizes:
            if self.length(seq) + n > self.max_len:
                raise CacheFull(f"sequence {seq} has {self.length(seq)} tokens and cannot take {n} more: the limit is {self.max_len}; "
                                "ask for fewer, or make a cache of a larger max_len")
        fresh = self.pool.take(self._blocks_needed(sizes))[::-1]
        starts = [(seq, self.length(seq)) for seq, _ in requests]
        for seq, tokens in requests:
            text = self._texts[seq]
            if publish:
                self._publish(text)
            self._own_last_block(text, fresh)
            text.tokens += map(int, tokens)
            text.blocks += [fresh.pop() for _ in range(-(-len(text.tokens) // self.block_size) - len(text.blocks))]
        return self._step(starts)

    @property
    def in_place(self) -> bool:
        """Whether its steps are KernelSteps, which can be recorded (graphs.py)."""
        return in_place(self.device, self.keys.dtype)

    def _step(self, starts: Sequence[tuple[int, int]]) -> "PagedStep | Step":
        """The step of these sequences, which were so long before."""
        spans = [(self._texts[seq].blocks, start, self.length(seq)) for seq, start in starts]
        if self.in_place:
            from kernelstep import KernelStep
            return KernelStep(self.keys, self.values, spans, self.block_size)
        if self.dtype != torch.float64 and attends(self.keys, self.values, spans):
            return NativeStep(self.keys, self.values, spans, self.block_size)
        text, start = self._texts[starts[0][0]], starts[0][1]
        if len(starts) == 1 and in_order(text.blocks):                  # as in a contiguous cache
            rows = (kept[:, :, text.blocks[0] * self.block_size:] for kept in self.rows)
            return Step([(start, len(text.tokens), *rows)], self.device)
        return PagedStep(self, [(self._texts[seq], start) for seq, start in starts])

    def _publish(self, text: Text) -> None:
        S = self.block_size
        for i in range(len(text.chain), len(text.tokens) // S if self.prefix_sharing else 0):
            key = self._key(text.chain[-1] if text.chain else 0, tuple(text.tokens[i * S:(i + 1) * S]))
            text.chain.append(self.pool.publish(text.blocks[i], key))

    def _own_last_block(self, text: Text, fresh: list[int]) -> None:
        """Before writing into a block that is not full: it must be nobody else's, and not be found by anybody."""
        if len(text.tokens) % self.block_size == 0:
            return
        block = text.blocks[-1]
        if self.pool.references[block] == 1:
            self.pool.withdraw(block)
            return
        text.blocks[-1] = fresh.pop()
        for kept in (self.keys, self.values):
            kept[:, text.blocks[-1]] = kept[:, block]
        self.pool.release(block)

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens."""
        text = self._text(seq)
        if not 0 <= length <= len(text.tokens):
            raise ValueError(f"sequence {seq} has {len(text.tokens)} tokens: it cannot be truncated to {length}")
        del text.tokens[length:], text.chain[length // self.block_size:]
        self._release(text, -(-length // self.block_size))

    def settle(self, seq: int, tokens: Sequence[int]) -> None:
        """Which tokens those were that `extend` was not told: drafts, −1, which only the device knew. They are the newest, and are read off the text."""
        kept = self._text(seq).tokens
        at = len(kept)
        while at and kept[at - 1] < 0:
            at -= 1
        kept[at:] = tokens[at:len(kept)]

    def _release(self, text: Text, keep: int) -> None:
        """All blocks but the first `keep`, the tail first."""
        while len(text.blocks) > keep:
            self.pool.release(text.blocks.pop())

    def fork(self, seq: int) -> int:
        """A second sequence with the same past; nothing is copied until one of them writes."""
        text = self._text(seq)
        for block in text.blocks:
            self.pool.share(block)
        self._opened += 1
        self._texts[self._opened] = Text(list(text.tokens), list(text.blocks), list(text.chain))
        return self._opened

    def free(self, seq: int) -> None:
        """Let go of all blocks; those that are full stay findable until their space is needed."""
        text = self._text(seq)
        self._publish(text)
        del self._texts[seq]
        self._release(text, 0)

    def check(self) -> tuple[int, int, int]:
        """(free, cached, live) blocks. Raises RuntimeError if the books do not balance."""
        held, pool = Counter(block for text in self._texts.values() for block in text.blocks), self.pool
        owners = sorted([*pool.free, *pool.cached, *held])
        if owners != list(range(pool.total)) or any(pool.references[block] != held[block] for block in range(pool.total)):
            raise RuntimeError(f"blocks are lost or have two owners: {len(pool.free)} free + {len(pool.cached)} cached + {len(held)} live, of {pool.total}")
        if any(self.pool.published.get(key) != block for block, (key, _) in pool.known.items()) or len(pool.known) != len(pool.published):
            raise RuntimeError("what is published and what blocks are known for differ")
        return len(pool.free), len(pool.cached), len(held)

    def waste(self) -> float:
        """Of the places in live blocks, the share that holds no token."""
        used: dict[int, int] = {}
        for text in self._texts.values():
            for i, block in enumerate(text.blocks):
                used[block] = max(used.get(block, 0), min(self.block_size, len(text.tokens) - i * self.block_size))
        return 1 - sum(used.values()) / (len(used) * self.block_size) if used else 0.0


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: the blocks of four texts that begin alike, drawn as they come and go.

@torch.inference_mode()
def main() -> None:
    from model import Llama
    from tokenizer import Tokenizer
    from weights import find

    llama, tokenizer = Llama.load("tiny"), Tokenizer.load(find("tiny"))
    c = llama.config
    cache = PagedCache(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, 48, block_size=4, dtype=llama.dtype)
    names: dict[int, str] = {}

    def draw(what: str) -> None:
        free, cached, live = cache.check()
        owners: dict[int, str] = {}
        for seq, name in names.items():
            for block in cache._texts[seq].blocks:
                owners[block] = "*" if block in owners else name
        row = "".join(owners.get(block, "░" if block in cache.pool.cached else "·") for block in range(free + cached + live))
        print(f"{row}  {what}: {free} free + {cached} cached + {live} live")

    def read(name: str, text: str) -> int:
        tokens = tokenizer.encode(text)
        seq, have = cache.open(tokens)
        names[seq] = name
        llama(torch.tensor(tokens[have:]), cache.extend([(seq, tokens[have:])]), rows=slice(-1, None))
        draw(f"{name} reads {len(tokens)} tokens, {have} of them found")
        return seq

    def write(*seqs: int) -> None:
        llama(torch.tensor([5] * len(seqs)), cache.extend([(seq, [5]) for seq in seqs]), rows=slice(-1, None))

    opening = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog. "
    print("blocks of 4 tokens: letters have one text, * several, ░ is cached, · free")
    a = read("a", opening + "One day")
    write(a)
    b = read("b", opening + "It was a very sunny day and")
    d = cache.fork(b)
    names[d] = "d"
    draw("b is forked into d: they share everything")
    write(b, d)
    draw("both write: the last block, which is not full, is copied")
    stored, paged = sum(map(cache.length, names)), cache.waste()
    for seq in (d, b, a):
        cache.free(seq)
        names.pop(seq)
    draw("all are gone; what they read is not")
    read("e", opening + "But then")
    print(f"wasted while a, b and d ran: {paged:.0%} of the live blocks; of a contiguous cache with three rows of {c.max_position_embeddings}: "
          f"{1 - stored / (3 * c.max_position_embeddings):.0%}")


if __name__ == "__main__":
    main()
