"""Products with weights of 8 or 4 bits on a GPU, for a few rows: weights are dequantized in
registers only.

    y[t, n] = Σ_k x[t, k] · (q[n, k] − zero) · scale = Σ_groups scale · (Σ_k x · q − zero · Σ_k x)

A step of a few rows takes as long as reading its weights takes. By an H200's data sheet, 4.8 TB/s
and 1.98 GHz, each of its 132 multiprocessors reads 37 weights of 4 bits a cycle and starts 128
operations: at most three for each weight.

  - Tensor cores make the products, even for one row of x: rows of W are the rows, tokens the
    columns, as few as 8.
  - One operation unpacks two weights of 4 bits: bfloat16 has 7 mantissa bits, so 0x4300 with q <
    128 in its last bits *is* the number 128 + q. The 128 is added to the zero, which is subtracted
    anyway.
  - Scale and zero act on a group's sums. They are too small for asynchronous copies, which x and W
    use, so each iteration loads the scales and zeros of the next one.
  - Even and odd columns are two products, so the halves of a byte need not be put side by side.
  - float32 and float16 rows are split into three and two bfloat16 parts that add up to them
    exactly.

  - 1 to 8 rows of x: a program takes 16 or 32 rows of W; its warps take different columns, and it
    adds up their sums.
  - 9 to 64 rows: a program takes 128 rows of W, so that x is read less often. If these are too few
    programs for the GPU, several programs share the columns and write partial sums, and a second
    launch adds these up in order.
  - More rows: one kernel dequantizes W, SLAB weights at a time, and torch multiplies.

FP8 numbers become bfloat16 by one conversion, from compute capability 8.9 on. If x is rounded to 8
bits, too, torch's own products on the tensor cores multiply both as they are
(`tensor_core_product`).
Not covered: weights that `can_serve` excludes (NF4; 8 bits with groups or zeros): plain torch
dequantizes these.
Kim et al. 2022 (arXiv:2211.10017): integers to floats by or-ing bits; Frantar et al. 2024, MARLIN
(2408.11743).

    T rows (tokens of a step) · K in_features · N out_features
    M groups, J bytes of a row of W · B groups at a time
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from gpu import tuning
from quant import Kind, Quantized, int8, round_fp8

PIECES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # bfloat16 parts of a number of x

# A register has bytes b0 b1 b2 b3. prmt puts two of them into the halves of another register;
# lop3 0xEA is (a & b) | c.
NIBBLES = tl.constexpr("""{ .reg .b32 t, u; prmt.b32 t, $4, 0, 0x4140; prmt.b32 u, $4, 0, 0x4342;
    lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $1, u, 0x000F000F, 0x43004300, 0xEA;
    shr.b32 t, t, 4; shr.b32 u, u, 4;
    lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $3, u, 0x000F000F, 0x43004300, 0xEA;
    }""")


GPU = tl.constexpr(not knobs.runtime.interpret)  # else the interpreter: it has no bfloat16


@triton.jit
def _load(pointers, inside, EVEN: tl.constexpr):
    """Load numbers, 0 where not `inside`. EVEN: all are inside."""
    return tl.load(pointers) if EVEN else tl.load(pointers, inside, 0.0)


@triton.jit
def _nibbles(p):
    """Bytes -> 128 + the number in the lower half, 128 + that in the upper half: bfloat16 both."""
    if GPU:
        low, high = tl.inline_asm_elementwise(
            NIBBLES, "=r,=r,=r,=r,r", [p], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low = ((p & 15) + 128).to(tl.float32)
        high = ((p >> 4) + 128).to(tl.float32)
    return low, high


@triton.jit
def _halves(pair, X: tl.constexpr):
    """Two neighbours of a row of x, read as one integer -> the first, the second."""
    half: tl.constexpr = tl.int32 if X == tl.float32 else tl.int16
    bits: tl.constexpr = 32 if X == tl.float32 else 16
    first = pair.to(half)
    second = (pair >> bits).to(half)
    return first.to(X, bitcast=True), second.to(X, bitcast=True)


@triton.jit
def _dot(a, v, total, PIECES: tl.constexpr):
    """total + a v, with a in bfloat16 and v split into PIECES bfloat16 parts that add up to it."""
    kind: tl.constexpr = tl.bfloat16 if GPU else tl.float32
    a = a.to(kind)
    piece = v.to(tl.bfloat16)
    total = tl.dot(a, piece.to(kind), total)
    for _ in tl.static_range(PIECES - 1):
        v = v.to(tl.float32) - piece.to(tl.float32)
        piece = v.to(tl.bfloat16)
        total = tl.dot(a, piece.to(kind), total)
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
):
    """ROWS rows of W, all columns, B groups at a time: their part of y = x Wᵀ + bias, [T, N]."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # rows of W; beyond N, the last row again
    t = tl.arange(0, COLS)
    row = tl.minimum(n, N - 1)
    token = tl.minimum(t, T - 1)
    J = K * BITS // 8  # bytes of a row of W; x has a number or a pair for each
    SIZE: tl.constexpr = GROUP * BITS // 8  # bytes of a group
    weights = w + row[None, :, None].to(tl.int64) * J
    inputs = x + token[None, None, :] * J
    total = tl.zeros((B, ROWS, COLS), tl.float32)
    nothing = tl.zeros((B, ROWS, COLS), tl.float32)
    m = tl.arange(0, B)[:, None]  # [B, 1]
    grid = row[None, :].to(tl.int64) * M + m  # [B, ROWS]
    if BITS == 4:
        s = tl.load(scale + grid, m < M, 0)
        z = tl.load(zero + grid, m < M, 0)
    for start in tl.range(0, M, B):
        m = start + tl.arange(0, B)[:, None]
        j = m * SIZE + tl.arange(0, SIZE)[None, :]  # [B, SIZE]
        inside = j < J
        p = _load(weights + j[:, None, :], inside[:, None, :], EVEN)  # [B, ROWS, SIZE]
        v = _load(inputs + j[:, :, None], inside[:, :, None], EVEN)  # [B, SIZE, COLS]
        if BITS == 8:
            number = p.to(tl.bfloat16 if GPU else tl.float32)
            total = _dot(number, v, total, PIECES)
        else:
            low, high = _nibbles(p)
            even, odd = _halves(v, X)
            grid += B
            next_s = tl.load(scale + grid, m + B < M, 0)
            next_z = tl.load(zero + grid, m + B < M, 0)
            even_sums = tl.sum(even.to(tl.float32), 1)  # [B, COLS]
            odd_sums = tl.sum(odd.to(tl.float32), 1)
            sums = even_sums + odd_sums
            product = _dot(low, even, nothing, PIECES)
            product = _dot(high, odd, product, PIECES)
            offset = z.to(tl.float32) + 128
            product -= offset[:, :, None] * sums[:, None, :]
            total += s.to(tl.float32)[:, :, None] * product
            s = next_s
            z = next_z
    out = tl.sum(total, 0)  # [ROWS, COLS]
    if BITS == 8:
        out *= tl.load(scale + row).to(tl.float32)[:, None]
    if bias is not None:
        out += tl.load(bias + row).to(tl.float32)[:, None]
    target = y + t[None, :] * N + n[:, None]
    tl.store(target, out, mask=(t < T)[None, :] & (n < N)[:, None])


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
):
    """ROWS rows of W times a share of the groups -> partial sums, parts[share]: float32[T, N]. 8
    bits: not scaled.
    """
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.arange(0, COLS)
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    row = tl.minimum(n, N - 1)
    token = tl.minimum(t, T - 1)
    J = K * BITS // 8
    SIZE: tl.constexpr = GROUP * BITS // 8
    weights = w + row[:, None].to(tl.int64) * J
    inputs = x + token[None, :] * J
    grid = row.to(tl.int64) * M
    total = tl.zeros((ROWS, COLS), tl.float32)
    for m in tl.range(M * share // shares, M * (share + 1) // shares):
        j = m * SIZE + tl.arange(0, SIZE)
        inside = j < J
        p = _load(weights + j[None, :], inside[None, :], EVEN)  # [ROWS, SIZE]
        v = _load(inputs + j[:, None], inside[:, None], EVEN)  # [SIZE, COLS]
        if BITS == 8:
            number = p.to(tl.bfloat16 if GPU else tl.float32)
            total = _dot(number, v, total, PIECES)
        else:
            low, high = _nibbles(p)
            even, odd = _halves(v, X)
            s = tl.load(scale + grid + m).to(tl.float32)  # [ROWS]
            offset = tl.load(zero + grid + m).to(tl.float32) + 128
            even_sums = tl.sum(even.to(tl.float32), 0)  # [COLS]
            odd_sums = tl.sum(odd.to(tl.float32), 0)
            sums = even_sums + odd_sums
            product = _dot(low, even, tl.zeros((ROWS, COLS), tl.float32), PIECES)
            product = _dot(high, odd, product, PIECES)
            total += s[:, None] * (product - offset[:, None] * sums[None, :])
    part = share * T + t  # [COLS]
    target = parts + part[None, :].to(tl.int64) * N + n[:, None]
    tl.store(target, total, mask=(t < T)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["shares"])
def _add_up(
    parts,
    scale,
    bias,
    y,
    N,
    shares,
    SIZE: tl.constexpr,
):
    """y = Σ parts · scale + bias, parts in order. A program has a row and SIZE columns."""
    t = tl.program_id(0)
    n = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = n < N
    T = tl.num_programs(0)
    total = tl.zeros((SIZE,), tl.float32)
    for share in range(shares):
        start = (share * T + t).to(tl.int64) * N
        total += tl.load(parts + start + n, inside, 0)
    if scale is not None:
        total *= tl.load(scale + n, inside, 0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + n, inside, 0).to(tl.float32)
    tl.store(y + t.to(tl.int64) * N + n, total, inside)


@triton.jit
def _dequantize(
    w,
    scale,
    zero,
    out,
    K,
    M,
    GROUP: tl.constexpr,
    B: tl.constexpr,
    BITS: tl.constexpr,
):
    """As quant.dequantize. A program has B groups of a row of W."""
    n = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * B + tl.arange(0, B)[:, None]  # [B, 1]
    SIZE: tl.constexpr = GROUP * BITS // 8
    J = K * BITS // 8
    j = m * SIZE + tl.arange(0, SIZE)[None, :]  # [B, SIZE]
    k = m * GROUP + tl.arange(0, GROUP)[None, :]  # [B, GROUP]
    p = tl.load(w + n * J + j, j < J, 0.0)
    if BITS == 8:
        s = tl.load(scale + n).to(tl.float32)
        numbers = p.to(tl.float32) * s
    else:
        z = tl.load(zero + n * M + m, m < M, 0).to(tl.float32)
        s = tl.load(scale + n * M + m, m < M, 0).to(tl.float32)
        nibbles = tl.join(p & 15, p >> 4)
        numbers = nibbles.reshape(B, GROUP).to(tl.float32)
        numbers = (numbers - z) * s
    tl.store(out + n * K + k, numbers.to(out.dtype.element_ty), k < K)


def can_multiply(K: int, bits: Kind, group: int, dtype: torch.dtype) -> bool:
    """Whether the kernels multiply x of this dtype by W: 8 bits with a scale a row, or 4 bits in
    such groups.
    """
    return K % 32 == 0 and dtype in PIECES and (bits != 4 or group in (32, 64, 128))


def can_serve(w: Quantized, dtype: torch.dtype) -> bool:
    """Whether this page multiplies x of this dtype by w."""
    K = w.columns
    needed = 90 if w.input_bits == 8 else 89  # with a scale for each row of x: sm_90
    if w.bits == "fp8" and tuning.capability(w.values.device) < needed:
        return False
    if w.input_bits == 8:
        exact = w.bits == 8 or dtype == torch.bfloat16  # float32 x by FP8 would become bfloat16
        return len(w.values) % 16 == 0 and K % 16 == 0 and dtype in PIECES and exact
    grouped = w.bits != 4 and (w.zero is not None or w.scale.shape[1] > 1)
    return not grouped and w.bits != "nf4" and can_multiply(K, w.bits, w.group, dtype)


def tensor_core_product(x: Tensor, w: Quantized) -> Tensor:
    """quant.rounded_product for a W that `can_serve` admits: [T, K] -> [T, N]."""
    T = len(x)
    w_scale = w.scale.float().T
    if w.bits == 8:
        padding = max(0, 17 - T)  # cuBLAS requires more than 16 rows
        values, scale = int8(F.pad(x, (0, 0, 0, padding)))
        sums = torch._int_mm(values, w.values.T)
        return (sums * scale.float() * w_scale)[:T].to(x.dtype)
    values, scale = round_fp8(x)
    w_scale = w_scale.contiguous()
    return torch._scaled_mm(values, w.values.T, scale.float(), w_scale, out_dtype=x.dtype)


def dequantize_rows(
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    K: int,
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    """quant.dequantize for a W that `can_multiply` admits: [N, K] in `dtype`."""
    N = len(values)
    bits = 8 if zero is None else 4
    if bits == 8:
        group = 128
    M = triton.cdiv(K, group)
    at_once = 2048 // group
    out = torch.empty(N, K, dtype=dtype, device=values.device)
    grid = N, triton.cdiv(M, at_once)
    _dequantize[grid](
        values,
        scale,
        zero,
        out,
        K,
        M,
        group,
        at_once,
        bits,
    )
    return out


def dequantized_product(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    group: int,
    bias: Tensor | None,
) -> Tensor:
    """`weight_only_product` for many rows of x: W becomes numbers, some rows of W at a time."""
    N = len(values)
    K = x.shape[1]
    tile = max(1, tuning.SLAB // K // 16) * 16
    outputs = []
    for start in range(0, N, tile):
        rows = slice(start, start + tile)
        zero_rows = None if zero is None else zero[rows]
        bias_rows = None if bias is None else bias[rows]
        w = dequantize_rows(values[rows], scale[rows], zero_rows, K, group, x.dtype)
        outputs.append(F.linear(x, w, bias_rows))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def weight_only_product(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    group: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x Wᵀ + bias for a W that `can_multiply` admits. x: [T, K]; values, scale, zero:
    quant.Quantized's -> [T, N].
    """
    T, K = x.shape
    N = len(values)
    bits = 8 if zero is None else 4
    if T == 0:
        return x.new_empty(0, N)
    if T > tuning.ROWS:
        return dequantized_product(x, values, scale, zero, group, bias)
    cut = tuning.plan_product(T, N, K, bits, group, tuning.processors(x.device))
    M = triton.cdiv(K, cut.group)
    x = x.contiguous()
    y = x.new_empty(T, N) if out is None else out
    inputs = x
    if bits == 4:  # pairs of neighbours, as the halves of a byte
        inputs = x.view(-1).view(torch.int64 if x.dtype == torch.float32 else torch.int32)
    constants = dict(
        ROWS=cut.rows,
        COLS=cut.cols,
        GROUP=cut.group,
        BITS=bits,
        X=getattr(tl, str(x.dtype).removeprefix("torch.")),
        PIECES=PIECES[x.dtype],
        EVEN=K % (cut.group * max(1, cut.at_once)) == 0,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    tiles = triton.cdiv(N, cut.rows)
    if cut.at_once:
        _few[tiles,](
            inputs,
            values,
            scale,
            zero,
            bias,
            y,
            T,
            N,
            K,
            M,
            B=cut.at_once,
            **constants,
        )
        return y
    parts = torch.empty(cut.shares, T, N, device=x.device)
    _many[tiles, cut.shares](
        inputs,
        values,
        scale,
        zero,
        parts,
        T,
        N,
        K,
        M,
        **constants,
    )
    row_scale = scale if bits == 8 else None
    _add_up[T, triton.cdiv(N, 512)](
        parts,
        row_scale,
        bias,
        y,
        N,
        cut.shares,
        512,
    )
    return y
