"""x Wᵀ with weights of 8 or 4 bits: less to read, and four ways to multiply.

A few rows by INT8 are native.py's, where there is a compiler: the integers become float32 in a core's registers, and a row takes hardly longer than
reading them. For more rows, and without it, `QuantizedLinear` multiplies whole numbers: a row of x is written in 16 bits, as two digits to the base
256, each digit is multiplied with the INT8 weights, which CPUs do four times as fast as floats, and

    x Wᵀ ≈ step · (Σ low · w + 256 Σ high · w) · scale,         step = max|x| / 32639         (a bfloat16 x would be 60 times coarser)

All these sums are exact, so a row's result does not depend on the rows beside it, to the bit. In bfloat16 the library has products of a few rows
with integers, too. On a GPU up to 64 rows have a kernel (weightonly.py). Everywhere else (INT8 of very many rows, INT4 in float32 or on an older
CPU, float64) weights become numbers, a tile of rows at a time, for the library's product.

As with floats (matmul.py), `pack()` gets ready for a lone text, with the integers as they are, and `reorder()` for many, in the library's order.

Invariant: the weights are in memory once; `path(rows)` tells which product a step of so many rows takes.

    T rows (tokens of a step) · K in_features · N out_features · B base of the digits
"""
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import native
from kernels import on_gpu
from matmul import LARGE, five
from quant import Quantized, dequantize, quantize, unpack4

TILE = {8: 1 << 21, 4: 1 << 17}                         # weights of so many bits that become numbers at a time


def digits(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x: float32[T, K] in whole steps, each written with two digits of 8 or 7 bits: uint8[2 T, K], the low ones first; and max|x|: [T, 1].

    x ≈ max|x| / most · (low − B/2 + B · (high − B/2)): both digits count from the middle, so that one zero point serves both. In a
    row of zeros the digits are anything, and max|x| is 0. Few operations: in a step of one row each costs a tenth of a small product.
    """
    (T, K), base = x.shape, 1 << bits
    largest = x.abs().amax(1, keepdim=True)                                      # [T, 1]
    middle = constant(2.0**23 + base // 2 * (base + 1))                          # beyond 2^23 a float32's last bits are a whole number
    whole = torch.addcdiv(middle, x, largest, value=most(bits)).view(torch.int32)                # [T, K]: 2^23's bits, and 0 to B² − 1
    if bits == 7:
        whole += whole & 127 << 7                                                # the high digit moves to the next byte
    return whole.view(torch.uint8).as_strided((2, T, K), (1, 4 * K, 4)).reshape(2 * T, K), largest


def most(bits: int) -> int:
    """What two highest digits stand for, counted from the middle: 32639, or 8127 with 7 bits."""
    return ((1 << bits - 1) - 1) * ((1 << bits) + 1)


@cache
def constant(value: int | float) -> Tensor:
    """A tensor of one number, made once: in a step of one row, making it would cost as much as a small product."""
    return torch.tensor([value])


def row_sums(values: Tensor) -> Tensor:
    """int8[N, K] -> int32[N]. The library makes 32 bits of what it adds first, so: some rows at a time."""
    return torch.cat([part.sum(1, dtype=torch.int32) for part in values.split(max(1, LARGE // values.shape[1]))])


def packed_product(x: Tensor, packed: Tensor, scale: Tensor, zero: int) -> Tensor:
    """(x − zero) Wᵀ · scale, of x: uint8[T, K] and packed int8 weights: float32[T, N]."""
    return torch.ops.onednn.qlinear_pointwise.default(x, 1.0, zero, packed, scale, constant(0), None, 1.0, 0, torch.float32, "none", [], "")


def scratch(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for so many numbers, the same every time: fresh memory costs more than what is done in it."""
    return _scratch(dtype, device)[:size] if size <= max(TILE.values()) else torch.empty(size, dtype=dtype, device=device)


@cache
def _scratch(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(max(TILE.values()), dtype=dtype, device=device)


@cache
def digit_bits() -> int:
    """The largest digits whose products with INT8 weights this CPU adds exactly: 8 bits; 7 where it adds two of them in 16 bits; 0: none."""
    if not (hasattr(torch.ops.onednn, "qlinear_pointwise") and hasattr(torch, "_int_mm")):
        return 0
    weight = torch.full((64, 256), 127, dtype=torch.int8)
    weight[1::2] = -128
    for bits in (8, 7):
        x, zero = torch.full((2, 256), (1 << bits) - 1, dtype=torch.uint8), 1 << bits - 1
        try:
            one = packed_product(x, torch.ops.onednn.qlinear_prepack(weight, None), torch.ones(64), zero)
            two = torch._int_mm((x - 128).view(torch.int8), weight.T)
        except RuntimeError:
            return 0
        # Two products of digits of 8 bits do not fit 16 bits, so this shows what an older CPU does to them.
        if (one == (zero - 1) * weight.sum(1)).all() and (two == (2 * zero - 129) * weight.sum(1)).all():
            return bits
    return 0


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
        self.few: Tensor | None = None                                           # `values`, if native.py multiplies a few rows by them
        self.packed: Tensor | None = None                                        # oneDNN's own order
        self.sums: Tensor | None = None                                          # int32[N]: of the rows of `values`
        self.fused: Callable[[Tensor], Tensor] | None = None                     # a product of the library's with integers
        self.held = 0                                                            # bytes of what only such a product has

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has of this product: all have N rows."""
        kinds = (("weight", self.values), ("weight_scale", self.scale), ("weight_zero", self.zero), ("bias", self.bias))
        return {kind: whole for kind, whole in kinds if whole is not None}

    @property
    def nbytes(self) -> int:
        """What the weights take in memory, scales included."""
        own = sum(part.nbytes for part in (self.values, self.scale, self.zero) if part is not None)
        return own + self.held + (self.out_features * self.in_features if self.packed is not None else 0)

    def put(self, q: Quantized) -> None:
        """Fill it with these numbers."""
        for place, numbers in zip((self.values, self.scale, self.zero), q):
            if place is not None:
                place.copy_(numbers)

    def rows(self, which: Tensor | slice) -> Tensor:
        """Some rows of W, as numbers: an embedding's look-up. float[R, K]."""
        zero = None if self.zero is None else self.zero[which]
        return dequantize(self.values[which], self.scale[which], zero, self.in_features, self.group, self.dtype)

    def path(self, rows: int) -> str:
        """The product that a step of so many rows takes: "kernel" (weightonly.py), "native" or "fused", which read the integers; "packed" or "integers"
        (as stored), which add whole numbers; or "tiles", which makes numbers of some rows of W at a time."""
        if self.scale is not None and on_gpu(self.scale.device):
            from weightonly import serves
            return "kernel" if serves(rows, self.in_features, self.bits, self.group, self.dtype) else "tiles"
        if self.few is not None and rows <= native.ROWS:
            return "native"
        if self.fused is not None and (self.bits == 4 or 0 < rows <= 4):
            return "fused"
        many = self.dtype == torch.bfloat16 and rows > 128                       # then making numbers pays
        return "packed" if self.packed is not None else "integers" if self.sums is not None and not many else "tiles"

    def forward(self, x: Tensor) -> Tensor:                                      # [T, K] -> [T, N]
        if self.few is not None and x.shape[0] <= native.ROWS:
            y = native.product(x, self.few, self.scale)
            return y if self.bias is None else y + self.bias
        path = self.path(len(x))
        if path == "kernel":
            from weightonly import product
            return product(x, self.values, self.scale, self.zero, self.group, self.bias)
        y = self.fused(x.contiguous()) if path == "fused" else self._tiles(x) if path == "tiles" else self._integers(x)
        return y if self.bias is None else y + self.bias

    def _tiles(self, x: Tensor) -> Tensor:
        """As many rows of W at a time as a CPU's cache holds become numbers; for 8 bits whole ones, and the scale comes last."""
        N, K, tile = self.out_features, self.in_features, max(16, (TILE[self.bits] if x.device.type == "cpu" else 1 << 26) // self.in_features)
        y = x.new_empty(len(x), N)
        for at in range(0, N, tile):
            which = slice(at, at + tile)
            if self.bits == 4:
                y[:, which] = F.linear(x, self.rows(which))
            else:
                values = self.values[which]
                y[:, which] = F.linear(x, scratch(values.numel(), x.dtype, x.device).view(-1, K).copy_(values))
        return y if self.bits == 4 else y.mul_(self.scale.view(-1))

    def _integers(self, x: Tensor) -> Tensor:
        """Two digits of x, each times W: exact sums of whole numbers, then one rounding to float32 each."""
        T, bits = len(x), digit_bits()
        digit, largest = digits(x.float(), bits)                                 # [2 T, K], [T, 1]
        if self.packed is not None:
            y = packed_product(five(digit, self.in_features * self.out_features), self.packed, self.steps, 1 << bits - 1)    # [2 T or 5, N]
            return torch.add(y[:T], y[T:2 * T], alpha=1 << bits).mul_(largest).to(x.dtype)
        signed = digit.sub_(128).view(torch.int8)                                # this product takes signed digits only
        parts = [torch._int_mm(signed, part.T) for part in self.values.split(4096)]                              # in parts it is faster
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)                 # int32[2 T, N]
        y = y if bits == 8 else y + 64 * self.sums
        return torch.add(y[:T], y[T:].float(), alpha=1 << bits).mul_(self.steps).mul_(largest).to(x.dtype)

    def pack(self, keep: bool = False) -> None:
        """Get ready for a lone text on this CPU: with the integers as they are, where native.py serves them; otherwise as for many."""
        if self.few is None and self.path(1) == "tiles" and self.scale.device.type == "cpu":
            if self.bits == 8 and self.dtype in (torch.float32, torch.bfloat16) and native.multiplies(self.values):
                self.few = self.values
            self._ready(keep)

    def reorder(self, keep: bool = False) -> None:
        """Get ready for many rows a step."""
        if self.few is not None:
            self.few = None
            self._ready(keep)

    @torch.no_grad()
    def _ready(self, keep: bool) -> None:
        """The library's products with integers, as they are stored or in its own order (`keep`: an embedding reads rows of W, so they stay)."""
        large = self.in_features * self.out_features > 2 * LARGE and self.in_features < 1 << 16 and digit_bits() == 8
        stored = keep or self.few is not None or self.dtype == torch.bfloat16 and not large      # as they are; in oneDNN's order large ones are
                                                                                 # 1.2 to 2.9 times as fast up to some 200 rows, and a seventh slower beyond
        if self.dtype == torch.bfloat16 and self.few is None and (stored or self.bits == 4):
            self.fused = fused8(self) if self.bits == 8 else None if keep else fused4(self)
        if self.dtype == torch.float64 or self.bits == 4 or not 1 < self.in_features < 1 << 16 or not digit_bits():
            return                                                               # 2^16 products fill 32 bits; of one, _int_mm is wrong
        self.steps = self.scale[:, 0].float() / most(digit_bits())               # [N]
        self.sums = row_sums(self.values) if stored else None
        if not stored:
            self.packed, self.values = torch.ops.onednn.qlinear_prepack(self.values, None), None


def fused8(linear: QuantizedLinear) -> Callable[[Tensor], Tensor] | None:
    """The library's product of bfloat16 with INT8 as it is stored. Where K is no multiple of 16 it would read beyond the end of a row."""
    if not hasattr(torch, "_weight_int8pack_mm") or linear.in_features % 16:
        return None
    values, scale = linear.values, linear.scale.view(-1)
    return lambda x: torch._weight_int8pack_mm(x, values, scale)


def fused4(linear: QuantizedLinear) -> Callable[[Tensor], Tensor] | None:
    """The library's product of bfloat16 with INT4, in its own order, where this CPU is quick at it: (q − zero) · scale = (q − 8) · scale + rest.

    A ragged last group becomes groups half or a quarter as long, which come out even. `linear` lets go of its own numbers.
    """
    K, N, group = linear.in_features, linear.out_features, linear.group
    even = next((g for g in (128, 64, 32) if group % g == 0 and K % g == 0), 0)
    if not even or N % 16 or not hasattr(torch, "_weight_int4pack_mm_for_cpu") or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    values = torch._convert_weight_to_int4pack_for_cpu(unpack4(linear.values)[:, :K].int(), 1)               # uint8[N, K / 2]
    scale = linear.scale.float()
    both = torch.stack((scale, (8 - linear.zero) * scale), -1).repeat_interleave(group // even, 1)           # [N, ·, 2]
    both = both[:, :K // even].transpose(0, 1).to(torch.bfloat16, copy=True).contiguous()                    # [K / even, N, 2]
    linear.held, linear.values, linear.scale, linear.zero = values.nbytes + both.nbytes, None, None, None
    return lambda x: torch._weight_int4pack_mm_for_cpu(x, values, even, both)


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: what a step of T rows costs with fewer bits, and which product it takes.

@torch.inference_mode()
def main() -> None:
    from matmul import read_bandwidth, seconds
    roof, rows, weight = read_bandwidth(), [1, 4, 16, 64, 256], torch.randn(2048, 2048)
    print("67 million weights, activations in bfloat16; milliseconds, and how many times as long as reading them once")
    for bits in (8, 4):
        layers = [QuantizedLinear(2048, 2048, dtype=torch.bfloat16, bits=bits) for _ in range(16)]
        for layer in layers:
            layer.put(quantize(weight, bits))
            layer.pack()
        for T in rows:
            x = torch.randn(T, 2048, dtype=torch.bfloat16)
            spent = seconds(lambda: [layer(x) for layer in layers], 5)
            print(f"  INT{bits} {T:4} rows{1e3 * spent:8.1f} {spent * roof / sum(layer.nbytes for layer in layers):6.1f}x  {layers[0].path(T)}")


if __name__ == "__main__":
    main()
