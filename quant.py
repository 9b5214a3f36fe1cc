"""INT8 and INT4 numbers: fewer bytes for the same weights, keys and values.

A decoding step takes as long as reading the weights takes, and a cache fills the memory that is left. So numbers x are
stored as small integers q on a grid, with one grid for each row or group, and converted back where they are used:

    x ≈ (q − zero) · scale          8 bits: q in [−127, 127], zero = 0           4 bits: q in [0, 15], two in a byte
    scale = max|x| / 127    or    (max x − min x) / 15,   zero = −round(min x / scale)        |error| ≤ scale / 2
    x ≈ code[q] · scale             NF4: q in [0, 15], scale = max|x|            FP8: q in E4M3, scale = max|x| / 448

A scale is rounded *up* to 16 bits before q is computed with it (a grid with a smaller scale would not reach max x). It
is at least 1e-30: all-zero groups are exact, and nothing is divided by 0.

  - Weights W [N, K]: 8 bits (FP8, too) have a scale for each row, N (K + 2) bytes; 4 bits a scale and a zero for each
    group of 32, 64 or 128, N (K / 2 + 4 ⌈K / group⌉) bytes: a quarter of 16 bits, *plus scales*. NF4 has no zeros.
  - Keys and values: a scale (and in 4 bits a zero) for each token and head. 4-bit keys have one for each group of 16
    numbers, and their zeros count quarters of a grid step: whole steps cost more.
  - Activations may be rounded as INT8 or FP8 weights are, with a scale for each token (W8A8; Xiao et al. 2022).

`python quant.py NAME --bits 4 --method gptq --data FILE --out DIR` writes a smaller model folder, `--table` measures
all widths and methods, and with no flags it shows what the bits cost on the embedded model (train/quantize.py).

NF4: Dettmers et al. 2023 (arXiv:2305.14314). FP8: Micikevicius et al. 2022 (2209.05433).

    N rows of W, out_features · K columns, in_features · M = ⌈K / group⌉ groups of a row · D head size
"""

if __name__ == "__main__":  # slow imports follow: a signal ends them in silence
    from app.shell import begin

    begin()

import sys
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import UserError

TINY = 1e-30  # the smallest scale; smaller numbers become 0
FAR = 2000  # the most grid steps from 0 to a grid: float32 stays precise
PARTS = 4  # zeros of a vector with several groups count 1/4 grid steps
SLAB = 1 << 22  # numbers that are quantized at a time
MOST8, MOST4, MOST_FP8 = (
    2.679e36,
    4.851e37,
    7.58e35,
)  # the largest scales: 127, 7, 448 times them are in float32


# ---- Grids and numbers -----------------------------------------------------------------------------------------------


def round_up(x: Tensor) -> Tensor:
    """The next bfloat16 that is not below x ≥ 0, a float32."""
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32).bfloat16()


def groups(x: Tensor, group: int) -> Tensor:
    """[..., K] -> [..., M, group]. The last group is padded with its own last number: its grid stays the same."""
    if short := -x.shape[-1] % group:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], short)), -1)
    return x.unflatten(-1, (-1, group))


def spread(x: Tensor, group: int | None, columns: int) -> Tensor:
    """Scales or zeros of groups, [..., M] -> of columns, [..., K]. One for the whole row stays [..., 1]."""
    return x if x.shape[-1] == 1 else x.repeat_interleave(group, -1)[..., :columns]


def grid4(x: Tensor, group: int, parts: int = 1) -> tuple[Tensor, Tensor]:
    """The 4-bit grids of x: [..., K] -> scale, bfloat16[..., M]; zero, int16[..., M], in 1 / parts of a grid step."""
    low, high = (edge.float() for edge in torch.aminmax(groups(x, group), dim=-1))
    far = torch.maximum(high, -low)
    scale = (
        torch.maximum(high / 15 - low / 15, far / FAR)
        .clamp_(min=TINY)
        .masked_fill_(far > 1e38, MOST4)
    )
    scale = round_up(scale)
    return scale, (-(low / scale * parts).round_()).to(torch.int16)


def pack4(q: Tensor) -> Tensor:
    """Two numbers below 16 in a byte, the first in its lower half: uint8[..., K] -> uint8[..., ⌈K / 2⌉]."""
    q = F.pad(q, (0, q.shape[-1] % 2))
    return q[..., ::2] | q[..., 1::2] << 4


def unpack4(packed: Tensor) -> Tensor:
    """uint8[..., J] -> uint8[..., 2 J]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys or values [..., D] -> int8[..., D] and a scale for each vector, bfloat16[..., 1]."""
    scale = round_up((x.abs().amax(-1, keepdim=True).float() / 127).clamp_(TINY, MOST8))
    return (x.float() / scale).round_().to(torch.int8), scale


def int4(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Keys or values [..., D] -> packed, uint8[..., D / 2]; scale, bfloat16[..., M]; zero, int16[..., M].

    group: numbers that share a scale; None: the whole vector does. With several groups in a vector, zeros count
    1 / PARTS of a grid step, which is right for numbers up to 1e38.
    """
    D = x.shape[-1]
    parts = PARTS if D > (group or D) else 1
    scale, zero = grid4(x, group or D, parts)
    q = (
        (x.float() / spread(scale, group, D))
        .add_(spread(zero, group, D) / parts)
        .round_()
        .clamp_(0, 15)
    )
    return pack4(q.to(torch.uint8)), scale, zero


def from_int8(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return (values * scale.float()).to(dtype)


def from_int4(
    packed: Tensor,
    scale: Tensor,
    zero: Tensor,
    dtype: torch.dtype = torch.float32,
    group: int | None = None,
) -> Tensor:
    zero = zero / (PARTS if zero.shape[-1] > 1 else 1)
    scale, zero = (spread(x, group, 2 * packed.shape[-1]) for x in (scale.float(), zero))
    return ((unpack4(packed) - zero) * scale).to(dtype)


@cache
def nf4() -> Tensor:
    """NormalFloat: 0, eight quantiles of N(0, 1) above it and seven below, scaled to ±1: float32[16], ascending.

    Equal to the authors' table to the bit, as it rounds where the authors round: NF4 folders hold their table.
    """
    far = 0.9677083  # the outermost quantile: 1 − (1/32 + 1/30) / 2
    above, below = (
        torch.special.ndtri(torch.linspace(far, 0.5, n).double()[:-1]).float() for n in (9, 8)
    )
    return torch.cat((-below, above.new_zeros(1), above.flip(0))) / above[0]


# ---- Weights ---------------------------------------------------------------------------------------------------------

Kind = int | str  # how weights are stored: 8, 4, "fp8", "nf4"; 16: not quantized
STORED: dict[Kind, torch.dtype] = {
    8: torch.int8,
    4: torch.uint8,
    "fp8": torch.float8_e4m3fn,
    "nf4": torch.uint8,
}
GROUPS: dict[Kind, int] = {4: 128, "nf4": 64}  # default `group`: columns that share a scale


def stored_bits(dtype: torch.dtype, zeros: bool) -> Kind:
    """The kind of weights that are stored in this dtype, with or without zeros."""
    if dtype == torch.uint8:
        return 4 if zeros else "nf4"
    return 8 if dtype == torch.int8 else "fp8"


class Quantized(NamedTuple):
    """A matrix W [N, K] in 8 or 4 bits. `dequantize(*q)` converts it back to floating point.

    `quantize` makes bfloat16 scales, and zeros only for 4 bits. Folders of other programs (layouts.py) may have scales
    of any floating-point type, groups and zeros for int8, too, and columns that are stored in another order.
    """

    values: Tensor  # int8 or float8_e4m3fn[N, K]; uint8[N, ⌈K / 2⌉], two a byte
    scale: Tensor  # [N, M]
    zero: Tensor | None  # int16[N, M]; None: every zero is 0, and uint8 is NF4
    columns: int  # K (two numbers a byte do not say whether K is odd)
    group: int  # columns that share a scale
    order: Tensor | None = None  # int64[K]: stored column j multiplies x[order[j]]; None: x[j]
    inputs: int = 16  # 8: each row of x is rounded as W is before the product

    @classmethod
    def empty(
        cls,
        N: int,
        K: int,
        bits: Kind,
        group: int,
        device: torch.device | str = "cpu",
        scale: torch.dtype = torch.bfloat16,
        zeros: bool = False,
        ordered: bool = False,
    ) -> "Quantized":
        """An uninitialized matrix. 4 bits always have zeros."""
        shape, make = (N, -(-K // group)), partial(torch.empty, device=device)
        return cls(
            make(N, -(-K // 2) if STORED[bits] == torch.uint8 else K, dtype=STORED[bits]),
            make(shape, dtype=scale),
            make(shape, dtype=torch.int16) if zeros or bits == 4 else None,
            K,
            group,
            make(K, dtype=torch.int64) if ordered else None,
        )

    @property
    def bits(self) -> Kind:
        return stored_bits(self.values.dtype, self.zero is not None)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included."""
        return sum(part.nbytes for part in (*self[:3], self.order) if part is not None)

    def rows(self, which: Tensor | slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """Some rows of W, dequantized: float[R, K]."""
        parts = (None if part is None else part[which] for part in self[:3])
        return dequantize(*parts, *self[3:], dtype=dtype)


def round4(w: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """W: [N, K], rounded to 4-bit grids -> packed, uint8[N, ⌈K / 2⌉]; scale and zero, [N, M] each."""
    (scale, zero), K = grid4(w, group), w.shape[1]
    q = (w.float() / spread(scale, group, K)).round_().add_(spread(zero, group, K)).clamp_(0, 15)
    return pack4(q.to(torch.uint8)), scale, zero


def round_nf4(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """W: [N, K], rounded to the sixteen numbers of NF4 -> packed, uint8[N, ⌈K / 2⌉]; scale, [N, M]."""
    scale = round_up(
        groups(w, group).abs().amax(-1).float().clamp_(TINY, torch.finfo(torch.bfloat16).max)
    )
    code = nf4().to(w.device)
    x = w.float() / spread(scale, group, w.shape[1])
    return pack4(torch.bucketize(x, (code[1:] + code[:-1]) / 2).to(torch.uint8)), scale


def round_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """W: [N, K], rounded to E4M3 (3 mantissa bits, at most 448) -> float8_e4m3fn[N, K]; scale, [N, 1]."""
    scale = round_up((w.abs().amax(-1, keepdim=True).float() / 448).clamp_(TINY, MOST_FP8))
    return (w.float() / scale).to(torch.float8_e4m3fn), scale


@torch.no_grad()
def quantize(w: Tensor, bits: Kind, group: int = 128) -> Quantized:
    """W: float[N, K], rounded to nearest. In 8 bits and FP8 a whole row shares a scale, and `group` is not used.
    ValueError for unknown bits, a group below 1, or a weight that is not a matrix of finite numbers."""
    if bits not in STORED:
        raise UserError(f"bits is {bits!r}: weights are stored in {', '.join(map(str, STORED))}")
    if group < 1:
        raise UserError(f"group is {group}: at least one number must share a scale")
    if w.ndim != 2 or 0 in w.shape or not w.is_floating_point():
        raise UserError(
            f"a weight of {w.dtype} {list(w.shape)} cannot be quantized: "
            "it must be a matrix of floating-point numbers"
        )
    columns, parts = w.shape[1], []
    for rows in w.split(max(1, SLAB // columns)):  # rounding a row takes several times its memory
        if not (
            rows.sum(dtype=torch.float32).isfinite() or rows.isfinite().all()
        ):  # the sum is quicker
            raise UserError(
                f"a weight of {list(w.shape)} cannot be quantized: it holds numbers that are not finite"
            )
        parts.append(
            int8(rows)
            if bits == 8
            else round_fp8(rows)
            if bits == "fp8"
            else round4(rows, group)
            if bits == 4
            else round_nf4(rows, group)
        )
    values, scale, *zero = (torch.cat(part) for part in zip(*parts))
    whole = STORED[bits] != torch.uint8
    return Quantized(values, scale, zero[0] if zero else None, columns, columns if whole else group)


def dequantize(
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    columns: int,
    group: int,
    order: Tensor | None = None,
    inputs: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The fields of a Quantized -> the matrix that they stand for, float[N, K]. `inputs` is not used."""
    q = unpack4(values)[:, :columns] if values.dtype == torch.uint8 else values
    if zero is not None:
        q = q - spread(zero, group, columns)
    elif values.dtype == torch.uint8:
        q = nf4().to(values.device)[q.int()]
    w = (q.float() * spread(scale.float(), group, columns)).to(dtype)
    return w if order is None else torch.empty_like(w).index_copy_(1, order, w)


def rounded_product(x: Tensor, w: Quantized) -> Tensor:
    """x Wᵀ with each row of x rounded as W is, to INT8 or FP8: [T, K] -> [T, N]. Sums are float32's: PyTorch's product
    of integers saturates on a CPU without VNNI."""
    values, scale = int8(x) if w.bits == 8 else round_fp8(x)
    return (values.float() @ w.values.T.float() * scale.float() * w.scale.T.float()).to(x.dtype)


# ---- Keys and values -------------------------------------------------------------------------------------------------

Bits = tuple[int, int]  # bits of keys, bits of values
WIDTHS = {"16": (16, 16), "8": (8, 8), "8/4": (8, 4), "4": (4, 4)}  # as `--kv-bits` names them
GROUP = 16  # numbers of a 4-bit key that share a scale; a value has one


def widths(name: str | int) -> Bits:
    """'16', '8', '8/4' or '4' -> bits of keys and of values. ValueError for others."""
    if str(name) not in WIDTHS:
        raise UserError(
            f"kv_bits is {name!r}: it must be 16, 8, 4 or 8/4 (8-bit keys, 4-bit values)"
        )
    return WIDTHS[str(name)]


if __name__ == "__main__":  # the command line that stores whole models
    from train.quantize import main

    sys.exit(main())
