"""x Wᵀ: the product in which a decoding step spends its time.

A step of one token multiplies one row by every weight of the model, so it costs what it costs to *read* the weights once:
a model of S bytes on a machine that reads B bytes a second makes at most B / S tokens a second. And a step of five rows should
cost hardly more than a step of one, since it reads the same bytes: speculative decoding and batching live on that.

On a GPU the library sees to both. On a CPU it does not, and no order of the weights is best for both:

  - A few rows: W as it is, read on and on by each core (native.py). Of the library's products, the one of a row and Wᵀ keeps one core busy.
  - More rows. These want a weight that lies as the inner loop reads it, and putting it in order costs more than multiplying. oneDNN's
    blocked order replaces the plain one, once. For a few rows it takes up to twice as long, the more the fewer columns W has;
    with AVX-512 less if one to four rows are filled up to five, with zeros: five are what it reads memory fastest for.

`Linear.pack()` gets ready for a lone text: a few rows a step, and its prompt, which is the slower for it the shorter it is.
`Linear.reorder()` is for who makes many texts at once; engine.py decides. `python matmul.py` shows the difference. Where native.py finds no
compiler, everything is in oneDNN's order.

Weights of 8 and 4 bits have products of their own (quantmatmul.py).

Invariant: the weights are in memory once, plain or packed (a packed head that is the embedding, too, stays plain beside it); `path(rows)`
tells which product a step of so many rows takes.

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

FIVE = torch.backends.cpu.get_cpu_capability() == "AVX512"      # whether oneDNN multiplies five rows by a packed weight sooner than one
LARGE = 1 << 20                                         # numbers of W from which on that is worth a copy of x


def can_pack(weight: Tensor) -> bool:
    """Whether this build of PyTorch has oneDNN's packed product for such a weight."""
    return (weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
            and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"))


def default_dtype(stored: torch.dtype, device: torch.device, small: bool = False, bits: int = 16) -> torch.dtype:
    """The checkpoint's dtype on a GPU. On a CPU float32 for a small model, which it costs nothing; for weights of 8 bits, where native.py serves
    them; and where there are no instructions for the checkpoint's, which is then many times slower: and says so. For other weights of 8 and 4
    bits bfloat16, where there are instructions for it."""
    if device.type != "cpu" or stored == torch.float64:
        return stored
    fast = torch.cpu._is_avx512_bf16_supported() if hasattr(torch.cpu, "_is_avx512_bf16_supported") else False
    if small or bits == 8 and native.library() is not None:
        return torch.float32
    if fast and (bits < 16 or stored == torch.bfloat16):                            # integers are fastest beside it
        return torch.bfloat16
    if stored != torch.float32:
        warnings.warn(f"this CPU has no fast {str(stored)[6:]} products: computing in float32 (--dtype {str(stored)[6:]} insists)", stacklevel=3)
    return torch.float32


def five(x: Tensor, numbers: int) -> Tensor:
    """x: [T, K], with rows of zeros up to five, where that multiplies sooner by a packed weight of so many numbers."""
    return F.pad(x, (0, 0, 0, 5 - len(x))) if FIVE and len(x) < 5 and numbers > LARGE else x


class Linear(nn.Module):
    """y = x Wᵀ + b, with W: [N, K] held plain, or packed for this CPU.

    `weight` is uninitialized until somebody fills it; where it is packed it may be None.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False,
                 device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype), requires_grad=False) if bias else None
        self.few: Tensor | None = None                               # the weight itself, if native.py multiplies a few rows by it
        self.packed: Tensor | None = None                            # opaque: oneDNN's own order

    def forward(self, x: Tensor) -> Tensor:                          # [T, K] -> [T, N]
        if self.few is not None and x.shape[0] <= native.ROWS:
            y = native.product(x, self.few)
            return y if self.bias is None else y + self.bias
        if self.packed is None and self.few is None:
            return F.linear(x, self.weight, self.bias)
        if self.packed is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        y = torch.ops.mkldnn._linear_pointwise(five(x, self.in_features * self.out_features), self.packed, self.bias, "none", [], "")
        return y[:len(x)]

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has of this product: all have N rows."""
        return {kind: whole for kind, whole in (("weight", self.weight), ("bias", self.bias)) if whole is not None}

    def path(self, rows: int) -> str:
        """The product that a step of so many rows takes."""
        return "native" if self.few is not None and rows <= native.ROWS else "plain" if self.packed is None else "packed"

    @torch.no_grad()
    def pack(self, keep: bool = False) -> None:
        """Get ready for a lone text on this CPU: with the weight as it is, where native.py serves it; otherwise in oneDNN's order, and the plain
        weight let go (`keep`: not, an embedding uses it too)."""
        if self.few is not None or self.packed is not None or not can_pack(self.weight):
            return
        if native.multiplies(self.weight):
            self.few = self.weight.detach()
        else:
            self._reorder(keep)

    def reorder(self, keep: bool = False) -> None:
        """Get ready for many rows a step: a weight that lies as it was is put in oneDNN's order, and the plain one let go."""
        if self.few is not None:
            self.few = None
            self._reorder(keep)

    @torch.no_grad()
    def _reorder(self, keep: bool) -> None:
        # The order depends on the number of rows that is announced; the one for 4 serves 1 to 512 rows well.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), 4)
        if not keep:
            self.weight = None


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
    for layer in plain:
        nn.init.normal_(layer.weight)
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
    print(f"{size / 1e6:.0f} MB of float32 weights; milliseconds, and how many times as long as reading them once")
    print(f"{'rows':>6}{'F.linear':>16}{'lone text':>16}{'reordered':>16}")
    for t, *times in zip(rows, library, blocks, packed):
        print(f"{t:6}" + "".join(f"{each * 1e3:9.1f} {each * roof / size:5.1f}x" for each in times))


if __name__ == "__main__":
    main()
