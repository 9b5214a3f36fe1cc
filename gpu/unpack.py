"""Unpacking 8- and 4-bit keys and values in a kernel's registers: from the cache's integers to a
product's floats.

A conversion takes several instructions a number. But the last bits of a float with a fixed exponent
are an integer already. So an integer n is put into the last bits of a constant, and the constant is
subtracted where it costs least:

    1024 + n    float16     a byte in bits 0 to 7             subtracted at once
    2²³ + n     float32     the same, for a byte of values    subtracted at once
      16 + n    bfloat16    a nibble in bits 3 to 6           with the zeros:

    keys (n + 16) − (zero + 16);      values Σ p (n + 16) − Σ p (zero + 16)

    _steps      the integers (grid steps) of vectors with one scale; in bfloat16 those of 4 bits are
                16 too large, the `bias`
    _numbers    4-bit keys, dequantized with a scale and a zero for each group of 16 (quant.py)

A byte holds two neighbours, in the product's order. Invariant: `_steps` is exact, `_numbers` equals
quant.from_int4.

    N vectors of a tile · M groups of a key · D head size, WIDE the power of 2 from it on
"""

import triton
import triton.language as tl

import quant

GROUP = tl.constexpr(quant.KEY_GROUP)
PARTS = tl.constexpr(quant.ZERO_FRACTION)

# Four bytes at a time: K8 makes float16, V8 and V4 make bfloat16. prmt picks bytes of two words, by
# the nibbles of the last operand; lop3 with 0xea is (a & b) | c.
K8 = tl.constexpr("""{ .reg .b32 u, c; mov.b32 c, 0x64806480; xor.b32 u, $2, 0x80808080;
    prmt.b32 $0, u, 0x64646464, 0x5150; prmt.b32 $1, u, 0x64646464, 0x5352;
    sub.rn.f16x2 $0, $0, c; sub.rn.f16x2 $1, $1, c; }""")
V8 = tl.constexpr("""{ .reg .b32 u; .reg .f32 a, b, c, d; xor.b32 u, $2, 0x80808080;
    prmt.b32 a, u, 0x4b000000, 0x7440; prmt.b32 b, u, 0x4b000000, 0x7441;
    prmt.b32 c, u, 0x4b000000, 0x7442; prmt.b32 d, u, 0x4b000000, 0x7443;
    sub.f32 a, a, 0f4b000080; sub.f32 b, b, 0f4b000080;
    sub.f32 c, c, 0f4b000080; sub.f32 d, d, 0f4b000080;
    prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, c, d, 0x7632; }""")
V4 = tl.constexpr("""{ .reg .b32 l, h; shl.b32 l, $4, 3; shr.u32 h, $4, 1;
    prmt.b32 $0, l, h, 0x4400; lop3.b32 $0, $0, 0x00780078, 0x41804180, 0xea;
    prmt.b32 $1, l, h, 0x5511; lop3.b32 $1, $1, 0x00780078, 0x41804180, 0xea;
    prmt.b32 $2, l, h, 0x6622; lop3.b32 $2, $2, 0x00780078, 0x41804180, 0xea;
    prmt.b32 $3, l, h, 0x7733; lop3.b32 $3, $3, 0x00780078, 0x41804180, 0xea; }""")


@triton.jit
def _halves(x, dtype: tl.constexpr):
    """int32[N, K], two 16-bit numbers each -> [N, 2 K]."""
    low = (x & 0xFFFF).to(tl.int16)
    high = (x >> 16).to(tl.int16)
    pairs = tl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))
    return pairs.reshape(x.shape[0], 2 * x.shape[1])


@triton.jit
def _steps(
    pointer,
    vectors,
    visible,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Some stored vectors, [N, WIDE]: their integers, or in 16 bits their numbers. Columns from D
    on, and rows that are not `visible`, are undefined.
    """
    STORED: tl.constexpr = 2 if BITS == 4 else 1  # numbers of a stored element
    PART: tl.constexpr = STORED if dtype == tl.bfloat16 else 1  # that are read together
    d = tl.arange(0, WIDE // PART)
    mask = visible[:, None]
    if D < WIDE:
        mask = mask & (d < D // PART)[None, :]
    element = d if PART == STORED else d // STORED
    x = tl.load(pointer + vectors[:, None] * (D // STORED) + element[None, :], mask, 0)
    if BITS == 8 and dtype == tl.float16:
        x = tl.inline_asm_elementwise(K8, "=r,=r,r", [x], tl.float16, True, 4)
    elif BITS == 8 and dtype == tl.bfloat16:  # impure: else the compiler takes a slow way
        x = tl.inline_asm_elementwise(V8, "=r,=r,r", [x], tl.bfloat16, False, 4)
    elif BITS == 4 and dtype == tl.bfloat16:
        x = tl.inline_asm_elementwise(V4, "=r,=r,=r,=r,r", [x], tl.int32, True, 4)
        x = _halves(x, dtype)
    elif BITS == 4:  # each byte is read twice: joined halves would need LEAST_DEPTH keys
        x = (x >> (d % 2 * 4).to(tl.uint8)[None, :] & 15).to(dtype)
    else:
        x = x.to(dtype)
    return x


@triton.jit
def _numbers(
    pointer,
    scale,
    zero,
    vectors,
    visible,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    dtype: tl.constexpr,
):
    """Keys of 4 bits, dequantized: [N, WIDE], 0 from column D on and in rows that are not
    `visible`.
    """
    bits: tl.constexpr = tl.float32 if dtype == tl.float32 else tl.bfloat16
    bias: tl.constexpr = 0 if dtype == tl.float32 else 16  # of `_steps`
    N: tl.constexpr = vectors.shape[0]
    M: tl.constexpr = (D + GROUP - 1) // GROUP
    part: tl.constexpr = 1.0 if M == 1 else 1.0 / PARTS  # zeros count these parts of a step
    group = tl.arange(0, WIDE // GROUP)
    index = vectors[:, None] * M + group[None, :]  # [N, WIDE / GROUP]
    mask = visible[:, None] & (group < M)[None, :]
    zeros = tl.load(zero + index, mask, 0).to(tl.float32) * part + bias
    scales = tl.load(scale + index, mask, 0).to(tl.float32)
    steps = _steps(pointer, vectors, visible, D, WIDE, 4, bits)
    steps = steps.to(tl.float32).reshape(N, WIDE // GROUP, GROUP)
    x = (steps - zeros[:, :, None]) * scales[:, :, None]
    return x.to(dtype).reshape(N, WIDE)
