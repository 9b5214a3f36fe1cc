"""The element-wise work between a layer's matrix products, in one launch each.

    fused_norm      x = x + delta,  y = x / √(mean x² + ε) · w      x, delta: [T, C] -> x, y
    fused_swiglu    silu(gate) · up                                 [T, 2 F] -> [T, F]

Rotation is part of storing (store.py), and a decoding layer of 16 bits is ten
launches at most: norm, qkv product, storing, attention, its merge, o product, norm, gate and up
product, swiglu, down product.

Invariant: kernels compute in float32 and round where kernels.Ops rounds, so 16-bit results differ
from its results only by the order of a sum. Not covered: gradients and float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


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
):
    """A program has a row."""
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
    normed = (wide * tl.rsqrt(mean_square + eps)).to(number.dtype)
    w = tl.load(weight + c, inside, 0)
    tl.store(y + row + c, normed.to(tl.float32) * w.to(tl.float32), inside)


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
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype)
    tl.store(y + t * F + f, silu.to(tl.float32) * up.to(tl.float32), inside)


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
    num_warps = max(1, min(16, size // 512))
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
            num_warps=num_warps,
        )
    return total, y


def fused_swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up. x: [T, 2 F], gate first -> [T, F]."""
    T = len(x)
    F = x.shape[1] // 2
    x = x.contiguous()
    y = torch.empty(T, F, device=x.device, dtype=x.dtype)
    if T:
        _swiglu[T, triton.cdiv(F, 1024)](x, y, F, 1024)
    return y
