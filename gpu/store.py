"""Storing new keys and values on a GPU: rotation and quantization in the kernel that writes them.

The result of the qkv product is read once: queries and keys are rotated by their positions; keys and values are
quantized to the cache's bits (quant.py) and written to their slots.

    slot = block · S + place      vector = block · block_stride + place · token_stride + head · head_stride

A row of the contiguous cache is a block of max_len tokens. A negative slot (a captured graph's padding) stores nothing.
Invariant: integers, scales and zeros are those of quant.py, to the bit. So divisions are exact ones, and halves round
to even: to add and subtract 2²³ · 1.5 rounds as the machine does. Costs: a launch a layer.

    T tokens · H, G heads · R = H / G · D head size · S tokens of a block
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.crosscompile import SHARED, STORED, compile_for, print_table
from gpu.flash import LayerStore
from gpu.unpack import GROUP, PARTS
from quant import LARGEST, WIDTHS
from quant import LARGEST_ZERO as FAR
from quant import SMALLEST_SCALE as TINY

MOST8 = LARGEST / 127  # the largest scales, as quant.safe_scale has them
MOST4 = LARGEST / 7
WHOLE = tl.constexpr(12582912.0)  # 1.5 · 2^23


@triton.jit
def _round(x):
    """To the nearest whole number, halves to the even one; |x| < 2^22."""
    return (x + WHOLE) - WHOLE


@triton.jit
def _round_up(x):
    """The next number above x ≥ 0 that a bfloat16 holds, as a float32."""
    return ((x.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _put(
    x,
    at,
    inside,
    pool,
    pool_scale,
    pool_zero,
    vector,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    TINY: tl.constexpr,
    FAR: tl.constexpr,
    MOST8: tl.constexpr,
    MOST4: tl.constexpr,
):
    """Quantize a vector x: [WIDE / 2, 2], valid where `inside`, and write it. SIZE: numbers of a group in 4 bits."""
    if BITS == 16:
        tl.store(pool + vector * D + at, x.to(pool.dtype.element_ty), inside)
    if BITS == 8:
        scale = _round_up(tl.minimum(tl.maximum(tl.div_rn(tl.max(tl.abs(x)), 127.0), TINY), MOST8))
        tl.store(
            pool + vector * D + at,
            _round(tl.div_rn(x, scale + tl.zeros_like(x))).to(tl.int8),
            inside,
        )
        tl.store(pool_scale + vector, scale.to(tl.bfloat16))
    if BITS == 4:
        M: tl.constexpr = (D + SIZE - 1) // SIZE
        parts: tl.constexpr = 1 if M == 1 else PARTS  # zeros count 1 / parts of a grid step
        group = tl.arange(0, WIDE // SIZE)[:, None, None]
        pair = tl.arange(0, WIDE // 2).reshape(WIDE // SIZE, SIZE // 2)
        x, inside = (
            x.reshape(WIDE // SIZE, SIZE // 2, 2),
            inside.reshape(WIDE // SIZE, SIZE // 2, 2),
        )
        inside |= group >= M  # beyond all groups: 0
        low = tl.min(tl.min(tl.where(inside, x, float("inf")), 2), 1)[:, None, None]
        high = tl.max(tl.max(tl.where(inside, x, float("-inf")), 2), 1)[:, None, None]
        far = tl.maximum(high, -low)
        scale = tl.maximum(
            tl.maximum(tl.div_rn(high, 15.0) - tl.div_rn(low, 15.0), tl.div_rn(far, FAR)), TINY
        )
        scale = _round_up(tl.where(far > 1e38, MOST4, scale))
        zero = -_round(tl.div_rn(low, scale) * parts)
        steps = _round(tl.div_rn(x, scale + tl.zeros_like(x)) + zero * (1.0 / parts))
        steps = tl.minimum(tl.maximum(steps, 0.0), 15.0).to(tl.uint8)
        first, second = tl.split(steps)  # [WIDE / SIZE, SIZE / 2] each
        tl.store(pool + vector * (D // 2) + pair, first | (second << 4), pair < D // 2)
        tl.store(pool_scale + vector * M + group, scale.to(tl.bfloat16), group < M)
        tl.store(pool_zero + vector * M + group, zero.to(tl.int16), group < M)


@triton.jit
def _turned(x, cos, sin, at, inside, D: tl.constexpr):
    """The vectors at x with dimension pairs (i, i + D / 2) turned, rounded as Ops.rotate rounds. at: indices from x."""
    own, other = (
        tl.load(x + at, inside, 0),
        tl.load(x + (at - at % D) + (at % D + D // 2) % D, inside, 0),
    )
    half = (
        (own.to(tl.float32) * tl.load(cos + at % D, inside, 0).to(tl.float32))
        .to(own.dtype)
        .to(tl.float32)
    )
    return (half + other.to(tl.float32) * tl.load(sin + at % D, inside, 0).to(tl.float32)).to(
        own.dtype
    )


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store(
    q,
    k,
    v,
    turned,
    cos,
    sin,
    slots,
    keys,
    k_scale,
    k_zero,
    values,
    v_scale,
    v_zero,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    S,
    block_stride,
    token_stride,
    head_stride,
    G: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    TURN: tl.constexpr,
    TINY: tl.constexpr,
    FAR: tl.constexpr,
    MOST8: tl.constexpr,
    MOST4: tl.constexpr,
):
    """A program for (token, key/value head): it stores key and value, and with TURN rotates the head's R queries."""
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = (
        2 * tl.arange(0, WIDE // 2)[:, None] + tl.arange(0, 2)[None, :]
    )  # pairs, as 4 bits are packed
    inside = at < D
    slot = tl.load(slots + t)
    if TURN:
        cos += t * D
        sin += t * D
        row, d = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDE)[None, :]
        inner = (row < R) & (d < D)
        head = g * R + row
        tl.store(
            turned + (t * G * R + head) * D + d,
            _turned(q + t * q_token + head * q_head, cos, sin, d, inner, D),
            inner,
        )
        x = _turned(k + t * k_token + g * k_head, cos, sin, at, inside, D)
    else:
        x = tl.load(k + t * k_token + g * k_head + at, inside, 0)
    if slot >= 0:
        vector = (slot // S).to(tl.int64) * block_stride + slot % S * token_stride + g * head_stride
        _put(
            x.to(tl.float32),
            at,
            inside,
            keys,
            k_scale,
            k_zero,
            vector,
            D,
            WIDE,
            K_BITS,
            min(GROUP, WIDE),
            TINY,
            FAR,
            MOST8,
            MOST4,
        )
        y = tl.load(v + t * v_token + g * v_head + at, inside, 0)
        _put(
            y.to(tl.float32),
            at,
            inside,
            values,
            v_scale,
            v_zero,
            vector,
            D,
            WIDE,
            V_BITS,
            WIDE,
            TINY,
            FAR,
            MOST8,
            MOST4,
        )


def store_vectors(
    k: Tensor,
    v: Tensor,
    keys: LayerStore,
    values: LayerStore,
    slots: Tensor,
    S: int,
    q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor | None:
    """Write k, v: [T, G, D] to their slots, int32[T], in blocks of S tokens.

    With q: [T, H, D] and cos, sin: [T, 1, D], q and k are rotated first -> q, rotated.
    """
    T, G, D = k.shape
    R = 1 if q is None else q.shape[1] // G
    turned = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    strides = [*((0, 0) if q is None else q.stride()[:2]), *k.stride()[:2], *v.stride()[:2]]
    rows, wide = triton.next_power_of_2(R), max(2, triton.next_power_of_2(D))
    _store[(T, G)](
        q,
        k,
        v,
        turned,
        cos,
        sin,
        slots,
        *keys[:3],
        *values[:3],
        *strides,
        S,
        *keys.strides,
        G,
        R,
        rows,
        D,
        wide,
        keys.bits,
        values.bits,
        q is not None,
        TINY,
        FAR,
        MOST8,
        MOST4,
        num_warps=1,
    )
    return turned


# ---- The demonstration: the kernel's resources for Llama 3.1 8B and 3.2 1B in bfloat16, with rotation ----------------


def store_table(archs: Sequence[int] = tuple(SHARED)) -> list[list[Any]]:
    """A row for each kernel: architecture, head size, bits of keys and values, registers, spills, shared memory."""
    found, limits = [], dict(TINY=TINY, FAR=FAR, MOST8=MOST8, MOST4=MOST4)
    for arch, D, (K, V) in product(archs, (128, 64), WIDTHS.values()):
        types = {
            "q k v turned cos sin": "*bf16",
            "slots": "*i32",
            "S block_stride": "i32:16",
            "token_stride": "i32",
        }
        types |= dict(zip(_store.arg_names[7:13], STORED[K] + STORED[V]))
        types |= dict.fromkeys(_store.arg_names[13:19], "i32:16")  # strides of q, k and v
        fixed = limits | dict(
            G=8, R=4, ROWS=4, D=D, WIDE=D, K_BITS=K, V_BITS=V, TURN=True, head_stride=1
        )
        found.append([arch, D, f"{K}/{V}", *compile_for(_store, types, fixed, arch, 1)[:3]])
    return found


if __name__ == "__main__":
    print_table("sm D K/V registers spills shared", store_table())
