"""The element-wise work between a layer's matrix products, in one launch each.

    fused_norm      x = x + delta,  y = x / √(mean x² + ε) · w      x, delta: [T, C] -> x, y
    fused_rotate    the pairs (i, i + D/2) of q and k turn          [T, heads, D], a view of the qkv product
    fused_swiglu    silu(gate) · up                                 [T, 2 F] -> [T, F]

With a cache, rotation is part of storing (store.py), and a decoding layer of 16 bits is ten launches at most: norm, qkv
product, storing, attention, its merge, o product, norm, gate and up product, swiglu, down product.

Invariant: kernels compute in float32 and round where kernels.Ops rounds, so 16-bit results differ from its results only
by the order of a sum. Not covered: gradients and float64."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.crosscompile import SHARED, compile_for, print_table


@triton.jit
def _add_norm(x, delta, weight, total, y, C, eps, SIZE: tl.constexpr):
    """A program has a row."""
    at = tl.arange(0, SIZE)
    kept, row = at < C, tl.program_id(0).to(tl.int64) * C
    here = tl.load(x + row + at, mask=kept, other=0)
    if delta is not None:
        here = (
            here.to(tl.float32) + tl.load(delta + row + at, mask=kept, other=0).to(tl.float32)
        ).to(here.dtype)
        tl.store(total + row + at, here, mask=kept)
    wide = here.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / C + eps)).to(here.dtype)
    tl.store(
        y + row + at,
        normed.to(tl.float32) * tl.load(weight + at, mask=kept, other=0).to(tl.float32),
        mask=kept,
    )


@triton.jit
def _turned(here, other, cos, sin, kept):
    near = here.to(tl.float32) * tl.load(cos, mask=kept, other=0).to(tl.float32)
    return near.to(here.dtype).to(tl.float32) + other.to(tl.float32) * tl.load(
        sin, mask=kept, other=0
    ).to(tl.float32)


@triton.jit
def _rotate(x, cos, sin, y, heads, row, head, D, HEADS: tl.constexpr, HALF: tl.constexpr):
    """A program has HEADS heads of a token, both halves of each. row, head: strides of x; y is contiguous."""
    t, h, i = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None],
        tl.arange(0, HALF)[None, :],
    )
    half = D // 2
    kept = (h < heads) & (i < half)
    source, target = x + t * row + h * head + i, y + (t * heads + h) * D + i  # [HEADS, HALF]
    one, two = tl.load(source, mask=kept, other=0), tl.load(source + half, mask=kept, other=0)
    turn = t * D + i
    tl.store(target, _turned(one, two, cos + turn, sin + turn, i < half), mask=kept)
    tl.store(
        target + half, _turned(two, one, cos + turn + half, sin + turn + half, i < half), mask=kept
    )


@triton.jit
def _swiglu(x, y, F, SIZE: tl.constexpr):
    """A program has SIZE numbers of a token."""
    t, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    kept = at < F
    gate, up = (
        tl.load(x + t * 2 * F + at, mask=kept, other=0),
        tl.load(x + t * 2 * F + F + at, mask=kept, other=0),
    )
    wide = gate.to(tl.float32)
    tl.store(
        y + t * F + at,
        (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32) * up.to(tl.float32),
        mask=kept,
    )


def norm_shape(C: int) -> tuple[int, int]:
    """SIZE and num_warps of `_add_norm`."""
    size = triton.next_power_of_2(C)
    return size, max(1, min(16, size // 512))


def fused_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + delta, and its RMSNorm: [T, C] each. x, delta: [T, C]; with delta None, x and its RMSNorm."""
    (T, C), x = x.shape, x.contiguous()
    y, total, (size, num_warps) = (
        torch.empty_like(x),
        x if delta is None else torch.empty_like(x),
        norm_shape(C),
    )
    if T:
        delta = None if delta is None else delta.contiguous()
        _add_norm[T,](x, delta, weight, total, y, C, eps, size, num_warps=num_warps)
    return total, y


def fused_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, D], D even and contiguous; cos, sin: [T, 1, D], the first half of sin negated -> [T, heads, D]."""
    T, heads, D = x.shape
    y = torch.empty(T, heads, D, device=x.device, dtype=x.dtype)
    if T:
        _rotate[T, triton.cdiv(heads, 8)](
            x,
            cos,
            sin,
            y,
            heads,
            x.stride(0),
            x.stride(1),
            D,
            8,
            triton.next_power_of_2(D // 2),
            num_warps=4,
        )
    return y


def fused_swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up. x: [T, 2 F], gate first -> [T, F]."""
    (T, F), x = (len(x), x.shape[1] // 2), x.contiguous()
    y = torch.empty(T, F, device=x.device, dtype=x.dtype)
    if T:
        _swiglu[T, triton.cdiv(F, 1024)](x, y, F, 1024, num_warps=4)
    return y


# ---- The demonstration: the kernels' resources, compiled without a GPU -----------------------------------------------


def compile_fused(C: int, F: int, D: int, arch: int = 90) -> list[tuple[str, int, int, int]]:
    """Registers, spills and shared memory of each kernel, for a model of this size in bfloat16."""
    size, num_warps = norm_shape(C)
    types = {
        "x delta weight total y cos sin": "*bf16",
        "C F D row head": "i32:16",
        "eps": "fp32",
        "heads": "i32",
    }
    fixed = {
        _add_norm: (dict(SIZE=size), num_warps),
        _swiglu: (dict(SIZE=1024), 4),
        _rotate: (dict(HEADS=8, HALF=triton.next_power_of_2(D // 2)), 4),
    }
    return [
        (kernel.__name__, *compile_for(kernel, types, constants, arch, warps)[:3])
        for kernel, (constants, warps) in fixed.items()
    ]


if __name__ == "__main__":
    sizes = {"8B": (4096, 14336, 128), "1B": (2048, 8192, 64)}
    found = (
        (name, arch, *kernel)
        for name in sizes
        for arch in SHARED
        for kernel in compile_fused(*sizes[name], arch)
    )
    print_table("model sm kernel registers spills shared", found)
