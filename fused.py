"""What lies between a layer's matrix products, in one launch each.

A GPU needs longer to start a kernel, even of a graph that is replayed, than to read a row of a few thousand numbers.
So what a decoding step does to a row between two products costs launches, not arithmetic; written as single operations,
a norm is six of them. Three kernels do it:

    add_norm    x = x + delta,  y = x / √(mean x² + ε) · w          [T, C], [T, C] -> both
    rotate      the pairs (i, i + D/2) of q and k turn              [T, heads, D], out of the product that holds v too
    swiglu      silu(gate) · up                                     [T, 2 F] -> [T, F]

What a product adds to the residual stream waits until the next norm reads the stream: addition and norm are one pass over it. With a cache,
rotation is part of the store (store.py). With the library's products a decoding layer is then ten launches at most:

    1 add_norm   2 qkv_proj   3 q and k turned, k and v stored   4 attention   5 its merge, where a long text was split   6 o_proj
    7 add_norm   8 gate_up_proj   9 swiglu   10 down_proj

Each is computed in float32 and rounded where the plain operations of model.py round, so that 16-bit results are theirs up to the order of
the sum. Not covered: gradients, float64, what runs on a CPU: those take the plain operations, which are the specification.

    T tokens of a step · C hidden_size · F intermediate_size · D head_dim
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _add_norm(x, delta, weight, total, y, C, eps, SIZE: tl.constexpr):
    """A row a program."""
    at = tl.arange(0, SIZE)
    kept, row = at < C, tl.program_id(0).to(tl.int64) * C
    here = tl.load(x + row + at, mask=kept, other=0)
    if delta is not None:
        here = (here.to(tl.float32) + tl.load(delta + row + at, mask=kept, other=0).to(tl.float32)).to(here.dtype)
        tl.store(total + row + at, here, mask=kept)
    wide = here.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / C + eps)).to(here.dtype)
    tl.store(y + row + at, normed.to(tl.float32) * tl.load(weight + at, mask=kept, other=0).to(tl.float32), mask=kept)


@triton.jit
def _turned(here, other, cos, sin, kept):
    near = here.to(tl.float32) * tl.load(cos, mask=kept, other=0).to(tl.float32)
    return near.to(here.dtype).to(tl.float32) + other.to(tl.float32) * tl.load(sin, mask=kept, other=0).to(tl.float32)


@triton.jit
def _rotate(x, cos, sin, y, heads, row, head, D, HEADS: tl.constexpr, HALF: tl.constexpr):
    """HEADS heads of a token a program, both halves of each. x has `row` numbers between tokens and `head` between heads, y none."""
    t, h, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    half = D // 2
    kept = (h < heads) & (i < half)
    source, target = x + t * row + h * head + i, y + (t * heads + h) * D + i                     # [HEADS, HALF]
    one, two = tl.load(source, mask=kept, other=0), tl.load(source + half, mask=kept, other=0)
    turn = t * D + i
    tl.store(target, _turned(one, two, cos + turn, sin + turn, i < half), mask=kept)
    tl.store(target + half, _turned(two, one, cos + turn + half, sin + turn + half, i < half), mask=kept)


@triton.jit
def _swiglu(x, y, F, SIZE: tl.constexpr):
    """SIZE numbers of a token a program."""
    t, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    kept = at < F
    gate, up = tl.load(x + t * 2 * F + at, mask=kept, other=0), tl.load(x + t * 2 * F + F + at, mask=kept, other=0)
    wide = gate.to(tl.float32)
    tl.store(y + t * F + at, (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32) * up.to(tl.float32), mask=kept)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and its RMSNorm. x, delta: [T, C] (None: nothing is added, and x returned)."""
    (T, C), x = x.shape, x.contiguous()
    y, total, SIZE = torch.empty_like(x), x if delta is None else torch.empty_like(x), triton.next_power_of_2(C)
    if T:
        _add_norm[T,](x, None if delta is None else delta.contiguous(), weight, total, y, C, eps, SIZE, num_warps=max(1, min(16, SIZE // 512)))
    return total, y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """model.rotate. x: [T, heads, D], heads whole and D even; cos, sin: [T, 1, D], the first half of sin negated."""
    T, heads, D = x.shape
    y = torch.empty(T, heads, D, device=x.device, dtype=x.dtype)
    if T:
        _rotate[T, triton.cdiv(heads, 8)](x, cos, sin, y, heads, x.stride(0), x.stride(1), D, 8, triton.next_power_of_2(D // 2), num_warps=4)
    return y


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up. x: [T, 2 F], gate first, contiguous -> [T, F]."""
    T, F = len(x), x.shape[1] // 2
    y = torch.empty(T, F, device=x.device, dtype=x.dtype)
    if T:
        _swiglu[T, triton.cdiv(F, 1024)](x, y, F, 1024, num_warps=4)
    return y


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: what the compiler makes of them.

def compiled(C: int, F: int, D: int, arch: int = 90, dtype: str = "bf16") -> list[tuple[str, int, int, int]]:
    """Registers, spills and shared memory of each kernel, for a model of this size."""
    from crosscompile import compile_for
    size, kind = triton.next_power_of_2(C), f"*{dtype}"
    tensors = dict.fromkeys(("x", "delta", "weight", "total", "y", "cos", "sin"), kind)
    types = tensors | dict(C="i32:16", F="i32:16", D="i32:16", eps="fp32", heads="i32", row="i32:16", head="i32:16")
    fixed = {_add_norm: (dict(SIZE=size), max(1, min(16, size // 512))), _rotate: (dict(HEADS=8, HALF=triton.next_power_of_2(D // 2)), 4),
             _swiglu: (dict(SIZE=1024), 4)}
    return [(kernel.__name__, *compile_for(kernel, {name: types[name] for name in kernel.arg_names if name not in constants}, constants, arch, num_warps)[:3])
            for kernel, (constants, num_warps) in fixed.items()]


def main() -> None:
    print(f"{'model':6}{'arch':>7}  {'kernel':10}{'registers':>10}{'spills':>8}{'shared':>8}")
    for name, sizes in {"8B": (4096, 14336, 128), "1B": (2048, 8192, 64)}.items():
        for arch in (90, 80):
            for kernel, registers, spills, shared in compiled(*sizes, arch):
                print(f"{name:6}  sm_{arch}  {kernel[1:]:10}{registers:10}{spills:8}{shared:8}")


if __name__ == "__main__":
    main()
