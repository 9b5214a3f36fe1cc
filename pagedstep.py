"""The step of the paged cache, in plain torch: where each token of a pass lies, and attention through the tables of blocks.

A text's tokens lie in blocks anywhere in the pool. Its table says where:

    slot of token i = table[i // S] · S + i % S

What a step needs of that is worked out once, for all layers: the slot of each new token, to store into, and for the texts that have few
new ones (those that decode, or verify drafts) the slots of all their keys, padded to the longest, so that one gather and one product serve
them together. A text that reads many has an attention of its own. On a GPU nothing is gathered: kernelstep.py.

Invariant: what is padded, or nobody's, is neither read into a result nor written.
Cost: the padded keys and values of a layer are copied for each step.

Kwon et al. 2023, PagedAttention (arXiv:2309.06180).

    L layers · N blocks · S block_size · B texts of a step · T its tokens · n queries of a text · M keys · G, H, D heads, head size
"""
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kernels import FEW, attention, paged_attention

if TYPE_CHECKING:
    from paged import PagedCache, Text


class PagedStep:
    """The new tokens of one forward pass, packed end to end: their places in the blocks, and attention for them.

    Sequences with few queries go through one call together; one with many has a call of its own. Where its blocks lie in order, as
    they do while the pool is fresh, nothing is gathered: its past is a slice. (A lone text in order has the step of kvcache.py.)
    """

    def __init__(self, cache: "PagedCache", starts: "list[tuple[Text, int]]"):
        """starts: of each sequence of the step, the text (with its new tokens) and its length before."""
        S, device, most = cache.block_size, cache.device, max(len(text.blocks) for text, _ in starts)
        self.cache, tensor = cache, partial(torch.tensor, dtype=torch.int64, device=device)
        lengths, counts = [len(text.tokens) for text, _ in starts], [len(text.tokens) - start for text, start in starts]
        tables = tensor([text.blocks + text.blocks[:1] * (most - len(text.blocks)) for text, _ in starts])                  # [B, most]
        owner = tensor([b for b, n in enumerate(counts) for _ in range(n)])                                                 # [T]
        self.positions = tensor([position for (_, start), length in zip(starts, lengths) for position in range(start, length)])
        self.slots = tables[owner, self.positions // S] * S + self.positions % S                                            # [T]
        few = [b for b, n in enumerate(counts) if n <= FEW]
        self.few, self.vectors, self.mask, self.many = None, None, None, []
        if few:
            whole = len(few) == len(starts)
            self.few = gather_plan(tables if whole else tables[few], S, [lengths[b] for b in few], [counts[b] for b in few], None if whole else
                                   tensor([i for i, b in enumerate(owner.tolist()) if counts[b] <= FEW]))
        for b, (end, n) in enumerate(zip(accumulate(counts), counts)):
            if n > FEW:
                blocks, every = starts[b][0].blocks, torch.arange(lengths[b], device=device)
                past = slice(blocks[0] * S, blocks[0] * S + lengths[b]) if in_order(blocks) else tables[b, every // S] * S + every % S
                self.many.append((slice(end - n, end), past))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v: [T, G, D]; then let q: [T, H, D] look back, each token within its own sequence -> [T, H, D]."""
        keys, values = (kept[layer] for kept in self.cache.rows)                                            # [G, N · S, D]
        keys.index_copy_(1, self.slots, k.transpose(0, 1).to(keys.dtype))
        values.index_copy_(1, self.slots, v.transpose(0, 1).to(values.dtype))
        if self.few is not None and self.vectors is None:                                                   # the same in all layers
            (_, H, _), G = q.shape, k.shape[1]
            self.vectors = self.few.past[:, None] + torch.arange(G, device=q.device)[:, None] * (self.cache.pool.total * self.cache.block_size)
            self.mask = self.few.unseen.to(q.dtype).repeat_interleave(H // G, 1)[:, None]                   # [B, 1, n · R, M]
        if self.few is not None and not self.many:
            return paged_attention(q, keys, values, self.vectors, self.mask, self.few.place)
        out = torch.empty_like(q)
        if self.few is not None:
            out[self.few.rows] = paged_attention(q[self.few.rows], keys, values, self.vectors, self.mask, self.few.place)
        for own, past in self.many:
            out[own] = attention(q[own], *(kept[:, past].to(q.dtype) for kept in (keys, values)))
        return out


def in_order(blocks: list[int]) -> bool:
    """Whether each block lies right after the one before."""
    return blocks == list(range(blocks[0], blocks[0] + len(blocks)))


class Few(NamedTuple):
    """Sequences of a step with a few queries each, padded to the most."""
    past: Tensor                                        # int64[B, M], the slots of each one's tokens, then its first over and over
    unseen: Tensor                                      # float32[B, n, M], 0 where a query sees a key, else −∞
    place: Tensor | None                                # int64[T'], where the queries are among B · n; None: everywhere
    rows: Tensor | None                                 # int64[T'], where they are in the step; None: it has no others


def gather_plan(tables: Tensor, S: int, lengths: list[int], counts: list[int], rows: Tensor | None) -> Few:
    """tables: int64[B, most], blocks; lengths and counts: of each sequence, its tokens, and how many of them are new."""
    n, device = max(counts), tables.device
    every = torch.arange(max(lengths), device=device)                                                       # [M]
    length, count = torch.tensor([lengths, counts], device=device)[:, :, None]                              # [B, 1]
    past = torch.where(every < length, tables[:, every // S] * S + every % S, tables[:, :1] * S)
    last = length - count + torch.arange(n, device=device)                                                  # [B, n], the last key seen
    unseen = torch.zeros(len(tables), n, len(every), device=device).masked_fill_(every > last[:, :, None], float("-inf"))
    ragged = any(own != n for own in counts)
    place = torch.tensor([b * n + j for b, own in enumerate(counts) for j in range(own)], device=device) if ragged else None
    return Few(past, unseen, place, rows)
