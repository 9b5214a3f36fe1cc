"""INT8 and INT4 numbers: fewer bytes for the same weights, keys and values.

A decoding step takes as long as reading the weights takes, and a cache fills the memory that is left. So numbers are stored as
small integers on a grid, a grid for each row, group or channel, and become numbers again where they are used:

    x ≈ (q − zero) · scale          8 bits: q in [−127, 127], zero = 0           4 bits: q in [0, 15], two in a byte

    |x − (q − zero) · scale| ≤ scale / 2        scale = max|x| / 127     or      (max x − min x) / 15,   zero = −round(min x / scale)

Zero is a whole number, so the grid is {k · scale} for whole k and 4 bits are sixteen neighbours of it, wherever they lie: keys
whose channel is far from 0 lose nothing. Scales of 16 bits are rounded *up* before q is computed with them (rounded down, max x
would not be reached any more). A scale is at least 1e-30: all-zero groups are exact, and nothing is ever divided by 0.

  - Weights: 8 bits have a scale for each row of W; 4 bits a scale and a zero for each group of 32, 64 or 128 numbers of a
    row, the last of which may be short. Bytes of W [N, K]: N (K + 2), or N (K / 2 + 4 ⌈K / group⌉). INT4 is a quarter of 16 bits, *plus scales*.
  - Keys and values: a scale (and a zero) for each token and head, as they come. 4-bit keys fare better with one for each channel
    over a block of tokens, since some channels of keys are large in all of them (KIVI): `int4(keys, dim=-2)`.

`python quant.py NAME --bits 4 --method gptq --data FILE --out DIR` writes a smaller model folder, `--table` measures all of them, and with
no flags it shows what the bits cost on the embedded model: train/quantize.py, with GPTQ and AWQ in train/calibrate.py. The products are
in quantmatmul.py, those of a GPU in weightonly.py.

Not covered: NF4, FP8, quantized activations (SmoothQuant).

Frantar et al. 2023, GPTQ (arXiv:2210.17323); Lin et al. 2023, AWQ (2306.00978); Liu et al. 2024, KIVI (2402.02750).

    N rows of W, out_features · K columns, in_features · M = ⌈K / group⌉ groups of a row · D head size
"""
from shell import begin

begin(__name__)                                         # what follows takes its time: a signal ends it in silence

import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 1e-30                                            # the smallest scale: what is smaller counts as 0
FAR = 2000                                              # steps from 0 at most, so that float32 still tells a step's thousandth
SLAB = 1 << 22                                          # numbers that are quantized at a time
MOST8, MOST4 = 2.679e36, 4.851e37                       # scales so large that 127 (7) steps just stay below float32's largest number


# ---- Grids and numbers ----------------------------------------------------------------------------------------------------------

def round_up(x: Tensor) -> Tensor:
    """The next bfloat16 that is not below x ≥ 0, a float32."""
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32).bfloat16()


def grid8(x: Tensor) -> Tensor:
    """The scale of symmetric 8-bit numbers over the last dimension: bfloat16[..., 1]."""
    return round_up((x.abs().amax(-1, keepdim=True).float() / 127).clamp_(TINY, MOST8))


def grid4(x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """The grid of 4-bit numbers over `dim`, which becomes 1: scale, bfloat16; zero, int16."""
    low, high = (edge.float() for edge in torch.aminmax(x, dim=dim, keepdim=True))
    far = torch.maximum(high, -low)
    scale = torch.maximum(high / 15 - low / 15, far / FAR).clamp_(min=TINY).masked_fill_(far > 1e38, MOST4)
    scale = round_up(scale)
    return scale, (-(low / scale).round_()).to(torch.int16)


def pack4(q: Tensor) -> Tensor:
    """Two numbers below 16 in a byte, the first in its lower half: uint8[..., K] -> uint8[..., ⌈K / 2⌉]."""
    q = F.pad(q, (0, q.shape[-1] % 2))
    return q[..., ::2] | q[..., 1::2] << 4


def unpack4(packed: Tensor) -> Tensor:
    """uint8[..., J] -> uint8[..., 2 J]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys or values [..., D] -> int8[..., D] and a scale for each vector, bfloat16[..., 1]."""
    scale = grid8(x)
    return int8_at(x, scale), scale


def int4(x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """Keys or values [..., D] -> packed, uint8[..., D / 2]; scale, bfloat16, and zero, int16, with `dim` become 1.

    dim -1: a grid for each vector. dim -2: for [..., n, D], a grid for each channel over n tokens.
    """
    scale, zero = grid4(x, dim)
    return pack4(round4(x, scale, zero)), scale, zero


def int8_at(x: Tensor, scale: Tensor) -> Tensor:
    """The nearest of an 8-bit grid's numbers: int8, of x's shape."""
    return (x.float() / scale).round_().to(torch.int8)


def round4(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The nearest of a grid's sixteen numbers: uint8, of x's shape."""
    return (x.float() / scale).round_().add_(zero).clamp_(0, 15).to(torch.uint8)


def from_int8(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return (values * scale.float()).to(dtype)


def from_int4(packed: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return ((unpack4(packed) - zero) * scale.float()).to(dtype)


# ---- Weights --------------------------------------------------------------------------------------------------------------------

class Quantized(NamedTuple):
    """A matrix W [N, K] in 8 or 4 bits. `dequantize(*q)` makes numbers of it again."""
    values: Tensor                                      # int8[N, K]       or uint8[N, ⌈K / 2⌉], two numbers a byte
    scale: Tensor                                       # bfloat16[N, 1]   or bfloat16[N, M]
    zero: Tensor | None                                 # None             or int16[N, M]
    columns: int                                        # K, which half a byte does not tell
    group: int                                          # columns that share a scale


def check(bits: int, group: int) -> None:
    if bits not in (8, 4):
        raise ValueError(f"bits is {bits!r}: weights are stored in 8 or 4")
    if group < 1:
        raise ValueError(f"group is {group}: at least one number must share a scale")


def groups(w: Tensor, group: int) -> Tensor:
    """[N, K] -> [N, M, group], the last group filled up with its last number, which changes no grid."""
    short = -w.shape[1] % group
    return torch.cat((w, w[:, -1:].expand(-1, short)), 1).unflatten(1, (-1, group)) if short else w.unflatten(1, (-1, group))


def spread(x: Tensor, group: int, columns: int) -> Tensor:
    """One for each group [N, M] -> one for each column [N, K]."""
    return x.repeat_interleave(group, 1)[:, :columns]


def grid(w: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor | None]:
    """The (scale, zero) that rounding to nearest uses for W: [N, K]."""
    if bits == 8:
        return grid8(w), None
    scale, zero = grid4(groups(w, group))
    return scale[..., 0], zero[..., 0]


@torch.no_grad()
def quantize(w: Tensor, bits: int, group: int = 128) -> Quantized:
    """W: float[N, K], rounded to the nearest. 8 bits have a scale for each row, whatever `group`. ValueError for numbers that are none."""
    check(bits, group)
    if w.ndim != 2 or 0 in w.shape or not w.is_floating_point():
        raise ValueError(f"a weight of {w.dtype} {list(w.shape)} cannot be quantized: it must be a matrix of floating-point numbers")
    columns, parts = w.shape[1], []
    for rows in w.split(max(1, SLAB // columns)):                               # a few at a time: what is in between takes several times their room
        scale, zero = grid(rows, bits, group)
        if not rows.isfinite().all():
            raise ValueError(f"a weight of {list(w.shape)} cannot be quantized: it holds numbers that are not finite")
        parts.append((int8_at(rows, scale), scale) if bits == 8 else
                     (pack4(round4(rows, spread(scale, group, columns), spread(zero, group, columns))), scale, zero))
    values, scale, *zero = (torch.cat(part) for part in zip(*parts))
    return Quantized(values, scale, zero[0] if zero else None, columns, columns if bits == 8 else group)


def dequantize(values: Tensor, scale: Tensor, zero: Tensor | None, columns: int, group: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that a quantized matrix stands for: float[N, K]."""
    if zero is None:
        return (values * scale.float()).to(dtype)
    return ((unpack4(values)[:, :columns] - spread(zero, group, columns)) * spread(scale.float(), group, columns)).to(dtype)


if __name__ == "__main__":                              # the command line that stores whole models
    from train.quantize import main
    sys.exit(main())
