"""Tensors as they may lie in memory, and weights in every layout."""

import math
from typing import Any

import torch
from torch import Tensor

from kernels import Ops
from kvcache import Store
from quant import FORMATS, Quantized, quantize


def amid(x: Tensor, fill: float = 1000.0) -> Tensor:
    """The same numbers, not contiguous, among others that must not be used."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), fill, dtype=x.dtype)
    wide[..., :-3] = x
    return wide[..., :-3]


def poison(store: Store) -> Store:
    """Fill a store with numbers that no result may depend on."""
    for part in store.parts:
        part.fill_(math.nan if part.is_floating_point() else 77)
    return store


def attend(
    ops: Ops, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any, layer: int
) -> torch.Tensor:
    """Attention of q, k and v that are rotated already."""
    return ops.attend(torch.cat((q, k, v), 1), k.shape[1], None, metadata, layer)


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

OTHER_LAYOUTS = ["INT8 in groups", "INT8 with zeros", "INT4 in order", "INT8 by INT8", "FP8 by FP8"]
OTHER_LAYOUTS += ["INT8 with fractions", "INT4 with fractions"]  # zeros that are not whole
LAYOUTS = [16, *FORMATS, *OTHER_LAYOUTS]  # of weights


def laid_out(w: torch.Tensor, layout: int | str, group: int) -> torch.Tensor | Quantized:
    """W: [N, K] as it is, as `quantize` makes it, or as other programs' folders may have it."""
    N, K = w.shape
    M = -(-K // group)
    if layout == 16:
        return w
    if layout in FORMATS:
        return quantize(w, layout, group)
    if layout == "INT4 in order":
        q = quantize(w, 4, group)
        return q._replace(scale=q.scale.half(), order=torch.randperm(K))
    if layout == "INT8 by INT8":
        return quantize(w, 8)._replace(input_bits=8)
    if layout == "FP8 by FP8":
        return quantize(w, "fp8")._replace(input_bits=8)
    if layout == "INT4 with fractions":
        q = quantize(w, 4, group)
        return q._replace(scale=q.scale.float() * 1.01, zero=q.zero + torch.rand(N, M))
    values = torch.randint(-128, 128, (N, K), dtype=torch.int8)
    scale = torch.rand(N, M) / 64
    if layout == "INT8 with fractions":
        return Quantized(8, values, scale, zero=torch.randn(N, M) * 50, columns=K, group=group)
    if layout == "INT8 in groups":
        return Quantized(8, values, scale, zero=None, columns=K, group=group)
    zero = torch.randint(-128, 128, (N, M), dtype=torch.int16)
    return Quantized(8, values, scale.half(), zero=zero, columns=K, group=group)


def stands_for(w: torch.Tensor | Quantized, x: torch.Tensor) -> Tensors:
    """The numbers of W, of x as W multiplies it, and of the sum of their sizes: float64."""
    wide = w.double() if isinstance(w, torch.Tensor) else w.dequantize(torch.float64)
    if isinstance(w, Quantized) and w.input_bits == 8:
        values, scale = FORMATS[w.bits].round(x)
        x = values.double() * scale.double()
    x = x.double()
    return wide, x, x.abs() @ wide.abs().T


def heads_first(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """[L, N, S, G, D], in memory with all tokens of a head together."""
    L, N, S, G, D = shape
    return torch.empty((L, G, N, S, D), dtype=dtype, device=device).permute(0, 2, 3, 1, 4)
