"""The element-wise work between a layer's matrix products, in one launch each.

    fused_norm      x = x + delta,  y = x / √(mean x² + ε) · w      x, delta: [T, C] -> x, y
    fused_swiglu    silu(gate) · up                                 [T, 2 F] -> [T, F]
    round_inputs    x on the grid of INT8 or FP8, a scale each row  [T, K] -> [T, K], [T, 1]
    rescale         sums of integers, with their scales             [T, N] -> [T, N]

SwiGLU of a few rows is part of the product (products.py), rotation of storing (store.py): a
decoding layer is eight launches: norm, qkv product, storing, attention, o product, norm, gate and
up product, down product. With inputs of 8 bits four more round them.

Invariant: kernels compute in float32 and round where kernels.Ops rounds, so 16-bit results differ
from its results only by the order of a sum. Not covered: gradients and float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.store import TINY, _bad, _not_infinite, _round, _round_up
from gpu.tuning import BLOCK, ROWS, begin_early, starts_early, warps_of_row
from quant import LARGEST, Kind

MOST = tl.constexpr(LARGEST)
SHIFT_FP8 = tl.constexpr(1.5 * 2.0**14)  # a float32 this large counts in E4M3's least, 2⁻⁹


@triton.jit
def _add_norm(
    x,
    delta,
    weight,
    total,
    y,
    C,
    eps,
    SIZE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program has a row."""
    begin_early(EARLY)
    c = tl.arange(0, SIZE)
    inside = c < C
    row = tl.program_id(0).to(tl.int64) * C
    number = tl.load(x + row + c, inside, 0)  # [SIZE]
    if delta is not None:
        added = tl.load(delta + row + c, inside, 0)
        number = (number.to(tl.float32) + added.to(tl.float32)).to(number.dtype)
        tl.store(total + row + c, number, inside)
    wide = number.to(tl.float32)
    mean_square = tl.sum(wide * wide, 0) / C
    normed = wide * tl.rsqrt(_not_infinite(mean_square) + eps)
    normed = normed.to(number.dtype).to(tl.float32)
    w = tl.load(weight + c, inside, 0)
    tl.store(y + row + c, normed * w.to(tl.float32), inside)


@triton.jit
def _swiglu(x, y, F, SIZE: tl.constexpr):
    """A program has SIZE numbers of a token."""
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = f < F
    row = x + t * 2 * F
    gate = tl.load(row + f, inside, 0)
    up = tl.load(row + F + f, inside, 0)
    wide = gate.to(tl.float32)
    silu = wide * tl.sigmoid(wide)
    silu = silu.to(gate.dtype).to(tl.float32)
    out = silu * up.to(tl.float32)
    tl.store(y + t * F + f, out, inside)


@triton.jit
def _input_scale(largest, KIND: tl.constexpr):
    """The scale of quant.symmetric, of rows whose largest |x| is given."""
    steps: tl.constexpr = 448.0 if KIND == "fp8" else 127.0
    scale = tl.div_rn(largest, steps)
    scale = tl.maximum(scale, TINY)
    scale = tl.minimum(scale, MOST / steps)
    return _round_up(scale)


@triton.jit
def _round_input(v, scale, KIND: tl.constexpr):
    """The integers or E4M3 numbers of v, as float32: `encode` of its quant.Format."""
    x = tl.div_rn(v.to(tl.float32), scale)
    if KIND == "fp8":
        bits = x.to(tl.int32, bitcast=True)  # 3 of 23 mantissa bits stay; halves to even
        last = bits >> 20 & 1
        bits += 0x7FFFF + last
        bits &= -0x100000
        normal = bits.to(tl.float32, bitcast=True)
        subnormal = (x + SHIFT_FP8) - SHIFT_FP8
        return tl.where(tl.abs(x) < 2.0**-6, subnormal, normal)
    return _round(x)


@triton.jit
def _round_rows(
    x,
    out,
    scales,
    K,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
):
    """A program has a row of x: its numbers on its grid, and the grid's scale."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, SIZE)
    index = t * K + k
    v = tl.load(x + index, k < K, 0).to(tl.float32)
    largest = tl.max(tl.abs(v), 0)
    scale = _input_scale(largest, KIND) + _bad(v)
    rounded = _round_input(v, scale + tl.zeros_like(v), KIND)
    rounded = rounded.to(out.dtype.element_ty)
    tl.store(out + index, rounded, k < K)
    tl.store(scales + t, scale)


@triton.jit
def _rescale(
    sums,
    x_scale,
    w_scale,
    bias,
    y,
    N,
    SIZE: tl.constexpr,
):
    """y = sums · the scales of x and W + bias. A program has a row and SIZE columns."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = n < N
    index = t * N + n
    out = tl.load(sums + index, inside, 0).to(tl.float32)
    out *= tl.load(x_scale + t)
    out *= tl.load(w_scale + n, inside, 0).to(tl.float32)
    if bias is not None:
        out += tl.load(bias + n, inside, 0).to(tl.float32)
    tl.store(y + index, out, inside)


def fused_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + delta, and its RMSNorm: [T, C] each. x, delta: [T, C]; with delta None, x and its
    RMSNorm.
    """
    T, C = x.shape
    x = x.contiguous()
    y = torch.empty_like(x)
    total = x
    if delta is not None:
        delta = delta.contiguous()
        total = torch.empty_like(x)
    size = triton.next_power_of_2(C)
    early = starts_early(x.device, T <= ROWS)
    if T:
        _add_norm[T,](
            x,
            delta,
            weight,
            total,
            y,
            C,
            eps,
            size,
            early,
            num_warps=warps_of_row(size),
            launch_pdl=early,
        )
    return total, y


def fused_swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up. x: [T, 2 F], gate first -> [T, F]."""
    T = len(x)
    F = x.shape[1] // 2
    x = x.contiguous()
    y = torch.empty(T, F, device=x.device, dtype=x.dtype)
    if T:
        _swiglu[T, triton.cdiv(F, BLOCK)](x, y, F, BLOCK)
    return y


def round_inputs(x: Tensor, bits: Kind, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`round` of this quant.Format: [T, K] in `dtype`, and the scales, float32[T, 1]."""
    T, K = x.shape
    x = x.contiguous()
    out = torch.empty(T, K, dtype=dtype, device=x.device)
    scale = torch.empty(T, 1, dtype=torch.float32, device=x.device)
    size = triton.next_power_of_2(K)
    _round_rows[T,](x, out, scale, K, bits, size, num_warps=warps_of_row(size))
    return out, scale


def rescale(
    sums: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Sums of integers, int32[T, N] · the scales of x and W + bias -> [T, N] in `dtype`."""
    T, N = sums.shape
    y = torch.empty(T, N, dtype=dtype, device=sums.device)
    grid = T, triton.cdiv(N, BLOCK)
    _rescale[grid](sums, x_scale, w_scale, bias, y, N, BLOCK)
    return y
