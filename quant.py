"""INT8 and INT4 numbers: fewer bytes for the same weights, keys and values.

A decoding step takes as long as reading the weights takes, and a cache fills the memory that is left. So numbers are
stored as small integers on a grid, one grid for each row or group, and become numbers again where they are used:

    x ≈ (q − zero) · scale          8 bits: q in [−127, 127], zero = 0           4 bits: q in [0, 15], two in a byte
    scale = max|x| / 127    or    (max x − min x) / 15,   zero = −round(min x / scale)        |error| ≤ scale / 2

Scales of 16 bits are rounded *up* before q is computed with them (rounded down, max x would not be reached). A scale is
at least 1e-30: all-zero groups are exact, and nothing is divided by 0.

  - Weights W [N, K]: 8 bits have a scale for each row, N (K + 2) bytes; 4 bits a scale and a zero for each group of 32,
    64 or 128, N (K / 2 + 4 ⌈K / group⌉) bytes: a quarter of 16 bits, *plus scales*.
  - Keys and values: a scale (and a zero) for each token and head; 4-bit keys have one for each group of 16 numbers,
    with zeros in quarters of a step: whole zeros would cost nearly twice the perplexity.

`python quant.py NAME --bits 4 --method gptq --data FILE --out DIR` writes a smaller model folder, `--table` measures
all widths and methods, and with no flags it shows what the bits cost on the embedded model (train/quantize.py).

Not covered: NF4, FP8, quantized activations (SmoothQuant).

    N rows of W, out_features · K columns, in_features · M = ⌈K / group⌉ groups of a row · D head size
"""
if __name__ == "__main__":                              # slow imports follow: a signal ends them in silence
    from shell import begin
    begin()

import sys
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 1e-30                                            # the smallest scale: what is smaller counts as 0
FAR = 2000                                              # steps from 0 at most: float32 still tells a step's thousandth
PARTS = 4                                               # of a step, which the zeros of a vector's groups count
SLAB = 1 << 22                                          # numbers that are quantized at a time
MOST8, MOST4 = 2.679e36, 4.851e37               # the largest scales: 127 (7) steps stay below float32's largest number


# ---- Grids and numbers -----------------------------------------------------------------------------------------------

def round_up(x: Tensor) -> Tensor:
    """The next bfloat16 that is not below x ≥ 0, a float32."""
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32).bfloat16()


def groups(x: Tensor, group: int) -> Tensor:
    """[..., K] -> [..., M, group], the last group filled up with its last number, which changes no grid."""
    if short := -x.shape[-1] % group:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], short)), -1)
    return x.unflatten(-1, (-1, group))


def spread(x: Tensor, group: int | None, columns: int) -> Tensor:
    """One for each group [..., M] -> one for each column [..., K], or one for all of them."""
    return x if x.shape[-1] == 1 else x.repeat_interleave(group, -1)[..., :columns]


def grid4(x: Tensor, group: int, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Grids of groups of 4-bit numbers [..., K]: scale, bfloat16[..., M]; zero, in parts of a step, int16[..., M]."""
    low, high = (edge.float() for edge in torch.aminmax(groups(x, group), dim=-1))
    far = torch.maximum(high, -low)
    scale = torch.maximum(high / 15 - low / 15, far / FAR).clamp_(min=TINY).masked_fill_(far > 1e38, MOST4)
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

    group: numbers that share a scale, None for all of a vector. Zeros of several groups are in PARTS of a step, which
    numbers up to 1e38 can have.
    """
    D = x.shape[-1]
    parts = PARTS if D > (group or D) else 1
    scale, zero = grid4(x, group or D, parts)
    q = (x.float() / spread(scale, group, D)).add_(spread(zero, group, D) / parts).round_().clamp_(0, 15)
    return pack4(q.to(torch.uint8)), scale, zero


def from_int8(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return (values * scale.float()).to(dtype)


def from_int4(packed: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype = torch.float32,
              group: int | None = None) -> Tensor:
    zero = zero / (PARTS if zero.shape[-1] > 1 else 1)
    scale, zero = (spread(x, group, 2 * packed.shape[-1]) for x in (scale.float(), zero))
    return ((unpack4(packed) - zero) * scale).to(dtype)


# ---- Weights ---------------------------------------------------------------------------------------------------------

class Quantized(NamedTuple):
    """A matrix W [N, K] in 8 or 4 bits. `dequantize(*q)` makes numbers of it again."""
    values: Tensor                                      # int8[N, K]       or uint8[N, ⌈K / 2⌉], two numbers a byte
    scale: Tensor                                       # bfloat16[N, 1]   or bfloat16[N, M]
    zero: Tensor | None                                 # None             or int16[N, M]
    columns: int                                        # K, which half a byte does not tell
    group: int                                          # columns that share a scale

    @classmethod
    def empty(cls, N: int, K: int, bits: int, group: int, device: torch.device | str = "cpu") -> "Quantized":
        """Uninitialized."""
        group = K if bits == 8 else group
        shape, make = (N, -(-K // group)), partial(torch.empty, device=device)
        if bits == 8:
            return cls(make(N, K, dtype=torch.int8), make(shape, dtype=torch.bfloat16), None, K, group)
        return cls(make(N, -(-K // 2), dtype=torch.uint8), make(shape, dtype=torch.bfloat16),
                   make(shape, dtype=torch.int16), K, group)

    @property
    def bits(self) -> int:
        return 8 if self.zero is None else 4

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included."""
        return sum(part.nbytes for part in self[:3] if part is not None)

    def rows(self, which: Tensor | slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """Some rows of W, as numbers: float[R, K]."""
        parts = (None if part is None else part[which] for part in self[:3])
        return dequantize(*parts, self.columns, self.group, dtype)


def round4(w: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """W: [N, K] -> the nearest numbers of their grids, uint8[N, ⌈K / 2⌉], scale and zero."""
    (scale, zero), K = grid4(w, group), w.shape[1]
    q = (w.float() / spread(scale, group, K)).round_().add_(spread(zero, group, K)).clamp_(0, 15)
    return pack4(q.to(torch.uint8)), scale, zero


@torch.no_grad()
def quantize(w: Tensor, bits: int, group: int = 128) -> Quantized:
    """W: float[N, K], rounded to the nearest. 8 bits have a scale for each row, whatever `group`. ValueError for no
    numbers."""
    if bits not in (8, 4):
        raise ValueError(f"bits is {bits!r}: weights are stored in 8 or 4")
    if group < 1:
        raise ValueError(f"group is {group}: at least one number must share a scale")
    if w.ndim != 2 or 0 in w.shape or not w.is_floating_point():
        raise ValueError(f"a weight of {w.dtype} {list(w.shape)} cannot be quantized: "
                         "it must be a matrix of floating-point numbers")
    columns, parts = w.shape[1], []
    for rows in w.split(max(1, SLAB // columns)):                       # in between, a row takes several times its room
        if not (rows.sum(dtype=torch.float32).isfinite() or rows.isfinite().all()):     # a sum is quicker
            raise ValueError(f"a weight of {list(w.shape)} cannot be quantized: it holds numbers that are not finite")
        parts.append(int8(rows) if bits == 8 else round4(rows, group))
    values, scale, *zero = (torch.cat(part) for part in zip(*parts))
    return Quantized(values, scale, zero[0] if zero else None, columns, columns if bits == 8 else group)


def dequantize(values: Tensor, scale: Tensor, zero: Tensor | None, columns: int, group: int,
               dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that a quantized matrix stands for: float[N, K]."""
    if zero is None:
        return from_int8(values, scale, dtype)
    q, zero, scale = unpack4(values)[:, :columns], spread(zero, group, columns), spread(scale.float(), group, columns)
    return ((q - zero) * scale).to(dtype)


# ---- Keys and values -------------------------------------------------------------------------------------------------

Bits = tuple[int, int]                                  # of keys, of values
WIDTHS = {"16": (16, 16), "8": (8, 8), "8/4": (8, 4), "4": (4, 4)}   # as `--kv-bits` names them
GROUP = 16                                              # numbers of a 4-bit key that share a scale; all of a value do


def widths(name: str | int) -> Bits:
    """'16', '8', '8/4' or '4' -> bits of keys and of values. ValueError for others."""
    if str(name) not in WIDTHS:
        raise ValueError(f"kv_bits is {name!r}: it must be 16, 8, 4 or 8/4 (8-bit keys, 4-bit values)")
    return WIDTHS[str(name)]


if __name__ == "__main__":                              # the command line that stores whole models
    from train.quantize import main
    sys.exit(main())
