"""The blocks of GGUF: from packed bytes to whole numbers, exactly.

A row of a quantized matrix is cut into blocks of 32 or 256 weights. A block holds small integers q
and the float16 scales of its groups. The K types round the scales, too: 256 weights share two
float16 numbers, d and dmin, and each group has integers sc and m of 6 bits. All of it is one grid:

    type         weights   bytes   q             scale    minimum     group
    Q8_0              32      34   −128 … 127    d                       32
    Q4_0              32      18   0 … 15        d        −8 d           32
    Q4_1              32      20   0 … 15        d        m              32
    Q5_0              32      22   −16 … 15      d                       32
    Q5_1              32      24   0 … 31        d        m              32
    Q4_K             256     144   0 … 15        d sc     −dmin m        32
    Q5_K             256     176   0 … 31        d sc     −dmin m        32
    Q6_K             256     210   −32 … 31      d sc                    16

    weight = q · scale + minimum = (q − zero) · scale,   zero = −minimum / scale

Invariant: q and scale are the stored numbers; they are never rounded again. (A zero is a quotient,
so it is rounded to float32. It may be large or fractional, and a scale may be negative.) A group of
scale 0 is a constant c: q = 0, zero = −1, scale = c.

Cost: N K bytes for q, and up to five times that while a matrix is unpacked. Not covered: how to
quantize, and types of fewer bits (Q2_K, Q3_K, the IQ types).

    N rows, K columns, M groups of a row · B blocks of a row, G groups of a block
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from errors import UserError
from quant import Quantized


class Grid(NamedTuple):
    """The numbers of a matrix, block by block: q · scale + minimum."""

    q: Tensor  # int8 or uint8[N, B, weights of a block]
    scale: Tensor  # float32[N, B, G]
    minimum: Tensor | float = 0.0  # float32[N, B, G]


# ---- Bytes


def halves(data: Tensor) -> Tensor:
    """Float16 numbers in bytes: uint8[..., 2 L] -> float32[..., L]."""
    return data.contiguous().view(torch.float16).float()


def bit_fields(data: Tensor, bits: int) -> Tensor:
    """Bytes cut into fields of 1, 2 or 4 bits: uint8[..., L] -> uint8[..., 8 / bits · L].

    The lowest field of every byte comes first, then the second of every byte, and so on.
    """
    mask = 2**bits - 1
    shifts = range(0, 8, bits)
    fields = [data >> shift & mask for shift in shifts]
    return torch.cat(fields, -1)


# ---- Types: the parts of the blocks, each uint8[N, B, bytes] -> Grid

BlockParts = tuple[Tensor, ...]


def q8_0(parts: BlockParts) -> Grid:
    d, q = parts
    q = q.view(torch.int8)
    return Grid(q, halves(d))


def q4_0(parts: BlockParts) -> Grid:
    d, q = parts
    q = bit_fields(q, 4)
    scale = halves(d)
    return Grid(q, scale, -8 * scale)


def q5_0(parts: BlockParts) -> Grid:
    d, *bits = parts
    q = with_fifth(*bits)
    q = q.view(torch.int8) - 16
    return Grid(q, halves(d))


def q4_1(parts: BlockParts) -> Grid:
    """And Q5_1, whose fifth bits are before the others."""
    d, m, *bits = parts
    return Grid(with_fifth(*bits), halves(d), halves(m))


def with_fifth(*bits: Tensor) -> Tensor:
    """Weights of 4 bits; of 5, if others are before these: bit j of them is the fifth of weight
    j."""
    *fifth, low = bits
    q = bit_fields(low, 4)
    for high in fifth:
        q |= bit_fields(high.unsqueeze(-1), 1).flatten(-2) << 4
    return q


def q4_k(parts: BlockParts) -> Grid:
    """And Q5_K, whose fifth bits are before the others.

    packed: 6 bits for the scales and minima of 8 groups. Groups 0 to 3 have the low 6 bits of a
    byte each, first the scales, then the minima. Groups 4 to 7 have a nibble, and the 2 bits that
    those bytes have left.
    """
    d, dmin, packed, *fifth, low = parts
    pairs = low.unflatten(-1, (4, 32))  # of groups: a low and a high nibble in each byte
    q = bit_fields(pairs, 4).flatten(-2)
    for high in fifth:
        q |= bit_fields(high, 1) << 4  # bit j of byte l: weight l of group j
    own, shared = packed.split((8, 4), -1)
    early = own & 63  # of groups 0 to 3: 4 scales, 4 minima
    upper = own >> 6 << 4
    late = upper | bit_fields(shared, 4)  # the same, of groups 4 to 7
    both = torch.stack((early, late), -2)  # [N, B, 2, 8]
    sc, m = both.split(4, -1)  # each [N, B, 2, 4]
    scale = halves(d) * sc.flatten(-2)
    minimum = -halves(dmin) * m.flatten(-2)
    return Grid(q, scale, minimum)


def q6_k(parts: BlockParts) -> Grid:
    low, high, scales, d = parts
    low = low.unflatten(-1, (2, 64))  # two halves of a block
    high = high.unflatten(-1, (2, 32))
    q = bit_fields(low, 4)  # [N, B, 2, 128]
    q |= bit_fields(high, 2) << 4
    q = q.view(torch.int8) - 32
    scale = halves(d) * scales.view(torch.int8)
    return Grid(q.flatten(-2), scale)


class BlockFormat(NamedTuple):
    """A quantized type."""

    weights: int  # of a block
    parts: tuple[int, ...]  # of a block, in bytes
    bits: int  # that hold q in memory: 4 (0 to 15) or 8
    group: int  # weights that share a scale
    zeros: bool  # whether the groups have zeros
    grid: Callable[[BlockParts], Grid]

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return sum(self.parts)


BLOCK_FORMATS = {
    "Q8_0": BlockFormat(32, (2, 32), 8, 32, False, q8_0),
    "Q4_0": BlockFormat(32, (2, 16), 4, 32, True, q4_0),
    "Q4_1": BlockFormat(32, (2, 2, 16), 4, 32, True, q4_1),
    "Q5_0": BlockFormat(32, (2, 4, 16), 8, 32, False, q5_0),
    "Q5_1": BlockFormat(32, (2, 2, 4, 16), 8, 32, True, q4_1),
    "Q4_K": BlockFormat(256, (2, 2, 12, 128), 4, 32, True, q4_k),
    "Q5_K": BlockFormat(256, (2, 2, 12, 32, 128), 8, 32, True, q4_k),
    "Q6_K": BlockFormat(256, (128, 64, 16, 2), 8, 16, False, q6_k),
}


# ---- Matrices


def unpack(type: str, blocks: Tensor) -> Quantized:
    """Rows of blocks, uint8[N, bytes of a row] -> the whole numbers that they hold, in 8 bits, with
    float32 scales and zeros.

    type: a name of `BLOCK_FORMATS`. UserError for a scale or minimum that is not finite.
    """
    form = BLOCK_FORMATS[type]
    by_block = blocks.unflatten(-1, (-1, form.nbytes))
    q, scale, minimum = form.grid(by_block.split(form.parts, -1))
    both = scale + minimum  # finite, if and only if both are
    if not both.isfinite().all():
        raise UserError(
            f"a block of {type} has a scale that is not finite; scales must be finite numbers: "
            "the file is damaged, fetch it again"
        )
    values = q.view(torch.int8)
    zero = None
    if form.zeros:
        is_constant = scale == 0  # [N, B, G]
        zero = -minimum / scale
        zero = zero.masked_fill(is_constant, -1)
        zero = zero.flatten(1)
        scale = torch.where(is_constant, minimum, scale)
        by_group = values.unflatten(-1, (-1, form.group))  # [N, B, G, group]
        values = by_group.masked_fill(is_constant.unsqueeze(-1), 0)
    values = values.flatten(1)
    scale = scale.flatten(1)
    K = values.shape[1]
    return Quantized(8, values, scale, zero=zero, columns=K, group=form.group)


def unpermute(rows: Tensor, heads: int) -> Tensor:
    """The rows of q or k, [heads · D, ...], in Hugging Face's order. heads: q's, or k's own.

    Rotary embeddings turn pairs of rows of a head. GGUF stores the two rows of a pair side by side,
    Hugging Face D / 2 rows apart. Only rows move: they may be blocks, too.
    """
    pairs = rows.unflatten(0, (heads, -1, 2))  # [heads, D / 2, 2, ...]
    return pairs.transpose(1, 2).flatten(0, 2)
