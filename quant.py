"""INT8, INT4, FP8 and NF4: fewer bytes for the same weights, keys and values.

A decoding step takes as long as reading the weights, and the cache fills the memory that they
leave. So numbers x are stored as small integers q on a grid, with one grid for each row or group,
and converted back where they are used:

    x ≈ (q − zero) · scale

    8 bits   q in [−127, 127]                     scale = max|x| / 127          zero = 0
    4 bits   q in [0, 15], two in a byte          scale = (max x − min x) / 15
                                                  zero = −round(min x / scale)
    FP8      q in E4M3                            scale = max|x| / 448          zero = 0
    NF4      q = code[i], i in [0, 15]            scale = max|x|                zero = 0

`FORMATS` has an entry for each of these formats.

Invariant: |error| ≤ scale / 2 in 8 and 4 bits. A scale is rounded *up* to 16 bits before q is
computed with it, because a grid with a smaller scale would not reach max x.

  - Weights W [N, K] in 8 bits or FP8 have a scale for each row: N (K + 2) bytes. In 4 bits they
    have a scale and a zero for each group of 32, 64 or 128: N (K / 2 + 4 ⌈K / group⌉) bytes, a
    quarter of 16 bits *plus scales*. NF4 has no zeros.
  - Keys and values have a scale (and in 4 bits a zero) for each token and head. To reduce errors,
    4-bit keys have these for each group of 16 numbers, and store their zeros in quarters of a
    grid step.
  - Activations may be rounded like INT8 or FP8 weights, with a scale for each token (W8A8; Xiao et
    al. 2022).

Not covered: calibrated rounding (GPTQ, AWQ: train/calibrate.py). `python -m train.quantize` writes
the folder of a quantized model; `python quant.py` prints the bytes and errors of a matrix.

NF4: Dettmers et al. 2023 (arXiv:2305.14314). FP8: Micikevicius et al. 2022 (2209.05433).

    N rows of W, out_features · K columns, in_features · M = ⌈K / group⌉ groups in a row
    D head size · T tokens of a step
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import UserError
from settings import Options

# ---- Grids: x ≈ (q − zero) · scale ---------------------------------------------------------------


def symmetric(x: Tensor, steps: int, group: int | None) -> tuple[Tensor, Tensor]:
    """Make grids that reach max|x| in `steps` steps, one for each group of columns (None: one for
    the whole row).

    x: [..., K] -> q before rounding, float32[..., K]; scale, bfloat16[..., M].
    """
    group = group or x.shape[-1]
    largest = groups(x, group).abs().amax(-1).float()
    scale = stored_scale(largest / steps, largest, steps)
    return x.float() / spread(scale, group, x), scale


def affine(x: Tensor, group: int, fraction: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Make grids from min x to max x in 15 steps, one for each group of columns.

    x: [..., K] -> q before rounding, float32[..., K]; scale, bfloat16[..., M]; zero, int16[..., M],
    which counts steps, or with `fraction` = 4 quarters of a step.
    """
    x = x.float()
    grouped = groups(x, group)
    low = grouped.amin(-1)
    high = grouped.amax(-1)  # both together are faster than `aminmax` over a dimension
    largest = torch.maximum(high, -low)
    step = high / 15 - low / 15  # high − low could overflow float32
    scale = stored_scale(wide_enough(step, largest), largest, HALF)
    zero = -(low / scale * fraction).round_()
    q = x / spread(scale, group, x)
    q += spread(zero, group, x) / fraction
    return q, scale, zero.to(torch.int16)


def from_grid(q: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """(q − zero) · scale: [..., K] -> float32[..., K]."""
    if zero is not None:
        q = q - spread(zero, group, q)
    return q.float() * spread(scale.float(), group, q)


def groups(x: Tensor, group: int) -> Tensor:
    """[..., K] -> [..., M, group]. The last group is padded by repeating its last number."""
    missing = -x.shape[-1] % group
    if missing:
        x = F.pad(x, (0, missing), mode="replicate")
    return x.unflatten(-1, (-1, group))


def spread(grid: Tensor, group: int, x: Tensor) -> Tensor:
    """Repeat the scales or zeros of groups, [..., M], for the columns of x: [..., K]. If M is 1,
    they are returned unchanged."""
    if grid.shape[-1] == 1:
        return grid
    return grid.repeat_interleave(group, -1)[..., : x.shape[-1]]


# ---- Scales that can be stored -------------------------------------------------------------------

# Ordinary numbers are far from these limits. A group of zeros would be divided by 0 without the
# first; with numbers near the largest float32 a grid would overflow without the others.
SMALLEST_SCALE = 1e-30
LARGEST = torch.finfo(torch.bfloat16).max  # the end of the largest grid
LARGEST_ZERO = 2000  # grid steps; then x / scale is precise to 1e-4 steps in float32
HALF = 7  # whole steps on either side of 0 in a grid of 15 steps


def wide_enough(scale: Tensor, largest: Tensor) -> Tensor:
    """The scale of a grid of 15 steps, or a larger one. largest: the group's largest |x|."""
    scale = torch.maximum(scale, largest / LARGEST_ZERO)  # so zero is at most LARGEST_ZERO
    # A grid may reach half a step beyond x. Near the largest float32 that would be infinity, so
    # there the grid has 7 steps on either side of 0, up to LARGEST.
    return scale.masked_fill_(largest > 1e38, LARGEST / HALF)


def stored_scale(scale: Tensor, largest: Tensor, steps: int) -> Tensor:
    """float32 -> bfloat16, rounded up: a smaller scale would not reach the group's largest |x|.

    `steps` times the scale does not overflow float32. If a number of a group is not finite, the
    group's scale is NaN, so that clamping does not hide it.
    """
    scale = scale.clamp(SMALLEST_SCALE, LARGEST / steps)
    return round_up(torch.where(largest < math.inf, scale, math.nan))


def round_up(x: Tensor) -> Tensor:
    """The smallest bfloat16 that is not below x, a float32 ≥ 0."""
    # A bfloat16 is the upper half of a float32's bits. Carry into it, and clear the lower half.
    bits = (x.view(torch.int32) + 0xFFFF) & -0x10000
    return bits.view(torch.float32).bfloat16()


# ---- Formats -------------------------------------------------------------------------------------

Kind = int | str  # how weights are stored: 8, 4, "fp8" or "nf4"; 16: not quantized


def pack4(q: Tensor) -> Tensor:
    """Pack two whole numbers below 16 into a byte: [..., K] -> uint8[..., ⌈K / 2⌉]."""
    q = F.pad(q.to(torch.uint8), (0, q.shape[-1] % 2))
    lower_half = q[..., ::2]
    upper_half = q[..., 1::2]
    return lower_half | upper_half << 4


def unpack4(packed: Tensor) -> Tensor:
    """uint8[..., J] -> uint8[..., 2 J]."""
    lower_half = packed & 15
    upper_half = packed >> 4
    return torch.stack((lower_half, upper_half), -1).flatten(-2)


# NormalFloat: quantiles of N(0, 1), eight above 0 and seven below, scaled to ±1.
NF4_CODE = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


@cache
def nf4(device: torch.device | str = "cpu") -> Tensor:
    """`NF4_CODE` on a device: float32[16]."""
    return torch.tensor(NF4_CODE, dtype=torch.float32, device=device)


def to_nf4(q: Tensor) -> Tensor:
    """Round to the nearest of the sixteen numbers: [..., K] -> uint8[..., ⌈K / 2⌉]."""
    code = nf4(q.device)
    halfway = (code[1:] + code[:-1]) / 2
    return pack4(torch.bucketize(q, halfway))


def from_nf4(values: Tensor) -> Tensor:
    """uint8[..., J] -> float32[..., 2 J]."""
    return nf4(values.device)[unpack4(values).int()]


class Format(NamedTuple):
    """How numbers are stored."""

    dtype: torch.dtype  # the dtype of stored values
    steps: int | None  # the q of max|x| on a symmetric grid; None: the grid is affine
    encode: Callable[[Tensor], Tensor]  # q before rounding -> values
    decode: Callable[[Tensor], Tensor] | None = None  # values -> q; None: the values are q
    group: int | None = None  # the default number of columns that share a scale; None: a whole row
    in_a_byte: int = 1  # numbers per byte
    zero: torch.dtype | None = None  # the dtype of zeros; None: the format has no zeros

    def round(self, x: Tensor, group: int | None = None) -> tuple[Tensor, ...]:
        """x: [..., K] -> values, then scales and, if the format has them, zeros: [..., M] each."""
        if self.steps is None:
            q, *grid = affine(x, group)
        else:
            q, *grid = symmetric(x, self.steps, group)
        return self.encode(q), *grid


FORMATS: dict[Kind, Format] = {
    8: Format(
        dtype=torch.int8,
        steps=127,
        encode=lambda q: q.round_().to(torch.int8),
    ),
    4: Format(
        dtype=torch.uint8,
        steps=None,
        encode=lambda q: pack4(q.round_().clamp_(0, 15)),
        decode=unpack4,
        group=128,
        in_a_byte=2,
        zero=torch.int16,
    ),
    "fp8": Format(
        dtype=torch.float8_e4m3fn,  # 3 mantissa bits, at most 448
        steps=448,
        encode=lambda q: q.to(torch.float8_e4m3fn),
    ),
    "nf4": Format(
        dtype=torch.uint8,
        steps=1,
        encode=to_nf4,
        decode=from_nf4,
        group=64,
        in_a_byte=2,
    ),
}


# ---- Weights -------------------------------------------------------------------------------------

# Weights that are rounded, and dequantized, at a time: both take several times their memory.
SLAB = 1 << 22
DEQUANTIZED = 1 << 21


class Quantized(NamedTuple):
    """A matrix W [N, K] in lower precision.

    `quantize` makes bfloat16 scales, and zeros only for 4 bits. In folders of other programs
    (checkpoint/layouts.py) scales may have any floating-point type, int8 may have groups and zeros,
    and columns may be stored in another order.
    """

    bits: Kind
    values: Tensor  # [N, K], or two numbers a byte: [N, ⌈K / 2⌉]
    scale: Tensor  # [N, M]
    zero: Tensor | None  # int16[N, M], or float32; None: every zero is 0
    columns: int  # K (with two numbers a byte, the values do not show whether K is odd)
    group: int  # columns that share a scale
    order: Tensor | None = None  # int64[K]: stored column j multiplies x[order[j]]; None: x[j]
    input_bits: int = 16  # 8: each row of x is rounded as W is before the product (W8A8)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), self.columns

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included."""
        return sum(part.nbytes for part in self if isinstance(part, Tensor))

    def rows(self, which: Tensor | slice) -> "Quantized":
        """Some rows of W. For a slice they are views."""
        values = self.values[which]
        scale = self.scale[which]
        zero = None if self.zero is None else self.zero[which]
        return self._replace(values=values, scale=scale, zero=zero)

    def split(self, sizes: list[int]) -> list["Quantized"]:
        """Cut W into views with these numbers of rows."""
        return [self.rows(slice(end - n, end)) for n, end in zip(sizes, accumulate(sizes))]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W, converted back: float[N, K]."""
        q = self.values
        decode = FORMATS[self.bits].decode
        if decode is not None:
            q = decode(q)[:, : self.columns]
        w = from_grid(q, self.scale, self.zero, self.group).to(dtype)
        if self.order is None:
            return w
        return torch.empty_like(w).index_copy_(1, self.order, w)


def named_tensors(name: str, weight: Tensor | Quantized) -> dict[str, Tensor]:
    """The tensors of the weight with this name, as a checkpoint names them."""
    if isinstance(weight, Tensor):
        return {name: weight}
    parts = {
        name: weight.values,
        f"{name}_scale": weight.scale,
        f"{name}_zero": weight.zero,
        f"{name}_order": weight.order,
    }
    return {name: part for name, part in parts.items() if part is not None}


@torch.no_grad()
def quantize(w: Tensor, bits: Kind, group: int | None = None) -> Quantized:
    """Round W, float[N, K], to nearest. In 8 bits and FP8 a whole row shares a scale.

    group: columns that share a scale; None: the format's default. UserError for unknown bits, or a
    weight with numbers that are not finite.
    """
    if bits not in FORMATS:
        raise UserError(f"bits is {bits!r}: weights are stored in {', '.join(map(str, FORMATS))}")
    if not torch.stack(torch.aminmax(w)).isfinite().all():
        raise UserError(
            f"a weight of {list(w.shape)} cannot be quantized: it holds numbers that are not finite"
        )
    form = FORMATS[bits]
    columns = w.shape[1]
    if form.group is None:
        group = columns
    elif group is None:
        group = form.group
    slabs = [form.round(rows, group) for rows in w.split(max(1, SLAB // columns))]
    values, scale, *zero = [torch.cat(part) for part in zip(*slabs)]
    return Quantized(
        bits, values, scale, zero=zero[0] if zero else None, columns=columns, group=group
    )


def dequantized_product(x: Tensor, w: Quantized) -> Tensor:
    """x Wᵀ: [T, K] -> [T, N]. W is dequantized some rows at a time, to save memory."""
    num_rows = max(16, DEQUANTIZED // w.columns)
    products = []
    for start in range(0, len(w.values), num_rows):
        rows = w.rows(slice(start, start + num_rows))
        products.append(F.linear(x, rows.dequantize(x.dtype)))
    return torch.cat(products, dim=-1)


def rounded_product(x: Tensor, w: Quantized) -> Tensor:
    """x Wᵀ with each row of x rounded as W is, to INT8 or FP8: [T, K] -> [T, N].

    W has a scale for each row, no zeros, and its columns in order. Sums are in float32, because
    PyTorch's integer product saturates on a CPU without VNNI.
    """
    values, scale = FORMATS[w.bits].round(x, w.columns)
    y = values.float() @ w.values.T.float()
    y = y * scale.float() * w.scale.T.float()
    return y.to(x.dtype)


# ---- Keys and values -----------------------------------------------------------------------------

Bits = tuple[int, int]  # bits of keys, bits of values
WIDTHS = {"16": (16, 16), "8": (8, 8), "8/4": (8, 4), "4": (4, 4)}  # as `--kv-bits` names them
KEY_GROUP = 16  # numbers of a 4-bit key that share a scale; a whole value shares one
ZERO_FRACTION = 4  # zeros of 4-bit keys count quarters of a grid step


def widths(name: str | int) -> Bits:
    """'16', '8', '8/4' or '4' -> bits of keys and of values. UserError for any other name."""
    return WIDTHS[Options(kv_bits=name).kv_bits]


def int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """A key or value x: [..., D] -> int8[..., D]; scale, bfloat16[..., 1]."""
    return FORMATS[8].round(x)


def from_int8(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers stored by `int8`: [..., D]."""
    return from_grid(values, scale, None, values.shape[-1]).to(dtype)


def int4(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A key or value x: [..., D] -> uint8[..., D / 2]; scale and zero, [..., M].

    group: numbers that share a scale; None: all D.
    """
    D = x.shape[-1]
    group = group or D
    q, scale, zero = affine(x, group, ZERO_FRACTION if group < D else 1)
    return FORMATS[4].encode(q), scale, zero


def from_int4(
    packed: Tensor,
    scale: Tensor,
    zero: Tensor,
    dtype: torch.dtype = torch.float32,
    group: int | None = None,
) -> Tensor:
    """The numbers stored by `int4` with the same `group`: [..., D]."""
    D = 2 * packed.shape[-1]
    group = group or D
    steps = zero / ZERO_FRACTION if group < D else zero
    return from_grid(unpack4(packed), scale, steps, group).to(dtype)


def main() -> None:
    """Demonstration: the bytes and the error of each format, for the token embedding of tiny."""
    tensors = load_file(find_model("tiny") / "model.safetensors")
    w = tensors["model.embed_tokens.weight"].float()
    for bits in FORMATS:
        q = quantize(w, bits)
        error = (q.dequantize() - w).norm() / w.norm()
        print(f"{bits:>4}: {q.nbytes / w.numel():.2f} bytes a weight, error {error:.1%}")


if __name__ == "__main__":
    from safetensors.torch import load_file

    from checkpoint.hub import find_model

    main()
