"""A CPU's operations: C where there is a compiler (native.py), else PyTorch, with packed products.

  - A weight is put in the order that C multiplies fastest, once, when a model is loaded. Without a compiler float32 and
    bfloat16 take oneDNN's order, if this build of PyTorch can multiply by it on this CPU.
  - Attention of few queries, or of few scores, reads keys and values where they are stored, in C. Long prompts, caches
    of 4 bits, and all attention without a compiler are PyTorch's, several texts in one call (padded.py).
  - If C does both products and attention, one call runs all layers, and one call makes all drafts of a lone text, with
    no Python between the operations.

Invariant: results are those of kernels.Ops up to the order of sums.

Not covered: one call for x in bfloat16, for drafts of several texts, or for drafts with top-k, top-p or min-p.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from cpu import native, padded
from kernels import Linear, Ops, Span, Step
from quant import Quantized
from sampling import SETTINGS, Keyed, Setting, check_settings, finite

SCORES = 2**14  # queries · keys of a text: beyond, PyTorch attends
warnings.filterwarnings(
    "ignore", "'cpu.native' found in sys.modules", RuntimeWarning
)  # python -m cpu.native


class Packed(NamedTuple):
    """A weight in oneDNN's own order; plain: the same weight by rows, for an embedding's look-up."""

    packed: Tensor
    bias: Tensor | None
    plain: Tensor | None


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def packs(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's order; None if a trial shows that this machine cannot multiply by it."""
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    try:  # the order for 4 rows serves 1 to 512
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 4)
        for T in (1, 5):
            packed_product(weight.new_zeros(T, weight.shape[1]), packed)
    except (RuntimeError, AttributeError):
        return None
    return packed


class CPU(Ops):
    """`kernels.Ops`, faster."""

    def __init__(self) -> None:
        self._layers: WeakKeyDictionary[Any, native.Layers | None] = WeakKeyDictionary()

    def weight_dtype(self, stored: list[torch.dtype], dtype: torch.dtype) -> torch.dtype:
        """For float32 x, bfloat16 weights stay bfloat16: half the bytes to read, and the same products to the bit."""
        in_c = dtype == torch.float32 and native.library() is not None
        return torch.bfloat16 if in_c and stored == [torch.bfloat16] else dtype

    # ---- Weights

    def prepare(
        self, weight: Linear, dtype: torch.dtype, role: str
    ) -> native.Weight | Packed | Linear:
        w, bias = weight
        if native.multiplies(w, dtype):
            return native.Weight.of(weight)
        packed = None if isinstance(w, Quantized) else packs(w)
        return weight if packed is None else Packed(packed, bias, w if role == "embed" else None)

    def linear(self, x: Tensor, weight: native.Weight | Packed | Linear) -> Tensor:
        if isinstance(weight, native.Weight):
            return native.product(x, weight)
        if isinstance(weight, Packed):
            return packed_product(x, weight.packed, weight.bias)
        if (
            isinstance(weight.weight, Quantized) and x.dtype.itemsize == 2
        ):  # a product of 16 bits may be very slow
            return super().linear(x.float(), weight).to(x.dtype)
        return super().linear(x, weight)

    def embed(
        self, tokens: Tensor, weight: native.Weight | Packed | Linear, dtype: torch.dtype
    ) -> Tensor:
        if isinstance(weight, native.Weight):
            return weight.rows(tokens).to(dtype)
        return (
            F.embedding(tokens, weight.plain)
            if isinstance(weight, Packed)
            else super().embed(tokens, weight, dtype)
        )

    # ---- Between the products

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return (native if native.serves(x, delta, weight) else super()).add_norm(
            x, delta, weight, eps
        )

    def swiglu(self, x: Tensor) -> Tensor:
        return (native if native.serves(x) else super()).swiglu(x)

    def probabilities(
        self, logits: Tensor, temperature: Setting = 1.0, *filters: Setting, **named: Setting
    ) -> Tensor:
        one = isinstance(temperature, (int, float)) and all(
            value is None for value in (*filters, *named.values())
        )
        if not one or not logits.numel() or not native.serves(logits):
            return super().probabilities(logits, temperature, *filters, **named)
        check_settings(temperature)
        return finite(native.soften(logits, temperature))

    def pick(self, probs: Tensor, streams: Tensor) -> Tensor:
        in_c = probs.shape[1] and native.library() is not None
        return native.race(probs, streams) if in_c else super().pick(probs, streams)

    # ---- Attention

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Heads outermost: the tokens of a head, which are read together, lie together."""
        L, N, S, G, D = shape
        return torch.empty((L, G, N, S, D), dtype=dtype, device=device).permute(0, 2, 3, 1, 4)

    @staticmethod
    def _reads(cache: Any, spans: Sequence[Span]) -> bool:
        """Whether C computes attention of these texts over this cache."""
        if cache is None or any(
            n > padded.FEW and n * stop > SCORES for _, start, stop in spans for n in [stop - start]
        ):
            return False
        if "in_c" not in vars(cache):
            cache.in_c = cache.dtype != torch.float64 and native.reads(cache.keys, cache.values)
        return cache.in_c and native.library() is not None

    def attend(
        self, qkv: Tensor, G: int, cos: Tensor, sin: Tensor, step: Step, layer: int
    ) -> Tensor:
        if self._reads(step.cache, step.spans) and native.serves(qkv, cos, sin):
            return native.attend(qkv, cos, sin, step, G, layer)
        return super().attend(qkv, G, cos, sin, step, layer)

    def look_back(self, q: Tensor, k: Tensor, v: Tensor, step: Step, layer: int) -> Tensor:
        if self._reads(step.cache, step.spans):
            return native.attend(
                torch.cat((q, k, v), 1).float(), None, None, step, k.shape[1], layer
            ).to(q.dtype)
        return (super() if step.cache is None else padded).look_back(q, k, v, step, layer)

    # ---- Many operations in one call

    def layers(self, llama: Any, cache: Any, spans: Sequence[Span]) -> native.Layers | None:
        """All layers of this model in one call, if C has them and reads this cache."""
        if not self._reads(cache, spans) or not isinstance(llama.head, native.Weight):
            return None
        if llama not in self._layers:
            self._layers[llama] = native.Layers.of(llama)
        return self._layers[llama]

    def forward(
        self, plain: Callable[..., Tensor], llama: Any, tokens: Tensor, step: Step, rows: Any
    ) -> Tensor:
        if (layers := self.layers(llama, step.cache, step.spans)) is None:
            return plain(tokens, step, rows)
        y = layers(
            self.embed(tokens, llama.embed, llama.dtype), *llama.rope(step.places.positions), step
        )
        return self.linear(y if rows is None else y[rows], llama.head)

    def draft(
        self,
        plain: Callable[..., Any],
        llama: Any,
        cache: Any,
        seqs: Sequence[int],
        unread: Sequence[Sequence[int]],
        round: Any,
        publish: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """The drafts of a lone text without filters in one call -> int64[1, k], float32[1, k, V].

        The cache reserves slots for all drafts at once, with −1 for each token that is not known yet.
        """
        layers = None
        if (
            len(unread) == 1
            and unread[0]
            and isinstance(round.coins, Keyed)
            and all(
                round.settings(name)[0] in (None, off)
                for name, off in SETTINGS.items()
                if name != "temperature"
            )
        ):
            (new,), (k,) = unread, round.gammas
            layers = self.layers(llama, cache, [((), 0, len(new))])
        if layers is None:
            return plain(llama, cache, seqs, unread, round, publish)
        step = cache.extend([(seqs[0], [*new, *[-1] * (k - 1)])], publish)
        x, coins = (
            self.embed(torch.tensor(new), llama.embed, llama.dtype),
            round.coins[round.own : round.own + k],
        )
        (temperature,) = (1.0 if t is None else t for t in round.settings("temperature"))
        drafted, q = layers.drafts(
            x, *llama.rope(step.places.positions), step, temperature, coins.streams, round.vocab
        )
        return drafted[None], finite(q)[None]


def ops() -> CPU:
    return CPU()
