"""Keys in 4 bits: a scale for each channel over sixteen tokens, and the newest tokens as they are.

Some channels of keys are large, in all tokens. A scale for each token (kvquant.py) is then as large as these channels make it, and all the
others are rounded away. So 4-bit keys are quantized the other way round: sixteen tokens are a group, and in a group each channel of each
head has a scale and a zero of its own.

    tokens     0 ············· 15   16 ············ 31   32 ····· 37
    keys     [ 4 bits, by channel ][ 4 bits, by channel ][ 16 bits  ]        bytes a token and head: D / 2 + 4 D / 16
    values   [ 4 bits, by token, as in kvquant.py                   ]                                D / 2 + 4

A group can be rounded only when it is full, so the keys of the unfinished one wait in 16 bits. When is it read as what? The rule must
not depend on how a prompt was cut, or whether five tokens were verified at once; so it goes by positions alone:

    a query sees the keys of its own group as they are, and those of the groups before it in 4 bits.

What comes back when tokens are taken back: of each text the last 32 tokens' keys stay as they were, in a ring. A draft that was rejected
at the beginning of a group finds the group before it there, still unrounded. Where a cut goes deeper, into a group of which only 4 bits are
left, the whole group is forgotten (`truncate` may keep up to 15 tokens fewer than it is told to), and is read again.

Invariant: what is stored depends on the text alone, and the ring of an open sequence holds the keys of its unfinished group.

Cost: an attention of its own for each text and each group that a step touches: one for a text that decodes, more than in batches of the
other caches; on a GPU two kernels a layer, whatever the texts (channelstep.py). Memory: 32 keys in 16 bits for each text that can be open.

Not covered: 2 bits.

Liu et al. 2024, KIVI (arXiv:2402.02750): groups of 32 tokens, the newest 128 in 16 bits; per-channel outliers of keys, figure 2.

    L layers · N groups · U blocks, or rows · G, H, D heads, head size · n queries of a text, m = its tokens · F finished groups
"""
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels import attention, in_place
from kvcache import CacheFull, KVCache
from kvquant import GROUP, KVStore
from paged import PagedCache
from quant import int4

if TYPE_CHECKING:
    from channelstep import ChannelKernelStep

RING = 2 * GROUP                                        # the newest keys of a text that are kept as they were


class ChannelStore(KVStore):
    """Groups of keys [..., 16, D], a scale and a zero for each channel of each."""

    def _each(self, change: Any) -> "ChannelStore":
        return ChannelStore([change(part) for part in self.parts])

    def _round(self, x: Tensor) -> tuple[Tensor, ...]:
        return int4(x, dim=-2)


def room_for_groups(layers: int, units: int, tokens: int, kv_heads: int, D: int, device: torch.device) -> ChannelStore:
    """For `units` blocks (or rows) of `tokens` tokens each: [L, U, N, G, 16, D]. ValueError for an odd D."""
    if D % 2:
        raise ValueError(f"head_dim is {D}: two numbers of 4 bits share a byte, so it must be even; use 8 bits")
    lead = (layers, units, -(-tokens // GROUP), kv_heads)
    kinds = [((GROUP, D // 2), torch.uint8), ((1, D), torch.bfloat16), ((1, D), torch.int16)]
    return ChannelStore([torch.empty(lead + shape, device=device, dtype=kind) for shape, kind in kinds])


def ring_bytes(layers: int, kv_heads: int, head_dim: int, texts: int, dtype: torch.dtype) -> int:
    """What the newest keys of so many texts take."""
    return layers * texts * RING * kv_heads * head_dim * dtype.itemsize


class Rings:
    """Of each open sequence, a ring with its newest keys, and from which token on it has them."""

    def __init__(self, layers: int, texts: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype):
        self.keys = torch.empty(layers, texts, RING, kv_heads, head_dim, device=device, dtype=dtype)
        self.free, self.of, self.since = list(reversed(range(texts))), dict[int, int](), dict[int, int]()

    def check(self) -> None:
        if not self.free:
            raise CacheFull(f"all {len(self.of)} texts that this cache has room for are open: free one, or make a cache of more")

    def open(self, seq: int, have: int) -> None:
        self.of[seq], self.since[seq] = self.free.pop(), have

    def grown(self, seq: int, length: int) -> None:
        """The text has so many tokens now, so the ring will have the last 32: whole groups from here on."""
        self.since[seq] = max(self.since[seq], -(-(length - RING) // GROUP) * GROUP)

    def cut(self, seq: int, length: int) -> int:
        """To where a text is cut that shall have at most `length` tokens: there, or before that group if its keys are only there in 4 bits."""
        first = length // GROUP * GROUP
        if first >= self.since[seq]:
            return length
        self.since[seq] = first
        return first

    def fork(self, seq: int, new: int) -> None:
        self.since[new] = self.since[seq]
        self.keys[:, self.of[new]] = self.keys[:, self.of[seq]]

    def close(self, seq: int) -> None:
        self.free.append(self.of.pop(seq))


class ChannelKeys:
    """What both caches do otherwise where keys have 4 bits. To be mixed in."""
    rings: Rings

    def open(self, tokens: Sequence[int]) -> tuple[int, int]:
        self.rings.check()
        seq, have = super().open(tokens)
        self.rings.open(seq, have)
        return seq, have

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens, or up to 15 fewer, where a group was rounded long ago."""
        super().truncate(seq, self.rings.cut(seq, length) if 0 <= length < self.length(seq) else length)

    def free(self, seq: int) -> None:
        super().free(seq)
        self.rings.close(seq)

    @property
    def bytes(self) -> int:
        return super().bytes + self.rings.keys.nbytes

    @property
    def in_place(self) -> bool:
        return in_place(self.device, self.rings.keys.dtype)

    def _step(self, starts: Sequence[tuple[int, int]]) -> "ChannelStep | ChannelKernelStep":
        for seq, _ in starts:
            self.rings.grown(seq, self.length(seq))
        if self.in_place:
            return self._in_place([(self._blocks(seq), self.rings.of[seq], start, self.length(seq)) for seq, start in starts])
        return ChannelStep([Span(start, self.length(seq), self.rings.keys[:, self.rings.of[seq]], *self._where(seq)) for seq, start in starts])


class ChannelKVCache(ChannelKeys, KVCache):
    """The contiguous cache, with keys of 4 bits."""

    def _room_for_keys(self, shape: Sequence[int], bits: int, dtype: torch.dtype) -> ChannelStore:
        L, rows, G, tokens, D = shape
        self.rings = Rings(L, rows, G, D, self.values.device, dtype)
        return room_for_groups(L, rows, tokens, G, D, self.values.device)

    def fork(self, seq: int) -> int:
        length, (new, _) = self.length(seq), self.open(())
        self.keys[:, new, :length // GROUP] = self.keys[:, seq, :length // GROUP]
        self.values[:, new, :, :length] = self.values[:, seq, :, :length]
        self.rings.fork(seq, new)
        self._lengths[new] = length
        return new

    def _blocks(self, seq: int) -> list[int]:
        return [seq]

    def _in_place(self, texts: Sequence[tuple[list[int], int, int, int]]) -> "ChannelKernelStep":
        from channelstep import ChannelKernelStep, spans
        return ChannelKernelStep(self.keys, self.rings.keys, self.values.transpose(2, 3), spans(texts), self.max_len, rows=True)

    def _where(self, seq: int) -> tuple[ChannelStore, Tensor, Tensor | KVStore, Tensor]:
        tokens = torch.arange(self.length(seq), device=self.device)
        return self.keys[:, seq], tokens[::GROUP] // GROUP, self.values[:, seq], tokens


class ChannelPagedCache(ChannelKeys, PagedCache):
    """The paged cache, with keys of 4 bits. texts: how many can be open at once. A block must hold whole groups."""

    def __init__(self, *args: Any, block_size: int = GROUP, texts: int = 16, **kwargs: Any):
        if block_size % GROUP or texts < 1:
            raise ValueError(f"block_size is {block_size} and texts {texts}: keys of 4 bits share their scales over {GROUP} tokens, so a block must hold "
                             f"a multiple of {GROUP}, and there must be a text")
        self.texts = texts
        super().__init__(*args, block_size=block_size, **kwargs)

    def _room_for_keys(self, shape: Sequence[int], bits: int, dtype: torch.dtype) -> ChannelStore:
        L, blocks, tokens, G, D = shape
        self.rings = Rings(L, self.texts, G, D, self.values.device, dtype)
        return room_for_groups(L, blocks, tokens, G, D, self.values.device)

    def fork(self, seq: int) -> int:
        self.rings.check()
        new = super().fork(seq)
        self.rings.open(new, 0)
        self.rings.fork(seq, new)
        return new

    def _blocks(self, seq: int) -> list[int]:
        return self._text(seq).blocks

    def _in_place(self, texts: Sequence[tuple[list[int], int, int, int]]) -> "ChannelKernelStep":
        from channelstep import ChannelKernelStep, spans
        return ChannelKernelStep(self.keys, self.rings.keys, self.values, spans(texts), self.block_size)

    def _where(self, seq: int) -> tuple[ChannelStore, Tensor, Tensor | KVStore, Tensor]:
        blocks, S = torch.tensor(self._text(seq).blocks, device=self.device), self.block_size
        tokens = torch.arange(self.length(seq), device=self.device)
        groups = tokens[::GROUP]
        return (self.keys.flatten(1, 2), (blocks[groups // S] * S + groups % S) // GROUP,
                self.rows[1], blocks[tokens // S] * S + tokens % S)


class Span:
    """One text's part of a step: tokens [start, stop)."""

    def __init__(self, start: int, stop: int, ring: Tensor, keys: ChannelStore, groups: Tensor, values: Tensor | KVStore, places: Tensor):
        """ring: [L, 32, G, D]; keys: [L, ·, G, 16, D], and where its groups are there; values: [L, G, ·, D], and where its tokens are."""
        self.start, self.stop, self.ring, self.keys, self.groups, self.values, self.places = start, stop, ring, keys, groups, values, places
        self.first, self.full = start // GROUP, stop // GROUP                                # groups: the one it goes on with, and how many are full now
        self.positions = torch.arange(start, stop, device=ring.device)
        self.old = slice(self.first * GROUP % RING, self.first * GROUP % RING + start % GROUP)          # of the ring: what `first` has by now
        self.newest = self.positions[-RING:] % RING

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [n, H, D]; k, v: [n, G, D] -> [n, H, D]."""
        keys, values, ring, first, full = self.keys[layer], self.values[layer], self.ring[layer], self.first, self.full
        raw = torch.cat((ring[self.old], k.to(ring.dtype)))                                  # [stop − 16 first, G, D]
        ring.index_copy_(0, self.newest, k[-RING:].to(ring.dtype))
        values.index_copy_(1, self.places[self.start:], v.transpose(0, 1).to(values.dtype))
        if full > first:
            finished = raw[:(full - first) * GROUP].unflatten(0, (-1, GROUP)).transpose(1, 2)                # [F, G, 16, D]
            keys.index_copy_(0, self.groups[first:full], finished)
        past = self._numbers(keys, slice(0, first), q.dtype)                                 # [G, 16 first, D]
        every, v = torch.cat((past, raw.transpose(0, 1).to(q.dtype)), 1), values.index_select(1, self.places).to(q.dtype)        # [G, m, D]
        out = []
        for g in range(first, -(-self.stop // GROUP)):
            end = min((g + 1) * GROUP, self.stop)
            mine = slice(max(g * GROUP - self.start, 0), end - self.start)
            out.append(attention(q[mine], every[:, :end], v[:, :end]))
            if end < self.stop:                                                              # to the groups after it, it is what was stored
                every[:, g * GROUP:end] = self._numbers(keys, slice(g, g + 1), q.dtype)
        return torch.cat(out)

    def _numbers(self, keys: ChannelStore, which: slice, dtype: torch.dtype) -> Tensor:
        """Some groups of keys as numbers: [G, 16 F, D]."""
        return keys.index_select(0, self.groups[which]).to(dtype).transpose(0, 1).flatten(1, 2)


class ChannelStep:
    """The new tokens of one forward pass, packed end to end, text by text."""

    def __init__(self, spans: Sequence[Span]):
        self.spans, self.counts = spans, [span.stop - span.start for span in spans]
        self.positions = torch.cat([span.positions for span in spans])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v: [T, G, D]; then let q: [T, H, D] look back, each token within its own sequence -> [T, H, D]."""
        parts = zip(self.spans, *(x.split(self.counts) for x in (q, k, v)))
        return torch.cat([span.attend(layer, *part) for span, *part in parts])


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: what 4-bit keys cost by token and by channel, and what is in a cache of them.

@torch.inference_mode()
def main() -> None:
    from model import Llama
    from quant import from_int4
    llama = Llama.load("tiny", dtype=torch.float32)
    text = torch.arange(1, 321, device=llama.device) * 13 % 4000
    cache = llama.cache(len(text))
    llama(text, cache.extend([(cache.open(())[0], text.tolist())]))
    keys = cache.keys[:, 0]                                                                  # [L, G, N, D]
    largest = keys.abs().amax(2).flatten(0, 1)                                               # [L · G, D]
    print(f"tiny's keys: in a head, the largest channel is {(largest.amax(1) / largest.median(1).values).mean():.1f} times as large as the median one")
    for name, dim, x in (("by token", -1, keys), ("by channel, over 16 tokens", -2, keys.unflatten(2, (-1, GROUP)))):
        error = (from_int4(*int4(x, dim)) - x).norm() / x.norm()
        print(f"  4 bits {name:28} error {100 * error:5.2f} % of the keys' length")
    small = llama.cache(64, bits=(4, 4))
    seq, _ = small.open(())
    print("a text grows, is cut, and grows: what is in 4 bits █, what is in 16 ░, and from which token on the ring has it as it was")
    for verb, n in (("grow", 40), ("grow", 3), ("cut", 34), ("cut", 21), ("grow", 25), ("cut", 14)):
        small.extend([(seq, [1] * n)]) if verb == "grow" else small.truncate(seq, n)
        length, done = small.length(seq), small.length(seq) // GROUP * GROUP
        drawn = "█" * (done // 2) + "░" * ((length - done + 1) // 2)
        print(f"  {verb} {'by' if verb == 'grow' else 'to'} {n:2}  {drawn:24} {length:2} tokens, {done:2} of them in 4 bits; ring from {small.rings.since[seq]}")


if __name__ == "__main__":
    main()
