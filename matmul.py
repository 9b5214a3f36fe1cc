"""x Wᵀ: the product in which a decoding step spends its time.

A step of one token multiplies one row by every weight of the model, so it costs what it costs to *read* the weights once:
a model of S bytes on a machine that reads B bytes a second makes at most B / S tokens a second. And a step of five rows should
cost hardly more than a step of one, since it reads the same bytes: speculative decoding and batching live on that.

On a GPU the library sees to both. On a CPU it does not: a weight must lie as the inner loop reads it, and putting it in that order costs more than
multiplying. `Linear.pack()` does it once, when a model is loaded: for native.py, or, where there is no compiler, for oneDNN's packed product, if
this build of the library and this CPU have it. `python matmul.py` shows the difference.

Weights of 8 and 4 bits have products of their own (quantmatmul.py).

Invariant: the weights are in memory once, plain or packed (in oneDNN's order a head that is the embedding, too, stays plain beside it, for rows of
that order cannot be read); `path(rows)` tells which product a step of so many rows takes.

Not covered: training; float64 (which is for proofs) and float16 use the plain order.

    T rows (tokens of a step) · K in_features · N out_features
"""
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import native

def default_dtype(stored: torch.dtype, device: torch.device, small: bool = False, bits: int = 16) -> torch.dtype:
    """The checkpoint's dtype on a GPU. On a CPU float32 for a small model, which it costs nothing; for weights of 8 and 4 bits, which become float32 as
    they are multiplied; and where there are no instructions for the checkpoint's, which is then many times slower: and says so."""
    if device.type != "cpu" or stored == torch.float64:
        return stored
    if small or bits < 16:
        return torch.float32
    if stored == torch.bfloat16 and hasattr(torch.cpu, "_is_avx512_bf16_supported") and torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    if stored != torch.float32:
        warnings.warn(f"this CPU has no fast {str(stored)[6:]} products: computing in float32 (--dtype {str(stored)[6:]} insists)", stacklevel=3)
    return torch.float32


class Linear(nn.Module):
    """y = x Wᵀ + b, with W: [N, K] held plain, or packed for this CPU.

    `weight` is uninitialized until somebody fills it; where it is packed it is None.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False,
                 device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype), requires_grad=False) if bias else None
        self.own: native.Weight | None = None
        self.packed: Tensor | None = None                            # opaque: oneDNN's own order

    def forward(self, x: Tensor) -> Tensor:                          # [T, K] -> [T, N]
        if self.own is not None:
            return native.product(x, self.own)
        return F.linear(x, self.weight, self.bias) if self.packed is None else packed_product(x, self.packed, self.bias)

    def rows(self, which: Tensor) -> Tensor:
        """Some rows of W: an embedding's look-up. int64[R] -> [R, K]."""
        return self.own.rows(which).to(self.dtype) if self.weight is None else F.embedding(which, self.weight)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has of this product: all have N rows."""
        return {kind: whole for kind, whole in (("weight", self.weight), ("bias", self.bias)) if whole is not None}

    def path(self, rows: int) -> str:
        """The product that a step of so many rows takes."""
        return "native" if self.own is not None else "plain" if self.packed is None else "packed"

    @torch.no_grad()
    def pack(self, keep: bool = False) -> None:
        """Put the weight in the order in which this CPU multiplies fastest, and let the plain one go unless it is to be kept beside it."""
        if self.own is not None or self.packed is not None:
            return
        self.dtype = self.weight.dtype
        if native.multiplies(self.dtype, self.weight):
            self.own = native.Weight.of(self.weight, self.bias)
        elif self.weight.device.type == "cpu":
            self.packed = packs(self.weight)
        if (self.own is not None or self.packed is not None) and not keep:
            self.weight = None

    def unpack(self) -> None:
        """The plain weight, which was kept, counts again."""
        self.own = self.packed = None


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def packs(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's order; None if this build of the library, or this CPU, has no product by it: that is found by doing it."""
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    try:                            # the order depends on the number of rows that is announced; the one for 4 serves 1 to 512 rows well
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 4)
        for T in (1, 5):
            packed_product(weight.new_zeros(T, weight.shape[1]), packed)
    except (RuntimeError, AttributeError):
        return None
    return packed


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
    data = torch.ones(megabytes * 2**17, dtype=torch.int64)         # whose sum takes a core less time than bringing them
    return data.nbytes / min(seconds(data.sum, repeats=1) for _ in range(9))


@torch.inference_mode()
def main() -> None:
    roof = read_bandwidth()
    print(f"this machine reads {roof / 1e9:.1f} GB/s with {torch.get_num_threads()} threads")
    layers = [Linear(2048, 2048) for _ in range(16)]                # together larger than the caches: 268 MB
    for layer in layers:
        nn.init.normal_(layer.weight)
    rows = [1, 2, 4, 5, 8, 16, 64]
    inputs = [torch.randn(t, 2048) for t in rows]
    size = sum(layer.weight.nbytes for layer in layers)
    times = []
    for _ in range(2):
        times.append([seconds(lambda: [layer(x) for layer in layers]) for x in inputs])
        for layer in layers:
            layer.pack()
    print(f"{size / 1e6:.0f} MB of float32 weights; milliseconds, and how many times as long as reading them once")
    print(f"{'rows':>6}{'plain':>16}{layers[0].path(1):>16}")
    for t, *each in zip(rows, *times):
        print(f"{t:6}" + "".join(f"{1e3 * spent:9.1f} {spent * roof / size:5.1f}x" for spent in each))


if __name__ == "__main__":
    main()
