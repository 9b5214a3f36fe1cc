"""x Wᵀ: the product in which a decoding step spends its time.

A step of one token multiplies one row by every weight of the model, so it costs what it costs to *read* the weights once:
a model of S bytes on a machine that reads B bytes a second makes at most B / S tokens a second, and a step of five rows
should cost hardly more than a step of one. That second half is what speculative decoding and batching live on. On a GPU the
library sees to both. On a CPU it does not: its matrix-vector product may run on one core only, and its product of two to
eight rows takes several times as long, because it first copies the weight into the order its inner loop wants, every time.

What `Linear` does about it on a CPU:

  - `pack()` makes that copy once, when a model is loaded: oneDNN's blocked order replaces the plain one. For bfloat16 always;
    for float32 where a row of W is longer than a page of memory (4 KB), which is where the plain product of few rows is worst.
  - What stays plain is multiplied as W xᵀ for two to eight rows, and for one row as two halves of W, one for each core.

`python matmul.py` measures it, from 1 to 64 rows, against the speed at which this machine reads memory.

Not covered: training and float64 (which is for proofs) use the plain order.

    T rows (tokens of a step) · K in_features · N out_features
"""
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAGE_BYTES = 4096


def worth_packing(weight: Tensor) -> bool:
    """Whether oneDNN's packed product serves this weight better than the plain one, and this build of PyTorch has it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return weight.dtype == torch.bfloat16 or (weight.dtype == torch.float32 and weight.shape[1] * 4 >= PAGE_BYTES)


def plain_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [T, K], weight: [N, K] -> [T, N], by the library call that is quickest for so many rows."""
    (T, K), N = x.shape, len(weight)
    if T > 8 or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64) or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if T == 1 and N % 2 == 0:
        y = torch.bmm(weight.view(2, N // 2, K), x.T.expand(2, K, 1)).view(1, N)
    else:
        y = (weight @ x.T).T
    return y if bias is None else y + bias


class Linear(nn.Module):
    """y = x Wᵀ + b, with W: [N, K] held plain, or packed for this CPU.

    `weight` is uninitialized until somebody fills it; after `pack()` it may be None.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False,
                 device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype), requires_grad=False) if bias else None
        self.packed: Tensor | None = None                            # opaque: oneDNN's own order

    def forward(self, x: Tensor) -> Tensor:                          # [T, K] -> [T, N]
        if self.packed is None:
            return plain_product(x, self.weight, self.bias)
        T = len(x)
        if T < 3 and x.dtype == torch.float32:                       # this product is quicker with four rows than with one or two
            x = x.repeat(4 // T, 1)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")[:T]

    @torch.no_grad()
    def pack(self, keep: bool = False) -> None:
        """Reorder the weight for the CPU's product, if that is worth it, and let the plain one go (`keep`: an embedding uses it)."""
        if self.packed is None and worth_packing(self.weight):
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
    """Bytes a second at which this machine reads memory that is in no cache: the roof of decoding."""
    data = torch.ones(megabytes * 2**18)
    return data.numel() * 4 / seconds(data.sum)


@torch.inference_mode()
def main() -> None:
    roof = read_bandwidth()
    print(f"this machine reads {roof / 1e9:.1f} GB/s with {torch.get_num_threads()} threads")
    layers = [Linear(2048, 2048) for _ in range(16)]                 # together larger than the caches: 268 MB
    for layer in layers:
        nn.init.normal_(layer.weight)
    rows = [1, 2, 4, 5, 8, 16, 64]
    inputs = [torch.randn(t, 2048) for t in rows]
    size = sum(layer.weight.numel() * 4 for layer in layers)
    library = [seconds(lambda: [F.linear(x, layer.weight) for layer in layers]) for x in inputs]
    for layer in layers:
        layer.pack()
    packed = [seconds(lambda: [layer(x) for layer in layers]) for x in inputs]
    print(f"{size / 1e6:.0f} MB of float32 weights; milliseconds, and how many times as long as reading them once")
    print(f"{'rows':>6}{'F.linear':>16}{'packed':>16}")
    for t, a, b in zip(rows, library, packed):
        print(f"{t:6}{a * 1e3:9.1f} {a * roof / size:5.1f}x{b * 1e3:9.1f} {b * roof / size:5.1f}x")


if __name__ == "__main__":
    main()
