"""Storing new keys and values on a GPU: norm, rotation and quantization in the kernel that writes.

The result of the qkv product is read once: queries and keys are normed, if the model has norms of
heads, and rotated by their positions; keys and values are quantized to the cache's bits (quant.py)
and written to their slots.

    slot = block · S + offset
    vector = block · block_stride + offset · token_stride + head · head_stride

A row of the contiguous cache is a block of max_len tokens. A negative slot (a captured graph's
padding) stores nothing. Attention's counters, one for each token and key/value head, become 0.
Invariant: integers, scales and zeros are those of quant.py, to the bit. So divisions are exact
ones, and halves round to even: to add and subtract 2²³ · 1.5 rounds as the machine does.
For a few tokens, further programs ask for the weights of the product after attention. These come to
the L2 cache while attention, whose few programs wait for one read after the other, leaves memory
idle.
Costs: a launch a layer.

    T tokens · H, G heads · R = H / G · D head size · S tokens of a block
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

import gpu.tuning as tuning
from gpu.flash import LayerStore
from gpu.tuning import ASKED
from gpu.unpack import GROUP, PARTS
from quant import LARGEST, LARGEST_ZERO, SMALLEST_SCALE

if TYPE_CHECKING:
    from kernels import HeadNorm
    from model import Rope

TINY = tl.constexpr(SMALLEST_SCALE)
FAR = tl.constexpr(LARGEST_ZERO)
MOST8 = tl.constexpr(LARGEST / 127)  # the largest scales, as in quant.stored_scale
MOST4 = tl.constexpr(LARGEST / 7)
FETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;")
SHIFT = tl.constexpr(12582912.0)  # 1.5 · 2^23: a float32 this large has no fraction


@triton.jit
def _round(x):
    """To the nearest whole number, halves to the even one; |x| < 2^22."""
    return (x + SHIFT) - SHIFT


@triton.jit
def _round_up(x):
    """The next number above x ≥ 0 that a bfloat16 holds, as a float32."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0xFFFF) & -0x10000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _not_infinite(mean_square):
    """∞ becomes NaN: rsqrt(∞) is 0, which would hide it (kernels.rms_norm)."""
    return tl.where(mean_square < float("inf"), mean_square, float("nan"))


@triton.jit
def _bad(x):
    """0, or NaN if a number of x is not finite: `maximum` and `minimum` drop a NaN, and a scale of
    NaN must tell it (quant.stored_scale)."""
    return tl.sum(0 * x)


@triton.jit
def _put(
    x,
    d,
    inside,
    pool,
    pool_scale,
    pool_zero,
    vector,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Quantize a vector x: [WIDE / 2, 2], valid where `inside`, and write it. SIZE: numbers of a
    group in 4 bits.
    """
    if BITS == 16:
        tl.store(pool + vector * D + d, x.to(pool.dtype.element_ty), inside)
    if BITS == 8:
        largest = tl.max(tl.abs(x))
        scale = tl.maximum(tl.div_rn(largest, 127.0), TINY)
        scale = _round_up(tl.minimum(scale, MOST8)) + _bad(x)
        steps = _round(tl.div_rn(x, scale + tl.zeros_like(x)))
        tl.store(pool + vector * D + d, steps.to(tl.int8), inside)
        tl.store(pool_scale + vector, scale.to(tl.bfloat16))
    if BITS == 4:
        GROUPS: tl.constexpr = WIDE // SIZE
        M: tl.constexpr = (D + SIZE - 1) // SIZE
        parts: tl.constexpr = 1 if M == 1 else PARTS  # zeros count 1 / parts of a grid step
        group = tl.arange(0, GROUPS)[:, None, None]
        byte = tl.arange(0, WIDE // 2).reshape(GROUPS, SIZE // 2)
        x = x.reshape(GROUPS, SIZE // 2, 2)
        inside = inside.reshape(GROUPS, SIZE // 2, 2)
        inside |= group >= M  # beyond all groups: 0
        low = tl.where(inside, x, float("inf"))
        low = tl.min(tl.min(low, 2), 1)[:, None, None]  # [GROUPS, 1, 1]
        high = tl.where(inside, x, float("-inf"))
        high = tl.max(tl.max(high, 2), 1)[:, None, None]
        far = tl.maximum(high, -low)
        step = tl.div_rn(high, 15.0) - tl.div_rn(low, 15.0)
        scale = tl.maximum(tl.maximum(step, tl.div_rn(far, FAR)), TINY)
        scale = _round_up(tl.where(far > 1e38, MOST4, scale)) + _bad(x)
        zero = -_round(tl.div_rn(low, scale) * parts)
        quotient = tl.div_rn(x, scale + tl.zeros_like(x))
        steps = _round(quotient + zero * (1.0 / parts))
        steps = tl.minimum(tl.maximum(steps, 0.0), 15.0).to(tl.uint8)
        first, second = tl.split(steps)  # [GROUPS, SIZE / 2] each
        tl.store(pool + vector * (D // 2) + byte, first | (second << 4), byte < D // 2)
        tl.store(pool_scale + vector * M + group, scale.to(tl.bfloat16), group < M)
        tl.store(pool_zero + vector * M + group, zero.to(tl.int16), group < M)


@triton.jit
def _normed(x, weight, by):
    """x · by · weight, rounded as kernels.rms_norm rounds."""
    normed = (x.to(tl.float32) * by).to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _turned(x, cos, sin, norm, eps, i, inside, D: tl.constexpr, ONE: tl.constexpr):
    """The vectors at x, normed, with dimension pairs (d, d + D / 2) turned, rounded as
    kernels.rotate rounds. i: indices from x. norm: weights, or None. ONE: the rows of i are parts
    of one vector; else a vector each.
    """
    d = i % D
    e = (d + D // 2) % D
    number = tl.load(x + i, inside, 0)
    other = tl.load(x + (i - d) + e, inside, 0)
    if norm is not None:
        wide = number.to(tl.float32)
        square = tl.sum(wide * wide, 1)[:, None]
        if ONE:
            square = tl.sum(square, 0)[None, :]
        by = tl.rsqrt(_not_infinite(square / D) + eps)
        number = _normed(number, tl.load(norm + d, inside, 0), by)
        other = _normed(other, tl.load(norm + e, inside, 0), by)
    c = tl.load(cos + d % (D // 2), inside, 0)
    near = number.to(tl.float32) * c.to(tl.float32)
    near = near.to(number.dtype).to(tl.float32)
    s = tl.load(sin + d % (D // 2), inside, 0)
    far = other.to(tl.float32) * s.to(tl.float32)
    far = far.to(number.dtype).to(tl.float32)
    return tl.where(d < D // 2, near - far, near + far).to(number.dtype)


@triton.jit
def _fetch(weights, program):
    """Each of 32 threads asks for some bytes of the weights, and does not wait for them."""
    thread = program * 32 + tl.arange(0, 32)
    address = (weights.to(tl.int64) + thread.to(tl.int64) * ASKED).to(tl.uint64)
    size = tl.full((32,), ASKED, tl.int32)
    tl.inline_asm_elementwise(FETCH, "=r,l,r", [address, size], tl.int32, False, 1)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _store(
    q,
    k,
    v,
    turned,
    cos,
    sin,
    norm,
    eps,
    arrivals,
    ahead,
    slot_mapping,
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
    EARLY: tl.constexpr,
):
    """A program for (token, key/value head): it stores key and value, and with cos and sin
    rotates the head's R queries. norm: [2 D], of q, then of k, or None. Programs from g = G on
    fetch weights, `ahead`.
    """
    tuning.begin_early(EARLY)
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    if ahead is not None:
        if g >= G:
            _fetch(ahead, (g - G) * tl.num_programs(0) + tl.program_id(0))
            return
    pair = tl.arange(0, WIDE // 2)[:, None]
    i = 2 * pair + tl.arange(0, 2)[None, :]  # [WIDE / 2, 2], as 4 bits are packed
    inside = i < D
    slot = tl.load(slot_mapping + t)
    tl.store(arrivals + t * G + g, 0)
    key = k + t * k_token + g * k_head
    if cos is not None:
        cos += t * (D // 2)
        sin += t * (D // 2)
        row = tl.arange(0, ROWS)[:, None]
        d = tl.arange(0, WIDE)[None, :]
        mask = (row < R) & (d < D)
        head = g * R + row
        query = q + t * q_token + head * q_head
        queries = _turned(query, cos, sin, norm, eps, d, mask, D, False)
        tl.store(turned + (t * G * R + head) * D + d, queries, mask)
        if norm is not None:
            norm += D
        x = _turned(key, cos, sin, norm, eps, i, inside, D, True)
    else:
        x = tl.load(key + i, inside, 0)
    if slot >= 0:
        block = (slot // S).to(tl.int64)
        vector = block * block_stride + slot % S * token_stride + g * head_stride
        _put(
            x.to(tl.float32),
            i,
            inside,
            keys,
            k_scale,
            k_zero,
            vector,
            D,
            WIDE,
            K_BITS,
            min(GROUP, WIDE),
        )
        y = tl.load(v + t * v_token + g * v_head + i, inside, 0)
        _put(
            y.to(tl.float32),
            i,
            inside,
            values,
            v_scale,
            v_zero,
            vector,
            D,
            WIDE,
            V_BITS,
            WIDE,
        )


def store_vectors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: LayerStore,
    values: LayerStore,
    slot_mapping: Tensor,
    S: int,
    arrivals: Tensor,
    rope: "Rope | None",
    norm: "HeadNorm | None" = None,
    ahead: Tensor | None = None,
) -> Tensor:
    """Write k, v: [T, G, D] to their slots, int32[T], in blocks of S tokens -> q: [T, H, D].

    With rope q and k are normed and rotated first. arrivals: int32[T, G], attention's counters.
    ahead: the weights that are read after attention.
    """
    T, G, D = k.shape
    R = q.shape[1] // G
    turned = q
    cos, sin = rope or (None, None)
    norm_weight, eps = norm or (None, 0.0)
    if rope is not None:
        turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    fetchers = 0  # of each token
    if ahead is not None:
        fetchers = min(ahead.nbytes, tuning.FETCHED) // (32 * ASKED.value * T)
    early = tuning.starts_early(k.device, T <= tuning.FEW)
    _store[T, G + fetchers](
        q,
        k,
        v,
        turned,
        cos,
        sin,
        norm_weight,
        eps,
        arrivals,
        ahead,
        slot_mapping,
        *keys[:3],
        *values[:3],
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        S,
        *keys.strides,
        G,
        R,
        triton.next_power_of_2(R),
        D,
        max(2, triton.next_power_of_2(D)),
        keys.bits,
        values.bits,
        early,
        num_warps=1,
        launch_pdl=early,
    )
    return turned
