"""Weights in every layout, as cpu/ multiplies them."""

import torch

from cpu import native
from quant import Quantized
from testing.tensors import laid_out, stands_for


def stored(
    w: torch.Tensor, layout: int | str, group: int = 64
) -> tuple[torch.Tensor | Quantized, torch.Tensor]:
    """W [N, K] in this layout, and the numbers that it stands for."""
    q = w.bfloat16() if layout == "bfloat16" else laid_out(w, layout, group)
    return q, stands_for(q, w[:1])[0]


def is_whole(w: torch.Tensor | Quantized) -> bool:
    """Whether W is multiplied as whole numbers."""
    return isinstance(w, Quantized) and (w.values.dtype == torch.int8 or w.bits == 4)


def has_tiles() -> bool:
    """Whether products are made by tiles here."""
    return bool(native.LONG.in_dll(native.library(), "has_tiles").value)


def rounding_of_x(w: torch.Tensor | Quantized, x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    """[T, N]: how far a product is off at most because x has 16 bits beside whole numbers: each
    2^-16 of the largest of its stretch."""
    off = torch.zeros(len(x), len(W), dtype=torch.float64)
    if not is_whole(w):
        return off
    order = torch.arange(w.columns) if w.order is None else w.order
    stretch = min(native.as_quantized(w).group, native.STRETCH)
    for columns in order.split(stretch):
        largest = x[:, columns].abs().amax(1, keepdim=True)
        off += 2**-16 * largest.double() * W[:, columns].abs().sum(1)
    return off
