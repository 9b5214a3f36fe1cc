"""Products of a few rows with weights as they are stored, in 16, 8 or 4 bits. Only registers hold
the numbers that W stands for.

    y[t, n] = Σ_groups scale[n] · (Σ_k x[t, k] · q[n, k] − zero[n] · Σ_k x[t, k])

A step of a few rows takes as long as reading its weights takes. By an H200's data sheet, 4.8 TB/s
and 1.98 GHz, each of its 132 multiprocessors reads 37 weights of 4 bits a cycle and starts 128
operations: at most three for each weight.

  - Tensor cores make the products, even for one row of x: rows of W are the rows, tokens the
    columns, as few as 8.
  - Scale and zero act on a group's sums. They are too small for asynchronous copies, which x and W
    use, so those of the next group are loaded while this one is multiplied.
  - Even and odd columns are two products, so the halves of a byte need not be put side by side.
    Up to 8 rows of x are read as pairs of columns. More rows are copied before, even columns and
    odd ones apart: tensor cores then read them where they are, and no register splits a pair.
  - One operation unpacks two weights of 4 bits: bfloat16 has 7 mantissa bits, so 0x4300 with q <
    128 in its last bits *is* the number 128 + q. The 128 is added to the zero, which is subtracted
    anyway. NF4's sixteen numbers are looked up, four at a time, in registers: `prmt` picks bytes.
  - Σ x is a product with ones, while tensor cores are idle.
  - The gate and up product ends with SwiGLU: a program takes rows of gate and the same rows of up.
  - Inputs of 8 bits (W8A8) are rounded by a launch before: if every program did it, that would take
    more instructions than the product itself.

Three ways, by the rows of x:

  - 1 to 8: a program takes 16 or 32 rows of W; its warps take different columns, and it adds up
    their sums.
  - 9 to 64: a program takes 128 rows of W, so that x is read less often. If these are too few
    programs for the GPU, several share the columns; the last one to end adds up the sums of all, in
    order. Weights of 16 bits are left to torch.
  - More rows, and odd shapes: a kernel dequantizes W, or rounds x, and torch multiplies.

Invariant: results are those of kernels.Ops up to the order of sums; NF4 is rounded to x's type.
Not covered: FP8 below compute capability 8.9.
Kim et al. 2022 (arXiv:2211.10017): integers to floats by or-ing bits; Frantar et al. 2024, MARLIN
(2408.11743).

    T rows of x (tokens of a step) · K in_features · N out_features · M groups of a row of W
    J elements of a row as it is loaded: 4 bits are loaded as bytes of two columns
    a piece: columns that are multiplied together, all of one group · B pieces at a time
    p a piece of W as it is loaded · v the same columns of x; of 4 bits v the even ones, u the odd
"""

from functools import cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra import cuda

import gpu.fused as fused
import gpu.tuning as tuning
from gpu.tuning import BLOCK
from kernels import Linear
from quant import Kind, nf4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COMPILED = tl.constexpr(not knobs.runtime.interpret)  # the interpreter has no bfloat16

# A register has bytes b0 b1 b2 b3. prmt puts two of them into the halves of another register;
# lop3 0xEA is (a & b) | c. Both pieces of assembly take four bytes, $4, and give the numbers of
# their lower halves, $0 and $1, and of their upper halves, $2 and $3.
NIBBLES = tl.constexpr("""{ .reg .b32 t, u; prmt.b32 t, $4, 0, 0x4140; prmt.b32 u, $4, 0, 0x4342;
    lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $1, u, 0x000F000F, 0x43004300, 0xEA;
    shr.b32 t, t, 4; shr.b32 u, u, 4;
    lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $3, u, 0x000F000F, 0x43004300, 0xEA;
    }""")


def look_up() -> str:
    """Assembly that picks the numbers of NF4, as bfloat16, by the eight nibbles of four bytes.

    prmt picks four of eight bytes by the nibbles of its last operand, of which three bits count. So
    the upper and the lower bytes of sixteen numbers are two tables of two halves: one prmt picks
    from each half, and a third one between both, by the nibbles' highest bits.
    """
    numbers = nf4().bfloat16().view(torch.int16)
    lines = [
        "and.b32 s, $4, 0x77777777;",
        "shr.b32 m, $4, 1;",
        "lop3.b32 m, m, 0x44444444, 0x32103210, 0xEA;",
    ]
    for half in (0, 1):  # of the nibbles: the first four, the last four
        for byte in (0, 1):  # of a number: the lower, the upper
            words = []
            for first in range(0, 16, 4):
                four = [number >> 8 * byte & 255 for number in numbers[first : first + 4].tolist()]
                words.append(hex(int.from_bytes(bytes(four), "little")))
            lines.append(f"mov.b32 a, {words[0]}; prmt.b32 a, a, {words[1]}, s;")
            lines.append(f"mov.b32 b, {words[2]}; prmt.b32 b, b, {words[3]}, s;")
            lines.append(f"prmt.b32 byte{byte}, a, b, m;")
        lines.append(f"prmt.b32 ${half}, byte0, byte1, 0x6240;")  # even nibbles
        lines.append(f"prmt.b32 ${half + 2}, byte0, byte1, 0x7351;")  # odd ones
        lines.append("shr.b32 s, s, 16; shr.b32 m, m, 16;")
    return "{ .reg .b32 s, m, a, b, byte0, byte1; " + " ".join(lines) + " }"


LOOK_UP = tl.constexpr(look_up())


# ---- A piece -------------------------------------------------------------------------------------


@triton.jit
def _unpack(p, table, KIND: tl.constexpr, X: tl.constexpr, OFFSET: tl.constexpr):
    """Bytes -> the numbers of their lower halves, those of their upper halves. Kind 4 makes them
    larger by OFFSET: so are its zeros, which are subtracted later."""
    if X == tl.bfloat16 and COMPILED:
        code: tl.constexpr = NIBBLES if KIND == 4 else LOOK_UP
        low, high = tl.inline_asm_elementwise(
            code, "=r,=r,=r,=r,r", [p], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif KIND == 4:
        low = (p & 15).to(tl.float32) + OFFSET
        high = (p >> 4).to(tl.float32) + OFFSET
    else:
        low = tl.load(table + (p & 15))
        high = tl.load(table + (p >> 4))
    return low, high


@triton.jit
def _neighbours(pair, X: tl.constexpr):
    """Two neighbours of a row of x, read as one integer -> the first, the second."""
    half: tl.constexpr = tl.int32 if X == tl.float32 else tl.int16
    bits: tl.constexpr = 32 if X == tl.float32 else 16
    first = pair.to(half)
    second = (pair >> bits).to(half)
    return first.to(X, bitcast=True), second.to(X, bitcast=True)


@triton.jit
def _dot(a, v, total, X: tl.constexpr):
    """total + a v in x's type; in float32 by three products in tf32."""
    kind: tl.constexpr = X if COMPILED else tl.float32
    return tl.dot(a.to(kind), v.to(kind), total, input_precision="tf32x3")


@triton.jit
def _multiply(p, v, u, total, table, KIND: tl.constexpr, X: tl.constexpr, OFFSET: tl.constexpr):
    """total + q x for a piece. p: [(B,) ROWS, WIDTH]; v, u: [(B,) WIDTH, COLS]."""
    if KIND == 4 or KIND == "nf4":
        low, high = _unpack(p, table, KIND, X, OFFSET)
        total = _dot(low, v, total, X)
        total = _dot(high, u, total, X)
    else:
        total = _dot(p, v, total, X)
    return total


@triton.jit
def _sums(p, v, u, nothing, KIND: tl.constexpr, X: tl.constexpr):
    """Σ x of a piece: [(B,) ROWS, COLS], all rows alike, or [1, COLS]."""
    if KIND == 4:  # tensor cores have time to add, too
        ones = ((p | 1) & 1).to(tl.float32)  # made of p, so that x is wanted in one layout
        sums = _dot(ones, u, _dot(ones, v, nothing, X), X)
    else:
        sums = tl.sum(v.to(tl.float32), len(v.shape) - 2, keep_dims=True)
    return sums


# ---- The products --------------------------------------------------------------------------------


@triton.jit
def _rows_of(N, ROWS: tl.constexpr, SWIGLU: tl.constexpr):
    """This program's rows of W, int64[ROWS]; with SWIGLU half of them of gate, half of up.

    Beyond the last row, the last one again.
    """
    r = tl.arange(0, ROWS)
    if SWIGLU:
        F = N // 2
        HALF: tl.constexpr = ROWS // 2
        f = tl.minimum(tl.program_id(0) * HALF + r % HALF, F - 1)
        n = f + r // HALF * F
    else:
        n = tl.minimum(tl.program_id(0) * ROWS + r, N - 1)
    return n.to(tl.int64)


@triton.jit
def _write(
    out,
    row,
    scale,
    x_scale,
    bias,
    y,
    T,
    N,
    GROUPED: tl.constexpr,
    SWIGLU: tl.constexpr,
):
    """Write the sums of W's rows, out: [ROWS, COLS], to y: [T, N], or with SWIGLU [T, N / 2]."""
    ROWS: tl.constexpr = out.shape[0]
    COLS: tl.constexpr = out.shape[1]
    X: tl.constexpr = y.dtype.element_ty
    if scale is not None and not GROUPED:
        out *= tl.load(scale + row).to(tl.float32)[:, None]
    out *= x_scale
    if bias is not None:
        out += tl.load(bias + row).to(tl.float32)[:, None]
    if SWIGLU:  # rounded where kernels.Ops rounds
        halves = out.reshape(2, ROWS // 2, COLS).permute(1, 2, 0)
        gate, up = tl.split(halves)
        gate = gate.to(X).to(tl.float32)
        silu = (gate * tl.sigmoid(gate)).to(X).to(tl.float32)
        out = silu * up.to(X).to(tl.float32)
        N = N // 2
    n = tl.program_id(0) * out.shape[0] + tl.arange(0, out.shape[0])
    t = tl.arange(0, COLS)
    target = y + t[None, :] * N + n[:, None]
    tl.store(target, out.to(X), mask=(t < T)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["T"])
def _product(
    x,
    odd,
    w,
    scale,
    zero,
    table,
    bias,
    y,
    T,
    N,
    J,
    M,
    x_scale,
    parts,
    arrivals,
    KIND: tl.constexpr,
    X: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    B: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
    OFFSET: tl.constexpr,
    SWIGLU: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS rows of W, a share of the columns, B pieces at a time.

    odd: the odd columns of x, where x has the even ones alone. B is 1 for many rows of x. WIDTH:
    elements of a piece. EVEN: all pieces are full. SPAN: pieces that share a scale; 0: all of a
    row. x_scale: of rows of x that were rounded before. table: NF4's numbers. parts: the sums of
    each share. arrivals: see `arrivals_on`.
    """
    if EARLY:  # the next kernel takes its places, if it is one that starts early
        cuda.gdc_launch_dependents()
    row = _rows_of(N, ROWS, SWIGLU)
    t = tl.arange(0, COLS)
    exists = (t < T)[None, :]  # beyond the last token nothing is read
    weights = w + (row * J)[:, None]  # [ROWS, 1]
    inputs = x + (t * J)[None, :]  # [1, COLS]
    input_scale = 1.0
    if x_scale is not None:
        input_scale = tl.load(x_scale + t, t < T, 0)[None, :]  # [1, COLS]

    if B > 1:
        batch = tl.arange(0, B)[:, None]
        nothing = tl.zeros((B, ROWS, COLS), tl.float32)
    else:
        batch = 0
        nothing = tl.zeros((ROWS, COLS), tl.float32)
    total = nothing
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    pieces = tl.cdiv(J, WIDTH)
    first = pieces * share // shares
    if SPAN:
        s, z = _scales(scale, zero, row, (first + batch) // SPAN, M)
    for start in tl.range(first, pieces * (share + 1) // shares, B):
        piece = start + batch
        j = piece * WIDTH + tl.arange(0, WIDTH)  # [(B,) WIDTH]
        inside = (j < J) | EVEN
        p = tl.load(weights + tl.expand_dims(j, -2), tl.expand_dims(inside, -2), 0.0)
        column = tl.expand_dims(j, -1)
        wanted = tl.expand_dims(inside, -1) & exists
        v = tl.load(inputs + column, wanted, 0.0)
        if odd is not None:
            u = tl.load(odd + (t * J)[None, :] + column, wanted, 0.0)
        elif KIND == 4 or KIND == "nf4":
            v, u = _neighbours(v, X)
        else:
            u = v  # not used
        if SPAN:
            next_s, next_z = _scales(scale, zero, row, (piece + B) // SPAN, M)
            product = _multiply(p, v, u, nothing, table, KIND, X, OFFSET)
            if zero is not None:
                product -= tl.expand_dims(z + OFFSET, -1) * _sums(p, v, u, nothing, KIND, X)
            total += tl.expand_dims(s, -1) * product
            s = next_s
            z = next_z
        else:
            total = _multiply(p, v, u, total, table, KIND, X, OFFSET)

    if B > 1:  # there are no shares
        total = tl.sum(total, 0)  # [ROWS, COLS]
        _write(total, row, scale, input_scale, bias, y, T, N, SPAN > 0, SWIGLU)
    else:
        total, is_last = _add_shares(total, parts, arrivals)
        if is_last:
            _write(total, row, scale, input_scale, bias, y, T, N, SPAN > 0, SWIGLU)


@triton.jit
def _scales(scale, zero, row, m, M):
    """Scales and zeros of group m of each row: [(B,) ROWS]."""
    grid = row * M + m
    s = tl.load(scale + grid, m < M, 0).to(tl.float32)
    z = s  # not used
    if zero is not None:
        z = tl.load(zero + grid, m < M, 0).to(tl.float32)
    return s, z


@triton.jit
def _add_shares(total, parts, arrivals):
    """Add up what all programs of a tile have, in order. -> the sum, and whether this program, the
    last one to come, has it."""
    tile = tl.program_id(0)
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    ROWS: tl.constexpr = total.shape[0]
    COLS: tl.constexpr = total.shape[1]
    index = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    arrived = shares - 1
    if shares > 1:
        part = parts + (tile * shares + share) * ROWS * COLS
        tl.store(part + index, total)
        tl.debug_barrier()  # all threads have written: the counter may say so
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel")
        if arrived == shares - 1:
            total = tl.zeros_like(total)
            for i in tl.range(0, shares, num_stages=4):
                part = parts + (tile * shares + i) * ROWS * COLS
                total += tl.load(part + index, cache_modifier=".cg")  # of other multiprocessors
            tl.store(arrivals + tile, 0)  # for the next product
    return total, arrived == shares - 1


@triton.jit
def _dequantize(
    w,
    scale,
    zero,
    table,
    out,
    K,
    J,
    M,
    GROUP,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
):
    """quant.dequantize, with columns as they are stored. A program has SIZE of them, of a row."""
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = k < K
    if KIND == 4 or KIND == "nf4":
        p = tl.load(w + n * J + k // 2, inside, 0)
        q = p >> (k % 2 * 4).to(tl.uint8) & 15
        numbers = q.to(tl.float32) if KIND == 4 else tl.load(table + q)
    else:
        numbers = tl.load(w + n * J + k, inside, 0.0).to(tl.float32)
    m = n * M + k // GROUP
    if zero is not None:
        numbers -= tl.load(zero + m, inside, 0).to(tl.float32)
    numbers *= tl.load(scale + m, inside, 0).to(tl.float32)
    tl.store(out + n * K + k, numbers, inside)


# ---- Launches ------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A weight as the kernels read it."""

    values: Tensor  # [N, J]
    scale: Tensor | None  # [N, M]
    zero: Tensor | None  # [N, M]
    bias: Tensor | None  # [N]
    kind: Kind
    columns: int  # K
    group: int  # columns whose sums have a scale of their own; 0: all, or no scale
    rounds: bool  # whether inputs are rounded to 8 bits

    @classmethod
    def of(cls, weight: Linear) -> "Stored":
        w, bias = weight
        if isinstance(w, Tensor):
            return cls(w, None, None, bias, 16, w.shape[1], 0, False)
        is_grouped = w.zero is not None or w.scale.shape[1] > 1  # zeros act on a group's sums
        group = w.group if is_grouped else 0
        return cls(w.values, w.scale, w.zero, bias, w.bits, w.columns, group, w.input_bits == 8)


@cache
def arrivals_on(device: torch.device) -> Tensor:
    """How many shares of each tile have arrived: all 0, except while a product runs. All products
    of a device count here, so they must be on one stream."""
    return torch.zeros(tuning.MOST_TILES, dtype=torch.int32, device=device)


def multiplier(x: Tensor, w: Stored) -> Literal["kernel", "torch", "plain"]:
    """What multiplies these rows by w: `stored_product`, `torch_product`, or kernels.Ops.

    The kernel: few rows, with columns and groups in multiples of 32; in 16 bits the fewest, and in
    float32 none, as cuBLAS needs no tf32. torch: all others, of inputs that W8A8 rounds only where
    torch multiplies in 8 bits.
    """
    T = len(x)
    arch = tuning.capability(w.values.device)
    has_gradient = torch.is_grad_enabled() and (x.requires_grad or w.values.requires_grad)
    if has_gradient or x.dtype not in DTYPES or w.kind == "fp8" and arch < 89:
        return "plain"
    most = tuning.ROWS
    if w.kind == 16:
        if w.values.dtype != x.dtype or not w.values.is_contiguous():
            return "plain"
        most = tuning.FEW if x.itemsize == 2 else 0
    fits = 0 < T <= most and w.columns % 32 == 0 and w.group % 32 == 0
    if fits and tuning.is_on("products"):
        return "kernel"
    if not w.rounds:
        return "torch"
    in_8_bits = T > 16 and len(w.values) % 16 == 0 and w.columns % 16 == 0
    if w.kind == "fp8":
        in_8_bits = in_8_bits and x.dtype == torch.bfloat16 and arch >= 90
    return "torch" if in_8_bits else "plain"


def stored_product(x: Tensor, w: Stored, swiglu: bool = False) -> Tensor:
    """x Wᵀ + bias: [T, K] -> [T, N], or SwiGLU of it: [T, N / 2]."""
    T, K = x.shape
    N, J = w.values.shape
    device = x.device
    x_scale = None
    if w.rounds:  # once, as many programs will read it
        x, x_scale = fused.round_inputs(x, w.kind, x.dtype)
    processors = tuning.processors(device)
    cut = tuning.plan_product(T, N, K, w.kind, w.group, x.itemsize, processors)
    width = cut.piece
    inputs = x.contiguous()
    odd = None
    if w.values.dtype == torch.uint8:  # a byte has two columns
        width //= 2
        if T > tuning.FEW and tuning.is_on("apart"):
            inputs, odd = inputs.view(T, J, 2).movedim(2, 0).contiguous()
        else:  # so have the elements of x
            pair = torch.int64 if x.itemsize == 4 else torch.int32
            inputs = inputs.view(-1).view(pair)
    tiles = triton.cdiv(N, cut.rows)
    y = x.new_empty(T, N // 2 if swiglu else N)
    parts = y  # not used
    if cut.shares > 1:
        size = cut.shares * tiles * cut.rows * cut.cols
        parts = torch.empty(size, dtype=torch.float32, device=device)
    _product[tiles, cut.shares](
        inputs,
        odd,
        w.values,
        w.scale,
        w.zero,
        nf4(device),
        w.bias,
        y,
        T,
        N,
        J,
        1 if w.scale is None else w.scale.shape[1],
        x_scale,
        parts,
        arrivals_on(device),
        KIND=w.kind,
        X=getattr(tl, str(x.dtype).removeprefix("torch.")),
        ROWS=cut.rows,
        COLS=cut.cols,
        WIDTH=width,
        B=cut.at_once,
        SPAN=w.group // cut.piece,
        EVEN=J % (width * cut.at_once) == 0,
        OFFSET=128 if w.kind == 4 and x.dtype == torch.bfloat16 else 0,
        SWIGLU=swiglu,
        EARLY=tuning.starts_early(device),
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    return y


def dequantized(w: Stored, dtype: torch.dtype) -> Tensor:
    """quant.dequantize, with columns as they are stored: [N, K] in `dtype`."""
    N, J = w.values.shape
    K = w.columns
    device = w.values.device
    out = torch.empty(N, K, dtype=dtype, device=device)
    _dequantize[N, triton.cdiv(K, BLOCK)](
        w.values,
        w.scale,
        w.zero,
        nf4(device),
        out,
        K,
        J,
        w.scale.shape[1],
        w.group or K,
        w.kind,
        BLOCK,
    )
    return out


def torch_product(x: Tensor, w: Stored) -> Tensor:
    """x Wᵀ + bias by torch, for many rows, or any shape: [T, K] -> [T, N]."""
    if w.kind == 16:
        return F.linear(x, w.values, w.bias)
    if not w.rounds:
        return F.linear(x, dequantized(w, x.dtype), w.bias)
    values, x_scale = fused.round_inputs(x, w.kind, w.values.dtype)
    w_scale = w.scale.float()
    if w.kind == 8:
        sums = torch._int_mm(values, w.values.T)
        return fused.rescale(sums, x_scale, w_scale, w.bias, x.dtype)
    y = torch._scaled_mm(values, w.values.T, x_scale, w_scale.T, out_dtype=x.dtype)
    return y if w.bias is None else y + w.bias
