"""x Wᵀ: the product in which a decoding step spends its time.

A step of one token multiplies one row by every weight of the model, so it costs what it costs to *read* the weights once:
a model of S bytes on a machine that reads B bytes a second makes at most B / S tokens a second. And a step of five rows should
cost hardly more than a step of one, since it reads the same bytes: speculative decoding and batching live on that.

On a GPU the library sees to both. On a CPU it does not: a product of one to eight rows uses a fraction of the machine, because
the weight lies in another order than the inner loop wants, and putting it in order costs more than multiplying. `Linear.pack()`
does that once, when a model is loaded: oneDNN's blocked order replaces the plain one. `python matmul.py` shows the difference.

A model that lies in a core's cache, as a draft may, is another case: nothing is read from memory, and what a product of one row costs
is the call. The library's own product of x and Wᵀ, with Wᵀ laid out row after row, is the lightest: three times as fast there.

Not covered: training, float64 (which is for proofs) and float16 use the plain order.

    T rows (tokens of a step) · K in_features · N out_features
"""
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def can_pack(weight: Tensor) -> bool:
    """Whether this build of PyTorch has oneDNN's packed product for such a weight."""
    return (weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
            and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"))


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
        self.light: Tensor | None = None                             # [N, K], laid out by columns: for one row and a small model

    def forward(self, x: Tensor) -> Tensor:                          # [T, K] -> [T, N]
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        if self.light is not None and len(x) == 1:
            return F.linear(x, self.light, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    @torch.no_grad()
    def pack(self, keep: bool = False, small: bool = False) -> None:
        """Put the weight in the order of the CPU's product and let the plain one go (`keep`: not, an embedding uses it too)."""
        if self.packed is None and can_pack(self.weight):
            if small and self.weight.dtype == torch.float32:
                self.light = self.weight.detach().t().contiguous().t()
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
