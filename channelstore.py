"""Storing where keys have 4 bits by channel, on a GPU: the ring, the values, and the groups that a step completes, in one pass.

A program has one group of sixteen tokens of one text and head, of which some are new:

    new keys    → the ring, if they are among the text's last 32              new values → their slots, rounded by token
    the group   → its place, rounded by channel, if it is full now: what it had is in the ring, the rest is new
                → `fresh`, if the step has more of this text than the ring can tell queries (channelflash.py)

The ring's two halves have a writer each: the programs of a text's first and second group. The first alone reads the ring, before it
writes, so nothing that a step still needs is overwritten by what comes 32 tokens later.

Invariant: what is stored is kivi.py's, to the bit: keys are rounded to the ring's type first, then to 4 bits.

Costs: each number read and written once; the last keys once more.

    T tokens of a step · B sequences · H, G heads · R = H / G · D head size · S tokens of a block
"""
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from channelflash import NEAR, RING
from flash import MODELS, Pool
from kvquant import GROUP, KVStore
from quant import FAR, MOST4, TINY
from store import _on_grid, _turned
from unpack import TOKENS

if TYPE_CHECKING:
    from crosscompile import Report


@triton.jit
def _rows(x, token, stride, at, inside, cos, sin, D: tl.constexpr, TURN: tl.constexpr):
    """Some tokens' vectors at x, turned if they have to be. token: of the step, shaped to be broadcast with `at`, places in a vector."""
    if TURN:
        return _turned(x + token * stride, cos + token * D, sin + token * D, at, inside, D)
    return tl.load(x + token * stride + at, inside, 0)


@triton.jit
def _put(x, low, high, pool, pool_scale, pool_zero, vectors, scales, inside, new, D: tl.constexpr, WIDE: tl.constexpr,
         TINY: tl.constexpr, FAR: tl.constexpr, MOST4: tl.constexpr):
    """Round x: [16, WIDE / 2, 2], on grids from low to high, and write it to vectors: [16, 1, 1], where `new`, and the grids to scales, where `inside`."""
    steps, scale, zero = _on_grid(x, low, high, TINY, FAR, MOST4)
    first, second = tl.split(steps)                                               # [16, WIDE / 2]
    at = tl.arange(0, WIDE // 2)[None, :]
    tl.store(pool + vectors.reshape(TOKENS, 1) * (D // 2) + at, first | (second << 4), new.reshape(TOKENS, 1) & (at < D // 2))
    tl.store(pool_scale + scales, scale.to(tl.bfloat16), inside)
    tl.store(pool_zero + scales, zero.to(tl.int16), inside)


@triton.jit(do_not_specialize=["table_stride", "groups"])
def _store(q, k, v, turned, cos, sin, ring, fresh, keys, k_scale, k_zero, values, v_scale, v_zero, table, query_start, lengths, q_token, q_head,
           k_token, k_head, v_token, v_head, S, block_stride, token_stride, head_stride, table_stride, groups, G: tl.constexpr, R: tl.constexpr,
           D: tl.constexpr, WIDE: tl.constexpr, TURN: tl.constexpr, NEAR: tl.constexpr, TINY: tl.constexpr, FAR: tl.constexpr, MOST4: tl.constexpr):
    """A program for (group of a text that has new tokens, key/value head, text)."""
    piece, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, length = tl.load(query_start + b).to(tl.int64), tl.load(lengths + b)
    n = tl.load(query_start + b + 1) - begin.to(tl.int32)
    past = length - n
    group = past // TOKENS + piece
    if (n == 0) | (group * TOKENS >= length):
        return
    i, half, pair = tl.arange(0, TOKENS)[:, None, None], tl.arange(0, WIDE // 2)[None, :, None], tl.arange(0, 2)[None, None, :]
    position, at = group * TOKENS + i, 2 * half + pair                            # [16, 1, 1], [1, WIDE / 2, 2]
    token, new, inside = begin + position - past, (position >= past) & (position < length), at < D
    full, far = group * TOKENS + TOKENS <= length, n > NEAR                       # far: also the first group is full
    table += b * table_stride
    kept = tl.load(table + table_stride - 1).to(tl.int64) * RING
    slot = ((kept + position % RING) * G + g) * D + at
    x = _rows(k + g * k_head, token, k_token, at, new & inside, cos, sin, D, TURN).to(ring.dtype.element_ty)
    x = tl.where(new, x, tl.load(ring + slot, (position < past) & inside & full, 0))                    # [16, WIDE / 2, 2]
    tl.debug_barrier()                                                            # what was in the ring is read
    if piece < 2:
        newest = position + tl.maximum(length - 1 - position, 0) // RING * RING   # of all positions with this place in the ring
        last = begin + newest - past
        written = (newest >= past) & (newest < length) & inside
        tl.store(ring + slot, _rows(k + g * k_head, last, k_token, at, written, cos, sin, D, TURN).to(ring.dtype.element_ty), written)
    if far:
        beside = begin + b * TOKENS + position - past // TOKENS * TOKENS
        tl.store(fresh + (beside * G + g) * D + at, x, (position < length) & inside)

    unit, within = tl.load(table + group * TOKENS // S).to(tl.int64), group * TOKENS % S
    y = tl.load(v + g * v_head + token * v_token + at, new & inside, 0).to(tl.float32)
    low = tl.min(tl.min(tl.where(inside, y, float("inf")), 2), 1)[:, None, None]
    high = tl.max(tl.max(tl.where(inside, y, float("-inf")), 2), 1)[:, None, None]
    place = unit * block_stride + (within + i) * token_stride + g * head_stride   # [16, 1, 1]
    _put(y, low, high, values, v_scale, v_zero, place, place, new, new, D, WIDE, TINY, FAR, MOST4)
    if full:
        whole, z = (unit * groups + within // TOKENS) * G + g, x.to(tl.float32)
        _put(z, tl.min(z, 0)[None], tl.max(z, 0)[None], keys, k_scale, k_zero, whole * TOKENS + i, whole * D + at, inside, i >= 0, D, WIDE, TINY, FAR, MOST4)
    if TURN:
        for r in range(R):
            head = g * R + r
            tl.store(turned + (token * (G * R) + head) * D + at, _rows(q + head * q_head, token, q_token, at, new & inside, cos, sin, D, True), new & inside)


def store(k: Tensor, v: Tensor, keys: KVStore, ring: Tensor, values: Pool, tables: Tensor, query_start: Tensor, lengths: Tensor, S: int, most: int,
          q: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Store k, v: [T, G, D], of which sequence b has rows query_start[b] to query_start[b + 1], at most `most` of them, the last of lengths[b].

    keys: [N, F, G, 16, D], groups of one layer; ring: [texts, 32, G, D]; values: in blocks of S tokens; tables: int32[B, ·], the blocks of each
    text, and in the last column its ring. With q: [T, H, D] and cos, sin: [T, 1, D], q and k are turned first.
    -> fresh: [T + 16 B, G, D], raw keys of the texts with over NEAR new tokens (the ring, if there are none), and q turned
    """
    (T, G, D), B = k.shape, len(lengths)
    R = 1 if q is None else q.shape[1] // G
    turned = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    fresh = torch.empty((T + B * GROUP, G, D), dtype=ring.dtype, device=ring.device) if most > NEAR else ring
    _store[((most + GROUP - 2) // GROUP + 1, G, B)](
        q, k, v, turned, cos, sin, ring, fresh, *keys.parts, *values[:3], tables, query_start, lengths, *((0, 0) if q is None else q.stride()[:2]),
        *k.stride()[:2], *v.stride()[:2], S, *values.strides, tables.stride(0), keys.parts[0].shape[1], G, R, D, max(2, triton.next_power_of_2(D)),
        q is not None, NEAR, TINY, FAR, MOST4, num_warps=4)
    return fresh, turned


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: what the kernel needs of a GPU that is not there, for Llama 3.1 8B and 3.2 1B in bfloat16, with rotation.

def compiled(arch: int, model: str) -> "Report":
    """The kernel as it is compiled for blocks of bfloat16."""
    from crosscompile import compile_for
    H, G, D = MODELS[model]
    names = _store.arg_names
    types = dict.fromkeys(names[:14], "*bf16") | dict.fromkeys(names[14:17], "*i32") | dict.fromkeys(names[17:28], "i32:16")
    types |= dict(keys="*u8", values="*u8", k_zero="*i16", v_zero="*i16", token_stride="i32", table_stride="i32", groups="i32")
    fixed = dict(G=G, R=H // G, D=D, WIDE=D, TURN=True, NEAR=NEAR, TINY=TINY, FAR=FAR, MOST4=MOST4, head_stride=1)
    return compile_for(_store, types, fixed, arch, 4)


def main() -> None:
    print(f"{'':6}{'model':>6}{'registers':>11}{'spills':>8}{'shared':>8}")
    for arch, model in [(arch, model) for arch in (90, 80) for model in MODELS]:
        print(f"sm_{arch:<3}{model:>6}" + "{:11}{:8}{:8,}".format(*compiled(arch, model)[:3]))


if __name__ == "__main__":
    main()
