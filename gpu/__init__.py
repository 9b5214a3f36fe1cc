"""A GPU's operations: Triton kernels in place of plain torch, and CUDA graphs of whole passes.

    add_norm, rotate, swiglu      fused.py: the element-wise work between two products, a launch each
    linear                        weightonly.py: 1 to 64 rows times weights of 8 or 4 bits
    attend, look_back             store.py: rotate, quantize, store; flash.py: attention
    probabilities, pick           draw.py: top-k, top-p, min-p and the pick, without sorting
    forward, draft                graphs.py: all launches of a pass as one launch

Other operations, float64 and gradients fall back to kernels.Ops. A cache owns the graphs that were recorded over it."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kernels import Linear, Ops, Step
from sampling import Setting

if find_spec("triton"):
    from gpu import draw, fused, graphs, weightonly
    from gpu.crosscompile import processors
    from gpu.flash import LEAST_KEYS, LayerStore, flash_attention, plan_launches
    from gpu.store import store_vectors

    warnings.filterwarnings(
        "ignore", r"'gpu\.\w+' found in sys.modules", RuntimeWarning
    )  # python -m gpu.flash


def fuses(x: Tensor) -> bool:
    """Whether the Triton kernels can compute on x: they have no float64 and no gradients."""
    return x.dtype != torch.float64 and not (x.requires_grad and torch.is_grad_enabled())


def in_place(cache: Any) -> bool:
    """Whether the Triton kernels can read and write this cache."""
    return cache is not None and cache.keys.parts[0].dtype != torch.float64


def store_and_attend(
    q: Tensor, k: Tensor, v: Tensor, step: Step, layer: int, *rope: Tensor
) -> Tensor:
    """`look_back` in two kernels. rope: cos and sin, if q and k are still to be rotated."""
    keys, values = LayerStore.of(step.cache.keys, layer), LayerStore.of(step.cache.values, layer)
    _, slots, starts, lengths, tables = step.places
    rotated = store_vectors(
        k, v, keys, values, slots, step.block_size, *((q, *rope) if rope else ())
    )
    if (launches := vars(step).get("launches")) is None:  # the same in all layers
        longest = vars(step).get("longest") or max(stop for _, _, stop in step.spans)
        step.launches = launches = plan_launches(
            step.counts, longest, q.shape[1], k.shape[1], processors(q.device)
        )
    block = 0 if step.block_size >= step.cache.max_len else step.block_size  # 0: one block a text
    return flash_attention(
        rotated if rope else q, keys, values, tables, starts, lengths, launches, block
    )


def recordings(kind: Callable[[], Any], llama: Any, cache: Any) -> Any:
    """The graphs of this kind (Passes or Drafts) that were recorded of this model over this cache."""
    held = vars(cache).setdefault("recorded", {})
    if (kind, id(llama)) not in held:
        held[kind, id(llama)] = kind(), llama  # holds the model, so that its id stays unique
    return held[kind, id(llama)][0]


def warm_up(llama: Any, cache: Any) -> None:
    """Launch every kernel variant that serving uses, on steps without texts, so that Triton compiles nothing later:
    attention of 16, 32, 64 and 128 rows, with and without a split; products of up to 8, 16, 32, 64 and more tokens with
    quantized weights; sampling with filters and without. All other kernels have one variant."""
    c, tokens = llama.config, partial(torch.zeros, dtype=torch.int64, device=llama.device)
    R, step = (
        c.num_attention_heads // c.num_key_value_heads,
        Step([((), 0, 0)], cache.block_size, cache, llama.device),
    )
    each = {rows // R for rows in (16, 32, 64) if rows >= R} | {64 // R + 1}
    for shape, parts in product(
        [*((1, n) for n in each), *((n, 1) for n in (8, 16, 32, 64, 65))], (1, 2)
    ):
        empty = graphs.place_for(step, graphs.Bucket(*shape, 1))
        empty.longest = parts * LEAST_KEYS
        logits = llama._forward(tokens(shape[0] * shape[1]), empty, None)
    for top_k in (None, 1):
        llama.ops.pick(llama.ops.probabilities(logits[:1], 1.0, top_k), tokens(1, 1))


class GPU(Ops):
    """`kernels.Ops` by Triton kernels. records: whether passes are recorded as CUDA graphs."""

    def __init__(self, records: bool = True):
        self.records, self.ahead = records, 4

    def dtype(self, stored: torch.dtype) -> torch.dtype:
        return stored

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        w, bias = weight
        if isinstance(w, Tensor) or not weightonly.can_serve(w, x.dtype):
            return super().linear(x, weight)
        if w.inputs == 8:
            y = weightonly.tensor_core_product(x, w)
            return y if bias is None else y + bias
        x = x if w.order is None else x[:, w.order]
        return weightonly.weight_only_product(x, w.values, w.scale, w.zero, w.group, bias)

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return (fused.fused_norm if fuses(x) else super().add_norm)(x, delta, weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return (fused.fused_rotate if fuses(x) else super().rotate)(x, cos, sin)

    def swiglu(self, x: Tensor) -> Tensor:
        return (fused.fused_swiglu if fuses(x) else super().swiglu)(x)

    def attend(
        self, qkv: Tensor, G: int, cos: Tensor, sin: Tensor, step: Step, layer: int
    ) -> Tensor:
        if not (in_place(step.cache) and fuses(qkv)):
            return super().attend(qkv, G, cos, sin, step, layer)
        return store_and_attend(
            *qkv.split((qkv.shape[1] - 2 * G, G, G), dim=1), step, layer, cos, sin
        )

    def look_back(self, q: Tensor, k: Tensor, v: Tensor, step: Step, layer: int) -> Tensor:
        if not in_place(step.cache):
            return super().look_back(q, k, v, step, layer)
        if q.dtype == torch.float64:  # over a quantized cache
            return store_and_attend(q.float(), k.float(), v.float(), step, layer).double()
        return store_and_attend(q, k, v, step, layer)

    def probabilities(
        self,
        logits: Tensor,
        temperature: Setting = 1.0,
        top_k: Setting = None,
        top_p: Setting = None,
        min_p: Setting = None,
    ) -> Tensor:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return draw.draw_probabilities(logits, temperature, top_k, top_p, min_p, dtype)

    def pick(self, probs: Tensor, streams: Tensor) -> Tensor:
        return draw.draw_token(probs, streams)

    def forward(
        self, plain: Callable[..., Tensor], llama: Any, tokens: Tensor, step: Step, rows: Any
    ) -> Tensor:
        if not (self.records and in_place(step.cache)):
            return plain(tokens, step, rows)
        return recordings(graphs.Passes, llama, step.cache)(plain, llama, tokens, step, rows)

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
        """All drafts of a round by one graph, unless a text has more than two unread tokens."""
        many = any(len(new) > 2 for new, gamma in zip(unread, round.gammas) if gamma)
        if many or not self.records or not in_place(cache):
            return plain(llama, cache, seqs, unread, round, publish)
        return recordings(graphs.Drafts, llama, cache)(
            llama._forward, cache, seqs, unread, round, publish
        )


def ops() -> Ops | None:
    """The operations of this GPU; None without Triton."""
    return GPU() if find_spec("triton") else None
