"""x Wᵀ with weights of 8 or 4 bits: less to read.

On a CPU `pack()` puts them in native.py's order, where whole numbers become float32 in a core's registers, and a row takes hardly longer than reading
them. On a GPU up to 64 rows have a kernel (weightonly.py). Everywhere else, and in float64, weights become numbers, a tile of rows at a time, for the
library's product: that is for memory, not for speed.

A product of whole numbers on both sides would be quicker for many rows on some CPUs; it would round x, and to a number of digits that depends on the
CPU's instructions. Here a product's error is the same everywhere.

Invariant: the weights are in memory once; `path(rows)` tells which product a step of so many rows takes.

    T rows (tokens of a step) · K in_features · N out_features
"""
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import native
from kernels import on_gpu
from quant import Quantized, dequantize, quantize

TILE = {8: 1 << 21, 4: 1 << 17}                         # weights of so many bits that become numbers at a time


def scratch(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for so many numbers, the same every time: fresh memory costs more than what is done in it."""
    return _scratch(dtype, device)[:size] if size <= max(TILE.values()) else torch.empty(size, dtype=dtype, device=device)


@cache
def _scratch(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(max(TILE.values()), dtype=dtype, device=device)


class QuantizedLinear(nn.Module):
    """y = x Wᵀ + b, with W in 8 or 4 bits (quant.py); x and y are of `dtype`.

    values and scale are uninitialized until somebody fills them; after `pack()` values may be None.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, device: torch.device | str = "cpu",
                 dtype: torch.dtype = torch.float32, bits: int = 8, group: int = 128):
        super().__init__()
        self.in_features, self.out_features, self.bits, self.dtype = in_features, out_features, bits, dtype
        self.group = in_features if bits == 8 else group
        shape = (out_features, -(-in_features // self.group))
        empty = lambda *size, dtype: torch.empty(size, device=device, dtype=dtype)
        self.register_buffer("values", empty(out_features, in_features, dtype=torch.int8) if bits == 8 else
                             empty(out_features, -(-in_features // 2), dtype=torch.uint8))
        self.register_buffer("scale", empty(*shape, dtype=torch.bfloat16))
        self.register_buffer("zero", empty(*shape, dtype=torch.int16) if bits == 4 else None)
        self.bias = nn.Parameter(empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self.own: native.Weight | None = None

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has of this product: all have N rows."""
        kinds = (("weight", self.values), ("weight_scale", self.scale), ("weight_zero", self.zero), ("bias", self.bias))
        return {kind: whole for kind, whole in kinds if whole is not None}

    @property
    def nbytes(self) -> int:
        """What the weights take in memory, scales included."""
        return self.own.nbytes if self.own is not None else sum(part.nbytes for part in (self.values, self.scale, self.zero) if part is not None)

    def put(self, q: Quantized) -> None:
        """Fill it with these numbers."""
        for place, numbers in zip((self.values, self.scale, self.zero), q):
            if place is not None:
                place.copy_(numbers)

    def rows(self, which: Tensor | slice, dtype: torch.dtype | None = None) -> Tensor:
        """Some rows of W, as numbers: an embedding's look-up. float[R, K]."""
        if self.own is not None:
            return self.own.rows(which).to(dtype or self.dtype)
        zero = None if self.zero is None else self.zero[which]
        return dequantize(self.values[which], self.scale[which], zero, self.in_features, self.group, dtype or self.dtype)

    def path(self, rows: int) -> str:
        """The product that a step of so many rows takes: "native" and "kernel" (weightonly.py) read the integers; "tiles" makes numbers of some rows of W
        at a time."""
        if self.own is not None:
            return "native"
        if on_gpu(self.scale.device):
            from weightonly import serves
            return "kernel" if serves(rows, self.in_features, self.bits, self.group, self.dtype) else "tiles"
        return "tiles"

    def forward(self, x: Tensor) -> Tensor:                                      # [T, K] -> [T, N]
        path = self.path(len(x))
        if path == "native":
            return native.product(x, self.own)
        if path == "kernel":
            from weightonly import product
            return product(x, self.values, self.scale, self.zero, self.group, self.bias)
        wide = x if x.dtype == torch.float64 or on_gpu(x.device) else x.float()         # a CPU may multiply 16 bits many times slower
        y = self._tiles(wide)
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def _tiles(self, x: Tensor) -> Tensor:
        """As many rows of W at a time as a CPU's cache holds become numbers; for 8 bits whole ones, and the scale comes last."""
        N, K, tile = self.out_features, self.in_features, max(16, (TILE[self.bits] if x.device.type == "cpu" else 1 << 26) // self.in_features)
        y = x.new_empty(len(x), N)
        for at in range(0, N, tile):
            which = slice(at, at + tile)
            if self.bits == 4:
                y[:, which] = F.linear(x, self.rows(which, x.dtype))
            else:
                values = self.values[which]
                y[:, which] = F.linear(x, scratch(values.numel(), x.dtype, x.device).view(-1, K).copy_(values))
        return y if self.bits == 4 else y.mul_(self.scale.view(-1))

    @torch.no_grad()
    def pack(self, keep: bool = False) -> None:
        """Put the numbers in the order in which this CPU multiplies fastest, and let the plain ones go unless they are to be kept beside them."""
        if self.own is None and native.multiplies(self.dtype, self.values, self.group):
            self.own = native.Weight.of(self.values, self.bias, self.scale, self.zero, self.in_features, self.group)
            if not keep:
                self.values = self.scale = self.zero = None

    def unpack(self) -> None:
        """The plain numbers, which were kept, count again."""
        self.own = None


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: what a step of T rows costs with fewer bits, and which product it takes.

@torch.inference_mode()
def main() -> None:
    from matmul import read_bandwidth, seconds
    roof, rows, weight = read_bandwidth(), [1, 4, 16, 64, 256], torch.randn(2048, 2048)
    print("67 million weights; milliseconds, and how many times as long as reading them once")
    for bits in (8, 4):
        layers = [QuantizedLinear(2048, 2048, bits=bits) for _ in range(16)]
        for layer in layers:
            layer.put(quantize(weight, bits))
            layer.pack()
        for T in rows:
            x = torch.randn(T, 2048)
            spent = seconds(lambda: [layer(x) for layer in layers], 5)
            print(f"  INT{bits} {T:4} rows{1e3 * spent:8.1f} {spent * roof / sum(layer.nbytes for layer in layers):6.1f}x  {layers[0].path(T)}")


if __name__ == "__main__":
    main()
