"""INT8 and INT4 numbers: fewer bytes for the same weights, keys and values.

A decoding step takes as long as reading the weights takes, and a cache fills the memory that is
left. So numbers x are stored as small integers q on a grid, with one grid for each row or group,
and converted back where they are used:

    x ≈ (q − zero) · scale

    8 bits   q in [−127, 127]                     scale = max|x| / 127          zero = 0
    4 bits   q in [0, 15], two in a byte          scale = (max x − min x) / 15
                                                  zero = −round(min x / scale)
    FP8      q in E4M3                            scale = max|x| / 448          zero = 0
    NF4      x ≈ code[q] · scale, q in [0, 15]    scale = max|x|

Invariant: |error| ≤ scale / 2 in 8 and 4 bits. A scale is rounded *up* to 16 bits before q is
computed with it: a grid with a smaller scale would not reach max x.

  - Weights W [N, K]: 8 bits (FP8, too) have a scale for each row, N (K + 2) bytes; 4 bits a scale
    and a zero for each group of 32, 64 or 128, N (K / 2 + 4 ⌈K / group⌉) bytes: a quarter of
    16 bits, *plus scales*. NF4 has no zeros.
  - Keys and values: a scale (and in 4 bits a zero) for each token and head. 4-bit keys have one for
    each group of 16 numbers, and their zeros count quarters of a grid step: errors are smaller.
  - Activations may be rounded as INT8 or FP8 weights are, with a scale for each token (W8A8; Xiao
    et al. 2022).

Not covered: how to round with care (GPTQ, AWQ: train/calibrate.py). `python -m train.quantize`
writes a quantized model's folder; `python quant.py` shows bytes and errors of a matrix.

NF4: Dettmers et al. 2023 (arXiv:2305.14314). FP8: Micikevicius et al. 2022 (2209.05433).

    N rows of W, out_features · K columns, in_features · M = ⌈K / group⌉ groups of a row
    D head size · T tokens of a step
"""

import math
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import UserError

SMALLEST_SCALE = 1e-30  # nothing is divided by 0; all-zero groups are exact
# A grid ends there, or by less than a step of bfloat16 beyond: float32's largest is larger still.
LARGEST = torch.finfo(torch.bfloat16).max
LARGEST_ZERO = 2000  # grid steps: x / scale is then precise to 1e-4 steps in float32
PARTS = 4  # of a grid step, which the zeros of 4-bit keys count: up to 4 · 2,000, in int16
SLAB = 1 << 22  # weights that are rounded at a time: it takes several times their memory


# ---- Grids and numbers ---------------------------------------------------------------------------


def affine_grid(x: Tensor, group: int, parts: int = 1) -> tuple[Tensor, Tensor]:
    """The 4-bit grids of x: [..., K] -> scale, bfloat16[..., M]; zero, int16[..., M].

    parts: zeros count 1 / parts of a grid step.
    """
    grouped = groups(x.float(), group)
    low = grouped.amin(-1)
    high = grouped.amax(-1)  # both are quicker than `aminmax` of a dimension
    scale = high / 15 - low / 15  # high − low may be beyond float32
    farthest = torch.maximum(high, -low)
    farthest.nan_to_num_(math.nan, math.nan)  # ∞, too: no clamp is to hide it
    scale = torch.maximum(scale, farthest / LARGEST_ZERO)  # so zero is at most LARGEST_ZERO
    # Near float32's end the grid might reach half a step beyond x, to infinity: there it is
    # coarser, with 7 steps from 0 to LARGEST on either side.
    scale.masked_fill_(farthest > 1e38, LARGEST / 7)
    scale = safe_scale(scale, 7)
    zero = -(low / scale * parts).round_()
    return scale, zero.to(torch.int16)


def symmetric_scale(x: Tensor, steps: int) -> Tensor:
    """The scale of a grid with max |x| at `steps`: [..., K] -> bfloat16[..., 1]."""
    largest = x.abs().amax(-1, keepdim=True).float()
    largest.nan_to_num_(math.nan, math.nan)  # ∞, too: no clamp is to hide it
    return safe_scale(largest / steps, steps)


def safe_scale(scale: Tensor, steps: int) -> Tensor:
    """A float32 scale -> bfloat16, rounded up: a smaller one would not reach the largest number.

    At least SMALLEST_SCALE; and at most so large that `steps` times the scale is a float32.
    """
    return round_up(scale.clamp_(SMALLEST_SCALE, LARGEST / steps))


def round_up(x: Tensor) -> Tensor:
    """The next bfloat16 that is not below x ≥ 0, a float32."""
    # A bfloat16 is the upper half of a float32's bits: carry into them, and clear the lower half.
    bits = (x.view(torch.int32) + 0xFFFF) & -0x10000
    return bits.view(torch.float32).bfloat16()


def groups(x: Tensor, group: int) -> Tensor:
    """[..., K] -> [..., M, group]. The last group is padded with its own last number."""
    missing = -x.shape[-1] % group
    if missing:
        x = F.pad(x, (0, missing), mode="replicate")
    return x.unflatten(-1, (-1, group))


def spread(x: Tensor, group: int | None, columns: int) -> Tensor:
    """Scales or zeros of groups, [..., M] -> of columns, [..., K]. A single one stays [..., 1]."""
    if x.shape[-1] == 1:
        return x
    return x.repeat_interleave(group, -1)[..., :columns]


def pack4(q: Tensor) -> Tensor:
    """Two numbers below 16 in a byte: uint8[..., K] -> uint8[..., ⌈K / 2⌉]."""
    q = F.pad(q, (0, q.shape[-1] % 2))
    lower_half = q[..., ::2]
    upper_half = q[..., 1::2]
    return lower_half | upper_half << 4


def unpack4(packed: Tensor) -> Tensor:
    """uint8[..., J] -> uint8[..., 2 J]."""
    lower_half = packed & 15
    upper_half = packed >> 4
    return torch.stack((lower_half, upper_half), -1).flatten(-2)


@cache
def nf4(device: torch.device | str = "cpu") -> Tensor:
    """NormalFloat: float32[16], ascending: quantiles of N(0, 1), eight above 0 and seven below.

    Scaled to ±1. It rounds where the authors round, so it is their table to the bit.
    """
    # The authors' choice: the middle of the last of 16 equal parts of [0, 1] is 1 − 1/32, that of
    # 15 parts 1 − 1/30. This is the mean of both.
    outermost = 0.9677083

    def quantiles(count: int) -> Tensor:
        """From the outermost down to 0."""
        probabilities = torch.linspace(outermost, 0.5, count)
        return torch.special.ndtri(probabilities.double()).float()

    above = quantiles(9)
    below = quantiles(8)
    code = torch.cat((-below[:-1], above.flip(0))) / above[0]
    return code.to(device)


# ---- Keys and values -----------------------------------------------------------------------------

Bits = tuple[int, int]  # bits of keys, bits of values
WIDTHS = {"16": (16, 16), "8": (8, 8), "8/4": (8, 4), "4": (4, 4)}  # as `--kv-bits` names them
KEY_GROUP = 16  # numbers of a 4-bit key that share a scale; a value has one


def widths(name: str | int) -> Bits:
    """'16', '8', '8/4' or '4' -> bits of keys and of values. UserError for others."""
    if str(name) not in WIDTHS:
        raise UserError(
            f"kv_bits is {name!r}: it must be 16, 8, 4 or 8/4 (8-bit keys, 4-bit values)"
        )
    return WIDTHS[str(name)]


def int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [..., D] -> int8[..., D] and a scale for each vector, bfloat16[..., 1]."""
    scale = symmetric_scale(x, 127)
    q = (x.float() / scale).round_()
    return q.to(torch.int8), scale


def from_int8(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that int8 stored: [..., D]."""
    x = values * scale.float()
    return x.to(dtype)


def int4(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A cache's vectors x: [..., D] -> `round4`; group None: a vector shares a scale.

    Several groups mark a key: its zeros count 1 / PARTS of a grid step.
    """
    D = x.shape[-1]
    group = group or D
    return round4(x, group, PARTS if group < D else 1)


def round4(x: Tensor, group: int, parts: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x: [..., K] on 4-bit grids -> packed, uint8[..., ⌈K / 2⌉]; scale, bfloat16[..., M]; zero,
    int16[..., M], which counts 1 / parts of a grid step."""
    K = x.shape[-1]
    scale, zero = affine_grid(x, group, parts)
    q = x.float() / spread(scale, group, K)
    q += spread(zero, group, K) / parts
    q = q.round_().clamp_(0, 15)
    return pack4(q.to(torch.uint8)), scale, zero


def from_int4(
    packed: Tensor,
    scale: Tensor,
    zero: Tensor,
    dtype: torch.dtype = torch.float32,
    group: int | None = None,
) -> Tensor:
    """The numbers that int4 stored, with its `group`: [..., D]."""
    D = 2 * packed.shape[-1]
    parts = PARTS if zero.shape[-1] > 1 else 1  # several groups: a key
    steps = unpack4(packed) - spread(zero / parts, group, D)
    x = steps * spread(scale.float(), group, D)
    return x.to(dtype)


# ---- Weights -------------------------------------------------------------------------------------

Kind = int | str  # how weights are stored: 8, 4, "fp8", "nf4"; 16: not quantized
STORED: dict[Kind, torch.dtype] = {
    8: torch.int8,
    4: torch.uint8,
    "fp8": torch.float8_e4m3fn,
    "nf4": torch.uint8,
}
DEFAULT_GROUP: dict[Kind, int] = {4: 128, "nf4": 64}  # columns that share a scale


def stored_bits(dtype: torch.dtype, zeros: bool) -> Kind:
    """The kind of weights that are stored in this dtype, with or without zeros."""
    if dtype == torch.uint8:
        return 4 if zeros else "nf4"
    return 8 if dtype == torch.int8 else "fp8"


class Quantized(NamedTuple):
    """A matrix W [N, K] in 8 or 4 bits. `dequantize(*q)` converts it back to floating point.

    `quantize` makes bfloat16 scales, and zeros only for 4 bits. Folders of other programs
    (checkpoint/layouts.py) may have scales of any floating-point type, groups and zeros for int8,
    too, and columns that are stored in another order.
    """

    values: Tensor  # int8 or float8_e4m3fn[N, K]; uint8[N, ⌈K / 2⌉], two a byte
    scale: Tensor  # [N, M]
    zero: Tensor | None  # int16[N, M], or float32; None: every zero is 0, and uint8 is NF4
    columns: int  # K (two numbers a byte do not say whether K is odd)
    group: int  # columns that share a scale
    order: Tensor | None = None  # int64[K]: stored column j multiplies x[order[j]]; None: x[j]
    input_bits: int = 16  # 8: each row of x is rounded as W is before the product (W8A8)

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
        make = partial(torch.empty, device=device)
        dtype = STORED[bits]
        M = math.ceil(K / group)
        width = math.ceil(K / 2) if dtype == torch.uint8 else K
        return cls(
            values=make(N, width, dtype=dtype),
            scale=make(N, M, dtype=scale),
            zero=make(N, M, dtype=torch.int16) if zeros or bits == 4 else None,
            columns=K,
            group=group,
            order=make(K, dtype=torch.int64) if ordered else None,
        )

    @property
    def bits(self) -> Kind:
        return stored_bits(self.values.dtype, self.zero is not None)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included."""
        return sum(part.nbytes for part in self if isinstance(part, Tensor))

    def rows(self, which: Tensor | slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """Some rows of W, dequantized: float[R, K]."""
        zero = None if self.zero is None else self.zero[which]
        values = self.values[which]
        scale = self.scale[which]
        part = self._replace(values=values, scale=scale, zero=zero)
        return dequantize(*part, dtype=dtype)


def round_nf4(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """W: [N, K] in the sixteen numbers of NF4 -> packed, uint8[N, ⌈K / 2⌉]; scale, [N, M]."""
    scale = symmetric_scale(groups(w, group), 1).squeeze(-1)
    code = nf4(w.device)
    halfway = (code[1:] + code[:-1]) / 2
    steps = w.float() / spread(scale, group, w.shape[1])
    q = torch.bucketize(steps, halfway)
    return pack4(q.to(torch.uint8)), scale


def round_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """W: [N, K] in E4M3 (3 mantissa bits, at most 448) -> float8_e4m3fn[N, K]; scale, [N, 1]."""
    scale = symmetric_scale(w, 448)
    return (w.float() / scale).to(torch.float8_e4m3fn), scale


@torch.no_grad()
def quantize(w: Tensor, bits: Kind, group: int | None = None) -> Quantized:
    """W: float[N, K], rounded to nearest. In 8 bits and FP8 a whole row shares a scale.

    group: columns that share a scale; None: `DEFAULT_GROUP`. UserError for unknown bits, or a
    weight that holds numbers that are not finite.
    """
    if bits not in STORED:
        raise UserError(f"bits is {bits!r}: weights are stored in {', '.join(map(str, STORED))}")
    if not torch.stack(torch.aminmax(w)).isfinite().all():
        raise UserError(
            f"a weight of {list(w.shape)} cannot be quantized: it holds numbers that are not finite"
        )
    columns = w.shape[1]
    if bits not in DEFAULT_GROUP:
        group = columns
    elif group is None:
        group = DEFAULT_GROUP[bits]
    rounding = {
        8: int8,
        4: partial(round4, group=group),
        "fp8": round_fp8,
        "nf4": partial(round_nf4, group=group),
    }[bits]
    slabs = [rounding(rows) for rows in w.split(max(1, SLAB // columns))]
    parts = [torch.cat(part) for part in zip(*slabs)]
    zero = parts[2] if len(parts) == 3 else None
    return Quantized(parts[0], parts[1], zero, columns, group)


def dequantize(
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    columns: int,
    group: int,
    order: Tensor | None = None,
    input_bits: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The fields of a Quantized -> the matrix that they stand for, float[N, K]."""
    q = values
    if q.dtype == torch.uint8:
        q = unpack4(q)[:, :columns]
        if zero is None:
            q = nf4(q.device)[q.int()]
    if zero is not None:
        q = q - spread(zero, group, columns)
    w = q.float() * spread(scale.float(), group, columns)
    w = w.to(dtype)
    if order is None:
        return w
    return torch.empty_like(w).index_copy_(1, order, w)


def rounded_product(x: Tensor, w: Quantized) -> Tensor:
    """x Wᵀ with each row of x rounded as W is, to INT8 or FP8: [T, K] -> [T, N].

    W has a scale for each row, no zeros, and its columns in order. Sums are float32's:
    PyTorch's product of integers saturates on a CPU without VNNI.
    """
    values, scale = int8(x) if w.bits == 8 else round_fp8(x)
    y = values.float() @ w.values.T.float()
    y = y * scale.float() * w.scale.T.float()
    return y.to(x.dtype)


def main() -> None:
    """The demonstration: bytes and error of each kind, for the token embedding of tiny."""
    tensors = load_file(find_model("tiny") / "model.safetensors")
    w = tensors["model.embed_tokens.weight"].float()
    for bits in STORED:
        q = quantize(w, bits)
        error = (dequantize(*q) - w).norm() / w.norm()
        print(f"{bits:>4}: {q.nbytes / w.numel():.2f} bytes a weight, error {error:.1%}")


if __name__ == "__main__":
    from safetensors.torch import load_file

    from checkpoint.hub import find_model

    main()
