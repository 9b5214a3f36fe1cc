"""Products with weights of 8 or 4 bits on a GPU, for a few rows: weights are dequantized in registers only.

    y[t, n] = Σ_k x[t, k] · (q[n, k] − zero) · scale = Σ_groups scale · (Σ_k x · q − zero · Σ_k x)

A step of a few rows takes as long as reading its weights takes. By an H200's data sheet, 4.8 TB/s and 1.98 GHz, each of
its 132 multiprocessors reads 37 weights of 4 bits a cycle and starts 128 operations: at most three for each weight.

  - Tensor cores make the products, even for one row of x: rows of W are the rows, tokens the columns, as few as 8.
  - One operation unpacks two weights of 4 bits: bfloat16 has 7 mantissa bits, so 0x4300 with q < 128 in its last bits
    *is* the number 128 + q. The 128 is added to the zero, which is subtracted anyway.
  - Scale and zero act on a group's sums. They are too small for asynchronous copies, which x and W use, so each
    iteration loads the scales and zeros of the next one.
  - Even and odd columns are two products, so the halves of a byte need not be put side by side.
  - float32 and float16 rows are split into three and two bfloat16 parts that add up to them exactly.

  - 1 to 8 rows of x: a program takes 16 or 32 rows of W; its warps take different columns, and it adds up their sums.
  - 9 to 64 rows: a program takes 128 rows of W, so that x is read less often. If these are too few programs for the
    GPU, several programs share the columns and write partial sums, and a second launch adds these up in order.
  - More rows: one kernel dequantizes W, SLAB weights at a time, and torch multiplies.

FP8 numbers become bfloat16 by one conversion, from compute capability 8.9 on. If x is rounded to 8 bits, too, torch's
own products on the tensor cores multiply both as they are (`tensor_core_product`).
Not covered: weights that `can_serve` excludes (NF4; 8 bits with groups or zeros): plain torch dequantizes these.
Kim et al. 2022 (arXiv:2211.10017): integers to floats by or-ing bits; Frantar et al. 2024, MARLIN (2408.11743).

    T rows (tokens of a step) · K in_features · N out_features · M groups, J bytes of a row · B groups at a time
"""

from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from gpu.crosscompile import SHARED, STORED, compile_for, print_table, processors
from quant import Kind, Quantized, int8, round_fp8

ROWS = 64  # the most rows of x for `_few` and `_many`
FEW = 8  # the most rows of x for `_few`
SLAB = 1 << 27  # weights that are dequantized at a time
PIECES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # bfloat16 parts of a number of x

# A register has bytes b0 b1 b2 b3. prmt puts two of them into the halves of another register; lop3 0xEA: (a & b) | c.
NIBBLES = tl.constexpr("""{ .reg .b32 t, u; prmt.b32 t, $4, 0, 0x4140; prmt.b32 u, $4, 0, 0x4342;
    lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $1, u, 0x000F000F, 0x43004300, 0xEA;
    shr.b32 t, t, 4; shr.b32 u, u, 4;
    lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $3, u, 0x000F000F, 0x43004300, 0xEA; }""")


@triton.jit
def _load(pointers, inside, EVEN: tl.constexpr):
    """Load numbers, 0 where not `inside`. EVEN: all are inside."""
    return tl.load(pointers) if EVEN else tl.load(pointers, inside, 0.0)


@triton.jit
def _nibbles(p, GPU: tl.constexpr):
    """Bytes -> 128 + the number in the lower half, 128 + that in the upper half: bfloat16 both."""
    if GPU:
        low, high = tl.inline_asm_elementwise(
            NIBBLES, "=r,=r,=r,=r,r", [p], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = ((p & 15) + 128).to(tl.float32), ((p >> 4) + 128).to(tl.float32)
    return low, high


@triton.jit
def _halves(pair, X: tl.constexpr):
    """Two neighbours of a row of x, read as one integer -> the first, the second."""
    half: tl.constexpr = tl.int32 if X == tl.float32 else tl.int16
    bits: tl.constexpr = 32 if X == tl.float32 else 16
    return pair.to(half).to(X, bitcast=True), (pair >> bits).to(half).to(X, bitcast=True)


@triton.jit
def _dot(a, v, total, PIECES: tl.constexpr, GPU: tl.constexpr):
    """total + a v, with a in bfloat16 and v split into PIECES bfloat16 parts that add up to it."""
    kind: tl.constexpr = (
        tl.bfloat16 if GPU else tl.float32
    )  # the interpreter multiplies no bfloat16
    piece = v.to(tl.bfloat16)
    total = tl.dot(a.to(kind), piece.to(kind), total)
    for _ in tl.static_range(PIECES - 1):
        v = v.to(tl.float32) - piece.to(tl.float32)
        piece = v.to(tl.bfloat16)
        total = tl.dot(a.to(kind), piece.to(kind), total)
    return total


@triton.jit(do_not_specialize=["T"])
def _few(
    x,
    w,
    scale,
    zero,
    bias,
    y,
    T,
    N,
    K,
    M,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
    B: tl.constexpr,
    BITS: tl.constexpr,
    X: tl.constexpr,
    PIECES: tl.constexpr,
    EVEN: tl.constexpr,
    GPU: tl.constexpr,
):
    """ROWS rows of W, all columns, B groups at a time: these rows' part of y = x Wᵀ + bias, [T, N]."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # rows of W; beyond N, the last row again
    t = tl.arange(0, COLS)
    row, token = tl.minimum(n, N - 1), tl.minimum(t, T - 1)
    J = K * BITS // 8  # bytes of a row of W; x has a number or a pair for each
    SIZE: tl.constexpr = GROUP * BITS // 8  # bytes of a group
    weights, rows = w + row[None, :, None].to(tl.int64) * J, x + token[None, None, :] * J
    total, nothing = tl.zeros((B, ROWS, COLS), tl.float32), tl.zeros((B, ROWS, COLS), tl.float32)
    m = tl.arange(0, B)[:, None]  # [B, 1]
    grid = row[None, :].to(tl.int64) * M + m  # [B, ROWS]
    if BITS == 4:
        s, z = tl.load(scale + grid, m < M, 0), tl.load(zero + grid, m < M, 0)
    for start in tl.range(0, M, B):
        m = start + tl.arange(0, B)[:, None]
        at = m * SIZE + tl.arange(0, SIZE)[None, :]  # [B, SIZE]
        p = _load(weights + at[:, None, :], (at < J)[:, None, :], EVEN)  # [B, ROWS, SIZE]
        v = _load(rows + at[:, :, None], (at < J)[:, :, None], EVEN)  # [B, SIZE, COLS]
        if BITS == 8:
            total = _dot(p.to(tl.bfloat16 if GPU else tl.float32), v, total, PIECES, GPU)
        else:
            low, high = _nibbles(p, GPU)
            even, odd = _halves(v, X)
            grid += B
            next_s, next_z = tl.load(scale + grid, m + B < M, 0), tl.load(zero + grid, m + B < M, 0)
            sums = tl.sum(even.to(tl.float32), 1) + tl.sum(odd.to(tl.float32), 1)  # [B, COLS]
            product = _dot(high, odd, _dot(low, even, nothing, PIECES, GPU), PIECES, GPU)
            product -= (z.to(tl.float32) + 128)[:, :, None] * sums[:, None, :]
            total, s, z = total + s.to(tl.float32)[:, :, None] * product, next_s, next_z
    out = tl.sum(total, 0)  # [ROWS, COLS]
    if BITS == 8:
        out *= tl.load(scale + row).to(tl.float32)[:, None]
    if bias is not None:
        out += tl.load(bias + row).to(tl.float32)[:, None]
    tl.store(y + t[None, :] * N + n[:, None], out, mask=(t < T)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["T"])
def _many(
    x,
    w,
    scale,
    zero,
    parts,
    T,
    N,
    K,
    M,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    X: tl.constexpr,
    PIECES: tl.constexpr,
    EVEN: tl.constexpr,
    GPU: tl.constexpr,
):
    """ROWS rows of W times a share of the groups -> partial sums, parts[share]: float32[T, N]. 8 bits: not scaled."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, share, shares = tl.arange(0, COLS), tl.program_id(1), tl.num_programs(1)
    row, token = tl.minimum(n, N - 1), tl.minimum(t, T - 1)
    J = K * BITS // 8
    SIZE: tl.constexpr = GROUP * BITS // 8
    weights, rows = w + row[:, None].to(tl.int64) * J, x + token[None, :] * J
    grid = row.to(tl.int64) * M
    total = tl.zeros((ROWS, COLS), tl.float32)
    for m in tl.range(M * share // shares, M * (share + 1) // shares):
        at = m * SIZE + tl.arange(0, SIZE)
        p = _load(weights + at[None, :], (at < J)[None, :], EVEN)  # [ROWS, SIZE]
        v = _load(rows + at[:, None], (at < J)[:, None], EVEN)  # [SIZE, COLS]
        if BITS == 8:
            total = _dot(p.to(tl.bfloat16 if GPU else tl.float32), v, total, PIECES, GPU)
        else:
            low, high = _nibbles(p, GPU)
            even, odd = _halves(v, X)
            s, z = (
                tl.load(scale + grid + m).to(tl.float32),
                tl.load(zero + grid + m).to(tl.float32) + 128,
            )  # [ROWS]
            sums = tl.sum(even.to(tl.float32), 0) + tl.sum(odd.to(tl.float32), 0)  # [COLS]
            product = _dot(
                high,
                odd,
                _dot(low, even, tl.zeros((ROWS, COLS), tl.float32), PIECES, GPU),
                PIECES,
                GPU,
            )
            total += s[:, None] * (product - z[:, None] * sums[None, :])
    at = (share * T + t)[None, :].to(tl.int64) * N + n[:, None]
    tl.store(parts + at, total, mask=(t < T)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["shares"])
def _add_up(parts, scale, bias, y, N, shares, SIZE: tl.constexpr):
    """y = Σ parts · scale + bias, parts in order. A program has a row and SIZE columns."""
    t, n = tl.program_id(0), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.float32)
    for share in range(shares):
        total += tl.load(
            parts + (share * tl.num_programs(0) + t).to(tl.int64) * N + n, mask=n < N, other=0
        )
    if scale is not None:
        total *= tl.load(scale + n, mask=n < N, other=0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
    tl.store(y + t.to(tl.int64) * N + n, total, mask=n < N)


@triton.jit
def _dequantize(
    w, scale, zero, out, K, M, GROUP: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr
):
    """As quant.dequantize. A program has B groups of a row of W."""
    n, m = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)[:, None]  # [B, 1]
    SIZE: tl.constexpr = GROUP * BITS // 8
    at, column = m * SIZE + tl.arange(0, SIZE)[None, :], m * GROUP + tl.arange(0, GROUP)[None, :]
    p = tl.load(w + n * (K * BITS // 8) + at, at < K * BITS // 8, 0.0)
    if BITS == 8:
        numbers = p.to(tl.float32) * tl.load(scale + n).to(tl.float32)
    else:
        numbers = tl.join(p & 15, p >> 4).reshape(B, GROUP).to(tl.float32)
        numbers -= tl.load(zero + n * M + m, m < M, 0).to(tl.float32)
        numbers *= tl.load(scale + n * M + m, m < M, 0).to(tl.float32)
    tl.store(out + n * K + column, numbers.to(out.dtype.element_ty), column < K)


class Cut(NamedTuple):
    """How a product is cut into programs."""

    rows: int  # rows of W of a program
    cols: int  # T, rounded up
    group: int  # columns that are multiplied together; 4 bits: that share a scale
    at_once: int  # groups at a time by `_few`; 0: `_many`, one after the other
    shares: int  # programs that share the columns
    num_warps: int
    num_stages: int


def can_multiply(K: int, bits: Kind, group: int, dtype: torch.dtype) -> bool:
    """Whether the kernels multiply x of this dtype by W: 8 bits with a scale a row, or 4 bits in such groups."""
    return K % 32 == 0 and dtype in PIECES and (bits != 4 or group in (32, 64, 128))


def can_serve(w: Quantized, dtype: torch.dtype) -> bool:
    """Whether this page multiplies x of this dtype by w."""
    N, K, grouped = len(w.values), w.columns, w.zero is not None or w.scale.shape[1] > 1
    if w.values.is_cuda and w.bits == "fp8":  # with a scale for each row of x, from sm_90 on
        if torch.cuda.get_device_capability(w.values.device) < (
            (9, 0) if w.inputs == 8 else (8, 9)
        ):
            return False
    if w.inputs == 8:  # float32 x by FP8 would become bfloat16
        return (
            N % 16 == K % 16 == 0 and dtype in PIECES and (w.bits == 8 or dtype == torch.bfloat16)
        )
    return can_multiply(K, w.bits, w.group, dtype) and (
        w.bits == 4 or w.bits != "nf4" and not grouped
    )


def tensor_core_product(x: Tensor, w: Quantized) -> Tensor:
    """quant.rounded_product for a W that `can_serve` admits: [T, K] -> [T, N]."""
    T, by = len(x), w.scale.float().T
    if w.bits == 8:  # cuBLAS requires more than 16 rows
        values, scale = int8(F.pad(x, (0, 0, 0, max(0, 17 - T))))
        return (torch._int_mm(values, w.values.T) * scale.float() * by)[:T].to(x.dtype)
    values, scale = round_fp8(x)
    return torch._scaled_mm(values, w.values.T, scale.float(), by.contiguous(), out_dtype=x.dtype)


def plan_product(T: int, N: int, K: int, bits: Kind, group: int, processors: int = 132) -> Cut:
    """The cut for this product."""
    if T <= FEW:
        group, columns = group if bits == 4 else 64, 1024 if bits == 4 and group > 32 else 512
        return Cut(32 if N > 48 * processors else 16, 8, group, columns // group, 1, 8, 4)
    cols, group = max(16, triton.next_power_of_2(T)), group if bits == 4 else 128
    tiles, M = triton.cdiv(N, 128), triton.cdiv(K, group)
    return Cut(
        128, cols, group, 0, max(1, min(2 * processors // tiles, M // 2)), 4 if cols < 64 else 8, 4
    )


def kernel_constants(cut: Cut, K: int, bits: int, dtype: torch.dtype) -> dict[str, Any]:
    """The constants that both kernels are compiled for."""
    return dict(
        ROWS=cut.rows,
        COLS=cut.cols,
        GROUP=cut.group,
        BITS=bits,
        X=getattr(tl, str(dtype).split(".")[1]),
        PIECES=PIECES[dtype],
        EVEN=K % (cut.group * max(1, cut.at_once)) == 0,
        GPU=not knobs.runtime.interpret,
    )


def as_numbers(
    values: Tensor, scale: Tensor, zero: Tensor | None, K: int, group: int, dtype: torch.dtype
) -> Tensor:
    """quant.dequantize for a W that `can_multiply` admits: [N, K] in `dtype`."""
    out, bits = (
        torch.empty(len(values), K, dtype=dtype, device=values.device),
        8 if zero is None else 4,
    )
    M = triton.cdiv(K, group := 128 if bits == 8 else group)
    _dequantize[len(values), triton.cdiv(M, 2048 // group)](
        values, scale, zero, out, K, M, group, 2048 // group, bits
    )
    return out


def weight_only_product(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    group: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x Wᵀ + bias for a W that `can_multiply` admits. x: [T, K]; values, scale, zero: quant.Quantized's -> [T, N]."""
    (T, K), (N, _), bits = x.shape, values.shape, 8 if zero is None else 4
    if T == 0:
        return x.new_empty(0, N)
    if T > ROWS:
        tile = max(1, SLAB // K // 16) * 16  # rows of W
        parts = zip(
            *(
                [None] * N if part is None else part.split(tile)
                for part in (values, scale, zero, bias)
            )
        )
        y = [F.linear(x, as_numbers(*some, K, group, x.dtype), own) for *some, own in parts]
        return torch.cat(y, -1) if len(y) > 1 else y[0]
    cut, x = plan_product(T, N, K, bits, group, processors(x.device)), x.contiguous()
    y = x.new_empty(T, N) if out is None else out
    pairs = torch.int64 if x.dtype == torch.float32 else torch.int32
    rows, sizes = x if bits == 8 else x.view(-1).view(pairs), (T, N, K, triton.cdiv(K, cut.group))
    fixed = kernel_constants(cut, K, bits, x.dtype) | dict(
        num_warps=cut.num_warps, num_stages=cut.num_stages
    )
    if cut.at_once:
        _few[triton.cdiv(N, cut.rows),](
            rows, values, scale, zero, bias, y, *sizes, B=cut.at_once, **fixed
        )
    else:
        parts = torch.empty(cut.shares, T, N, device=x.device)
        _many[triton.cdiv(N, cut.rows), cut.shares](
            rows, values, scale, zero, parts, *sizes, **fixed
        )
        _add_up[T, triton.cdiv(N, 512)](
            parts, scale if bits == 8 else None, bias, y, N, cut.shares, 512
        )
    return y


# ---- The demonstration: the kernels' resources, compiled without a GPU -----------------------------------------------

SHAPES = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate, up": (28672, 4096),
    "8B down": (4096, 14336),
    "8B head": (128256, 4096),
    "1B qkv": (3072, 2048),
    "1B o": (2048, 2048),
    "1B gate, up": (16384, 2048),
    "1B down": (2048, 8192),
    "1B head": (128256, 2048),
}


def compile_product(
    T: int, N: int, K: int, bits: Kind, group: int = 128, dtype: str = "bf16", arch: int = 90
) -> list[int]:
    """`Report`'s first four, programs of a multiprocessor, `mma` and `wgmma` of the kernel for this product."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    cut, pairs = plan_product(T, N, K, bits, group), "*i64" if dtype == "fp32" else "*i32"
    types = dict(zip(("w", "scale", "zero"), STORED[bits])) | {
        "parts": "*fp32",
        "T M": "i32",
        "N K": "i32:16",
    }
    types |= {"x": pairs if bits == 4 else f"*{dtype}", "bias": None, "y out": f"*{dtype}"}
    fixed = kernel_constants(cut, K, 4 if bits == 4 else 8, kind) | dict(
        B=cut.at_once or 2048 // cut.group
    )
    kernel, warps = (
        (_dequantize, 4) if T > ROWS else (_few if cut.at_once else _many, cut.num_warps)
    )
    report = compile_for(kernel, types, fixed, arch, warps, cut.num_stages)
    return [*report[:4], report.programs, report.count("mma.sync"), report.count("wgmma.mma")]


if __name__ == "__main__":
    print_table(
        "sm product bits rows registers spills shared ahead programs mma wgmma",
        (
            [arch, name, bits, T, *compile_product(T, *SHAPES[name], bits, 128, "bf16", arch)]
            for arch, name, bits, T in product(SHARED, ("8B o", "8B head"), (4, 8), (1, 64, 512))
        ),
    )
