"""x Wᵀ: the product in which a decoding step spends its time.

A step of one token multiplies one row by every weight of the model, so it costs what it costs to *read* the weights once:
a model of S bytes on a machine that reads B bytes a second makes at most B / S tokens a second. And a step of five rows should
cost hardly more than a step of one, since it reads the same bytes: speculative decoding and batching live on that.

On a GPU the library sees to both. On a CPU it does not, and in float32 no order of the weights is best for both:

  - One row. The library's product of a row and Wᵀ keeps one core busy. W as it is, cut into blocks of 64 rows, is a batch of small products
    W_block xᵀ, which all cores share: then W is read nearly as fast as memory gives it. Up to four rows, as where drafts are verified, no
    other order is much faster.
  - More rows. These want a weight that lies as the inner loop reads it, and putting it in order costs more than multiplying. oneDNN's
    blocked order replaces the plain one, once. But for one row it takes up to twice as long as blocks, the more the fewer columns W has.

`Linear.pack()` gets ready for a lone text: a few rows a step, and its prompt, for which oneDNN reads a plain weight, too, up to a tenth slower.
`Linear.reorder()` is for who makes many texts at once; engine.py decides. `python matmul.py` shows the difference.

A model that lies in a core's cache, as a draft may, is another case: nothing is read from memory, and what a product of one row costs
is the call. The library's own product of x and Wᵀ, with Wᵀ laid out row after row, is the lightest: three times as fast there.

With weights of 8 or 4 bits there is less to read. In bfloat16 the library has products of a few rows with integers. In float32, and for
more rows, `QuantizedLinear` multiplies whole numbers: a row of x is written in 16 bits, as two digits to the base 256, each digit is
multiplied with the INT8 weights, which CPUs do four times as fast as floats, and

    x Wᵀ ≈ step · (Σ low · w + 256 Σ high · w) · scale,         step = max|x| / 32639         (a bfloat16 x would be 60 times coarser)

All these sums are exact, so a row's result does not depend on the rows beside it, to the bit. On a GPU up to 64 rows have a kernel
(weightonly.py). Everywhere else (INT8 of very many rows, INT4 in float32 or on an older CPU, float64) weights become numbers, a tile of
rows at a time, for the library's product.

Invariant: the weights are in memory once, plain or packed (a packed head that is the embedding, too, stays plain beside it); `path(rows)`
tells which product a step of so many rows takes.

Not covered: training; float64 (which is for proofs) and float16 use the plain order.

    T rows (tokens of a step) · K in_features · N out_features · B base of the digits
"""
import math
import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import on_gpu
from quant import Quantized, dequantize, quantize, unpack4

FEW = 4                                                 # up to so many rows, blocks of a plain weight are about as fast as any order
TILE = {8: 1 << 21, 4: 1 << 17}                         # weights of so many bits that become numbers at a time


def can_pack(weight: Tensor) -> bool:
    """Whether this build of PyTorch has oneDNN's packed product for such a weight."""
    return (weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
            and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"))


class Linear(nn.Module):
    """y = x Wᵀ + b, with W: [N, K] held plain, and for a lone text seen as blocks of rows, or packed for this CPU.

    `weight` is uninitialized until somebody fills it; where it is packed it may be None.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False,
                 device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype), requires_grad=False) if bias else None
        self.blocks: Tensor | None = None                            # [N / 64, 64, K], the weight itself: for one row
        self.packed: Tensor | None = None                            # opaque: oneDNN's own order
        self.light: Tensor | None = None                             # [N, K], laid out by columns: for one row and a small model

    def forward(self, x: Tensor) -> Tensor:                          # [T, K] -> [T, N]
        if self.blocks is not None and len(x) <= FEW:
            return self._in_blocks(x)
        if self.packed is None and self.blocks is None:
            return F.linear(x, self.weight, self.bias)
        if self.light is not None and len(x) == 1:
            return F.linear(x, self.light, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight if self.packed is None else self.packed, self.bias, "none", [], "")

    def _in_blocks(self, x: Tensor) -> Tensor:
        """Each block of W times xᵀ: [N / 64, 64, T], which is yᵀ."""
        y = torch.bmm(self.blocks, x.t().expand(len(self.blocks), -1, -1)).view(self.out_features, len(x)).t().contiguous()
        return y if self.bias is None else y + self.bias

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has of this product: all have N rows."""
        return {kind: whole for kind, whole in (("weight", self.weight), ("bias", self.bias)) if whole is not None}

    def path(self, rows: int) -> str:
        """The product that a step of so many rows takes."""
        if self.blocks is not None and rows <= FEW:
            return "blocks"
        return "plain" if self.packed is None else "light" if self.light is not None and rows == 1 else "packed"

    @torch.no_grad()
    def pack(self, keep: bool = False, small: bool = False) -> None:
        """Get ready for this CPU. In float32: for a lone text, with the weight as it is. In bfloat16, where the model is small, and where N has
        no blocks: in oneDNN's order, and the plain weight let go (`keep`: not, an embedding uses it too)."""
        if self.blocks is not None or self.packed is not None or not can_pack(self.weight):
            return
        block, wide = math.gcd(self.out_features, 64), self.weight.dtype == torch.float32
        if small and wide:
            self.light = self.weight.detach().t().contiguous().t()
        if wide and not small and block >= 8 and torch.backends.mkl.is_available():
            self.blocks = self.weight.detach().view(-1, block, self.in_features)
        else:
            self._reorder(keep)

    def reorder(self, keep: bool = False) -> None:
        """Get ready for many rows a step: a weight that lies in blocks of rows is put in oneDNN's order, and the plain one let go."""
        if self.blocks is not None:
            self.blocks = None
            self._reorder(keep)

    @torch.no_grad()
    def _reorder(self, keep: bool) -> None:
        # The order depends on the number of rows that is announced; the one for 4 serves 1 to 512 rows well.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), 4)
        if not keep:
            self.weight = None


# ---- Quantized weights ----------------------------------------------------------------------------------------------------------

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
        """The product that a step of so many rows takes: "kernel" (weightonly.py) or "fused", which read the integers; "packed" or "integers"
        (as stored), which add whole numbers; or "tiles", which makes numbers of some rows of W at a time."""
        if self.scale is not None and on_gpu(self.scale.device):
            from weightonly import serves
            return "kernel" if serves(rows, self.in_features, self.bits, self.group, self.dtype) else "tiles"
        if self.fused is not None and (self.bits == 4 or 0 < rows <= 4):
            return "fused"
        many = self.dtype == torch.bfloat16 and rows > 128                       # then making numbers pays
        return "packed" if self.packed is not None else "integers" if self.sums is not None and not many else "tiles"

    def forward(self, x: Tensor) -> Tensor:                                      # [T, K] -> [T, N]
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
            y = packed_product(digit, self.packed, self.steps, 1 << bits - 1)    # [2 T, N]
            return torch.add(y[:T], y[T:], alpha=1 << bits).mul_(largest).to(x.dtype)
        signed = digit.sub_(128).view(torch.int8)                                # this product takes signed digits only
        parts = [torch._int_mm(signed, part.T) for part in self.values.split(4096)]                              # in parts it is faster
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)                 # int32[2 T, N]
        y = y if bits == 8 else y + 64 * self.sums
        return torch.add(y[:T], y[T:].float(), alpha=1 << bits).mul_(self.steps).mul_(largest).to(x.dtype)

    @torch.no_grad()
    def pack(self, keep: bool = False, small: bool = False) -> None:
        """Get ready for this CPU: for the library's products with integers, as they are stored or in its own order (`keep`: an embedding
        reads rows of W, so they stay as they are)."""
        if self.path(1) != "tiles" or self.scale.device.type != "cpu":
            return
        if self.dtype == torch.bfloat16:
            self.fused = fused8(self) if self.bits == 8 else None if keep else fused4(self)
        if self.dtype == torch.float64 or self.bits == 4 or not 1 < self.in_features < 1 << 16 or not digit_bits():
            return                                                               # 2^16 products fill 32 bits; of one, _int_mm is wrong
        self.steps = self.scale[:, 0].float() / most(digit_bits())               # [N]
        if keep or self.dtype == torch.bfloat16:
            self.sums = self.values.sum(1, dtype=torch.int32)
        else:
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
# The demonstration: what a step of T rows costs, over what reading the weights once costs.

def seconds(run: Callable[[], object], repeats: int = 9) -> float:
    """Median seconds of `run()`, after one call that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def read_bandwidth(megabytes: int = 512) -> float:
    """Bytes a second at which this machine reads memory that is in no cache, at best: the roof of decoding."""
    data = torch.ones(megabytes * 2**18)
    return data.nbytes / min(seconds(data.max, repeats=1) for _ in range(9))


@torch.inference_mode()
def main() -> None:
    roof = read_bandwidth()
    print(f"this machine reads {roof / 1e9:.1f} GB/s with {torch.get_num_threads()} threads")
    plain = [Linear(2048, 2048) for _ in range(16)]                 # together larger than the caches: 268 MB
    small = [QuantizedLinear(2048, 2048, dtype=torch.bfloat16) for _ in plain]
    for layer, quantized in zip(plain, small):
        nn.init.normal_(layer.weight)
        quantized.put(quantize(layer.weight, 8))
        quantized.pack()
    rows = [1, 2, 4, 5, 8, 16, 64]
    inputs = [torch.randn(t, 2048) for t in rows]
    size = sum(layer.weight.nbytes for layer in plain)
    library = [seconds(lambda: [F.linear(x, layer.weight) for layer in plain]) for x in inputs]
    for layer in plain:
        layer.pack()
    blocks = [seconds(lambda: [layer(x) for layer in plain]) for x in inputs]
    for layer in plain:
        layer.reorder()
    packed = [seconds(lambda: [layer(x) for layer in plain]) for x in inputs]
    integers = [seconds(lambda: [layer(x) for layer in small]) for x in map(torch.Tensor.bfloat16, inputs)]
    print(f"{size / 1e6:.0f} MB of float32 weights; milliseconds, and how many times as long as reading them once")
    print(f"{'rows':>6}{'F.linear':>16}{'lone text':>16}{'reordered':>16}{'INT8':>16}")
    for t, *times in zip(rows, library, blocks, packed, integers):
        print(f"{t:6}" + "".join(f"{each * 1e3:9.1f} {each * roof / size:5.1f}x" for each in times) + f"  {small[0].path(t)}")


if __name__ == "__main__":
    main()
