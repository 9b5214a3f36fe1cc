"""Keys and values in 8 or 4 bits: a cache of small integers that its owner handles like a tensor.

A cache holds [..., D]: for every layer, head and place a vector of D numbers. Quantized (quant.py), a vector is its integers and a
scale, for 4 bits a zero too. They lie in tensors of their own, side by side, alike in all dimensions but the last:

    16 bits              [..., D]                                                      2 D     bytes a vector
     8 bits              [..., D] int8,        [..., 1] scale                          D + 2
     4 bits, values      [..., D / 2] uint8,   [..., 1] scale,   [..., 1] zero         D / 2 + 4
     4 bits, keys        [..., D / 2] uint8,   [..., M] scale,   [..., M] zero         D / 2 + 4 M,   M = ⌈D / 16⌉

So whatever a cache does with whole vectors, it does with each of these: a view of some rows, a block copied, a gather by slots. Only
two things look inside: storing rounds (`copy_`, `index_copy_`), and reading for attention makes numbers again (`to`), of one layer and
one step at a time. Truncating, sharing and forking know nothing of it.

Every vector has scales of its own, from its own numbers alone. So what is stored does not depend on which tokens came
together, and a text gives the same logits however its prompt was cut, shared, or read again.

Keys suffer more than values: an error in a key moves the weight of a token, one in a value is averaged over all of them;
and a few numbers of every key are much larger than the others, which a scale for the whole vector would round away.
Hence 8/4, keys of 8 bits and values of 4; and hence 4-bit keys have a scale for each 16 numbers. SmolLM2's perplexity
rises by 2 % from 4-bit keys, by 12 % if a key has a single scale, and by 0.6 % from 4-bit values
(`python -m train.perplexity` shows what each costs).

Invariant: what is read is within half a step of what was stored, and does not change until it is stored again.

Not covered: 2 bits; a scale for each channel of the keys over some tokens (Liu et al. 2024, KIVI, arXiv:2402.02750),
which loses half as much, but can round a key only when its group of tokens is full.

    D head size · M groups of a key · bits: of keys, of values
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quant import from_int4, from_int8, int4, int8

Bits = tuple[int, int]                                  # of keys, of values
WIDTHS = {"16": (16, 16), "8": (8, 8), "8/4": (8, 4), "4": (4, 4)}   # as they are asked for
GROUP = 16                                              # numbers of a 4-bit key that share a scale; all of a value do


def widths(name: str | int) -> Bits:
    """'16', '8', '8/4' or '4' -> bits of keys and of values. ValueError for others."""
    if str(name) not in WIDTHS:
        raise ValueError(f"kv_bits is {name!r}: it must be 16, 8, 4 or 8/4 (8-bit keys, 4-bit values)")
    return WIDTHS[str(name)]


def vector_bytes(D: int, bits: int, dtype: torch.dtype, group: int | None = None) -> int:
    """Of one vector; 16 bits stand for `dtype`, whatever it has. group: GROUP for a key, None for a value."""
    return {16: D * dtype.itemsize, 8: D + 2, 4: D // 2 + 4 * -(-D // (group or D))}[bits]


def store(shape: Sequence[int], bits: int, device: torch.device | str, dtype: torch.dtype,
          group: int | None = None) -> "Tensor | KVStore":
    """Room for vectors, uninitialized: a tensor, or in its place a KVStore. group: GROUP for keys, None for values.

    ValueError for an odd number of 4-bit numbers.
    """
    *lead, D = shape
    if bits == 16:
        return torch.empty(shape, device=device, dtype=dtype)
    if bits == 4 and D % 2:
        raise ValueError(f"head_dim is {D}: two numbers of 4 bits share a byte, so it must be even; use 8 bits")
    M = -(-D // (group or D))
    kinds = {8: [(D, torch.int8), (1, torch.bfloat16)],
             4: [(D // 2, torch.uint8), (M, torch.bfloat16), (M, torch.int16)]}
    return KVStore([torch.empty((*lead, width), device=device, dtype=kind) for width, kind in kinds[bits]])


class KVStore:
    """Vectors [..., D] of 8 or 4 bits. The methods are a tensor's own, for all dimensions but the last."""

    def __init__(self, parts: Sequence[Tensor]):
        self.parts = tuple(parts)                       # integers, scales, and zeros if they have 4 bits
        self.group = GROUP if self.parts[1].shape[-1] > 1 else None

    def _each(self, change: Callable[[Tensor], Tensor]) -> "KVStore":
        return KVStore([change(part) for part in self.parts])

    def __getitem__(self, where: Any) -> "KVStore":
        return self._each(lambda part: part[where])

    def __setitem__(self, where: Any, other: "KVStore") -> None:
        for part, new in zip(self.parts, other.parts):
            part[where] = new

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def transpose(self, a: int, b: int) -> "KVStore":
        return self._each(lambda part: part.transpose(a, b))

    def flatten(self, first: int, last: int) -> "KVStore":
        return self._each(lambda part: part.flatten(first, last))

    def index_select(self, dim: int, index: Tensor) -> "KVStore":
        return self._each(lambda part: part.index_select(dim, index))

    def unbind(self) -> "list[KVStore]":
        return [KVStore(parts) for parts in zip(*(part.unbind() for part in self.parts))]

    def copy_(self, x: Tensor) -> None:
        """Store x: [..., D], rounded."""
        for part, numbers in zip(self.parts, self._round(x)):
            part.copy_(numbers)

    def index_copy_(self, dim: int, index: Tensor, x: Tensor) -> None:
        """Store x at these places."""
        for part, numbers in zip(self.parts, self._round(x)):
            part.index_copy_(dim, index, numbers)

    def _round(self, x: Tensor) -> tuple[Tensor, ...]:
        return int8(x) if len(self.parts) == 2 else int4(x, self.group)

    def to(self, dtype: torch.dtype) -> Tensor:
        """The numbers, for attention: float[..., D]."""
        return from_int8(*self.parts, dtype) if len(self.parts) == 2 else from_int4(*self.parts, dtype, self.group)

    @property
    def dtype(self) -> torch.dtype:
        """What it takes without another rounding before its own."""
        return torch.float32

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)
