"""Attention over blocks in PyTorch: one call for all texts of a step that have few queries, padded to the longest.

A text that decodes or verifies has few new tokens, too little work for a call of its own. So one gather brings the keys
and values of all these texts together, padded, and one call serves them. A text that reads many tokens has a call of
its own; where its blocks lie in order, its past is a slice, and nothing is gathered.

Invariant: padding is never read into a result, and never written.
Cost: the padded keys and values of a layer are copied for each step.

    T tokens of a step, T' tokens of texts with few queries · B such texts · n queries of one · M keys of the longest
    H, G heads, R = H / G · D head size · N blocks of S tokens
"""

from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import Span, Step, attention

FEW = 16  # the most queries of a text that share a call


class Few(NamedTuple):
    """The texts of a step with few queries each."""

    past: Tensor | slice  # int64[B, M]: slots, padded; of a lone text a slice
    unseen: Tensor  # float32[B, n, M]: 0 where a query sees a key, else −∞
    place: Tensor | None  # int64[T']: rows of queries among B · n; None: all
    rows: Tensor | None  # int64[T']: rows of queries in the step; None: all


class Plan(NamedTuple):
    """What attention of a step needs in every layer."""

    slots: Tensor  # int64[T]
    few: Few | None
    many: list[tuple[slice, Tensor | slice]]  # each other text: tokens in the step, slots of keys


def in_order(span: Span, S: int) -> slice | None:
    """The slots of a text, if its blocks follow each other."""
    blocks, _, stop = span
    used = list(blocks[: -(-stop // S)])
    return (
        slice(used[0] * S, used[0] * S + stop)
        if used == list(range(used[0], used[0] + len(used)))
        else None
    )


def plan(step: Step) -> Plan:
    S, spans = step.block_size, step.spans
    own = [slice(end - n, end) for end, n in zip(accumulate(step.counts), step.counts)]
    some = [b for b, n in enumerate(step.counts) if n <= FEW]
    many = [
        (own[b], in_order(spans[b], S) or step.seen[b])
        for b, n in enumerate(step.counts)
        if n > FEW
    ]
    rows = (
        torch.tensor([i for b in some for i in range(own[b].start, own[b].stop)]) if many else None
    )
    few = (
        gather([spans[b] for b in some], step.places.tables.long()[some], S, rows) if some else None
    )
    return Plan(step.places.slots.long(), few, many)


def gather(spans: list[Span], tables: Tensor, S: int, rows: Tensor | None) -> Few:
    """tables: int64[B, blocks]."""
    counts, lengths = [stop - start for _, start, stop in spans], [stop for _, _, stop in spans]
    n, every = max(counts), torch.arange(max(lengths))  # [M]
    length, count = torch.tensor([lengths, counts])[:, :, None]  # [B, 1]
    alone = in_order(spans[0], S) if len(spans) == 1 else None
    past = alone or torch.where(
        every < length, tables[:, every // S] * S + every % S, tables[:, :1] * S
    )
    last = length - count + torch.arange(n)  # [B, n]: the last key seen
    unseen = torch.zeros(len(spans), n, len(every)).masked_fill_(
        every > last[:, :, None], float("-inf")
    )
    place = [b * n + j for b, own in enumerate(counts) for j in range(own)]
    return Few(past, unseen, torch.tensor(place) if len(place) < n * len(spans) else None, rows)


def together(q: Tensor, keys: Any, values: Any, layer: int, few: Few) -> Tensor:
    """Few queries of each text: q: [T', H, D] -> [T', H, D]."""
    (_, H, D), (B, n, _) = q.shape, few.unseen.shape
    k, v = (gathered(kept, layer, few.past, q.dtype) for kept in (keys, values))  # [B, G, M, D]
    G, R = k.shape[1], H // k.shape[1]
    if few.place is not None:
        q = q.new_zeros(B * n, H, D).index_copy_(0, few.place, q)
    q = q.view(B, n, G, R, D).transpose(1, 2).reshape(B, G, n * R, D)  # a group's heads are rows
    mask = (
        None if n == B == 1 else few.unseen.to(q.dtype).repeat_interleave(R, 1)[:, None]
    )  # [B, 1, n · R, M]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    out = out.view(B, G, n, R, D).transpose(1, 2).reshape(B * n, H, D)
    return out if few.place is None else out[few.place]


def gathered(kept: Any, layer: int, past: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """past: int64[B, M] -> [B, G, M, D]."""
    if isinstance(past, slice):
        return kept.read(layer, past, dtype).transpose(0, 1)[None]
    heads = [
        part[layer].permute(2, 0, 1, 3).flatten(1, 2) for part in kept.parts
    ]  # [G, N · S, width]
    (B, M), (G, slots, _) = past.shape, heads[0].shape
    where = (past[:, None] + torch.arange(G)[:, None] * slots).flatten()  # among G · N · S
    return kept.decode([part.flatten(0, 1).index_select(0, where) for part in heads], dtype).view(
        B, G, M, -1
    )


def look_back(q: Tensor, k: Tensor, v: Tensor, step: Step, layer: int) -> Tensor:
    """kernels.Ops.look_back, of a step with a cache."""
    if (made := vars(step).get("plan")) is None:
        made = step.plan = plan(step)
    keys, values = step.cache.keys, step.cache.values
    keys.write(layer, made.slots, k)
    values.write(layer, made.slots, v)
    if not made.many:
        return together(q, keys, values, layer, made.few)
    out = torch.empty_like(q)
    if made.few is not None:
        out[made.few.rows] = together(q[made.few.rows], keys, values, layer, made.few)
    for own, past in made.many:
        out[own] = attention(
            q[own], *(kept.read(layer, past, q.dtype).transpose(0, 1) for kept in (keys, values))
        )
    return out
