"""A GPU's operations: Triton kernels in place of plain torch, and CUDA graphs of whole passes.

    add_norm                      fused.py: the element-wise work between products
    linear, swiglu                products.py: 1 to 64 rows times weights as they are stored
    attend                        store.py: rotate, quantize, store; flash.py: attention
    probabilities, pick           draw.py: top-k, top-p, min-p and the pick, without sorting
    forward, chain                graphs.py: all launches of a pass as one launch
    run_rounds                    steps.py: several plain tokens a step
    warm_up                       every kernel once, before the texts come

Other operations, float64 and gradients fall back to kernels.Ops. A cache owns the graphs that were
recorded over it: cache.backend.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters import Chain, ModelChain
from eagle import EagleHead
from edits import put_back
from gpu.steps import MultiStep
from kernels import HeadNorm, Linear, Ops, rotated
from kvcache import AttentionMetadata
from quant import Quantized
from sampling import Setting

if find_spec("triton"):
    from gpu import draw, flash, fused, graphs, products, tuning
    from gpu.flash import LayerStore
    from gpu.store import store_vectors

if TYPE_CHECKING:
    from kvcache import Cache
    from model import Features, Llama, Rope
    from speculative import Proposal, Round


def is_fusable(x: Tensor) -> bool:
    """Whether the Triton kernels can compute on x: they have no float64 and no gradients."""
    needs_gradient = x.requires_grad and torch.is_grad_enabled()
    return x.dtype != torch.float64 and not needs_gradient


def in_order(x: Tensor, weight: Linear) -> Tensor:
    """x, its columns in the order in which the weight's are stored."""
    w = weight.weight
    if isinstance(w, Tensor) or w.order is None:
        return x
    return x[:, w.order]


def is_readable(cache: Cache | None) -> bool:
    """Whether the Triton kernels can read and write this cache."""
    return (
        tuning.is_on("attention")
        and cache is not None
        and cache.keys.parts[0].dtype != torch.float64
    )


def recordings(kind: Callable[[Llama], Any], llama: Llama, cache: Cache) -> Any:
    """The graphs of this kind (Passes or Drafts) that were recorded of a model over a cache."""
    key = f"{kind.__name__} {id(llama)}"  # they hold the model, so that its id stays unique
    if key not in cache.backend:
        cache.backend[key] = kind(llama)
    return cache.backend[key]


def run_empty_step(llama: Llama, cache: Cache, shape: tuple[int, int], splits: int) -> Tensor:
    """Launch a step of this shape, (sequences, new tokens of each), that has no sequences.

    So it stores nothing. splits: of attention's keys, 1 or more -> logits, undefined.
    """
    B, each = shape
    tokens = torch.zeros(B * each, dtype=torch.int64, device=llama.device)
    metadata = graphs.BucketMetadata(cache, graphs.Bucket(B, each, 1))
    metadata.backend["longest"] = splits * tuning.LEAST_KEYS
    if isinstance(llama, EagleHead):
        features = llama.target.empty_features(llama.feature_layers, B * each).values.zero_()
        return llama.logits(llama.forward(llama.combine(features), tokens, metadata))
    return llama.forward(tokens, metadata, None)


class GPU(MultiStep):
    """`kernels.Ops` by Triton kernels. records: whether passes are recorded as CUDA graphs."""

    language = "Triton kernels"

    def __init__(self, records: bool = True):
        self.newest = 0  # the id of the last weight that was multiplied
        self.attended: dict[str, Any] | None = None  # the backend of the cache that was read since
        self.step_budget = tuning.STEP_BUDGET if tuning.is_on("chunks") else Ops.step_budget
        self.records = records and tuning.is_on("graphs") and tuning.is_on("sampling")

    def dtypes(
        self, stored: list[torch.dtype], asked: torch.dtype | None
    ) -> tuple[torch.dtype, torch.dtype]:
        return super().dtypes(stored, asked or stored[0])

    def pack_weight(self, weight: Linear, dtype: torch.dtype) -> Linear:
        w = weight.weight
        if isinstance(w, Quantized) and w.input_bits == 8:  # torch wants float32 scales
            return weight._replace(weight=w._replace(scale=w.scale.float()))
        return weight

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        w = products.Stored.of(weight)
        if self.attended is not None:  # w will be fetched when this layer attends again
            self.attended[f"after weight {self.newest}"] = w.values
            self.attended = None
        self.newest = id(w.values)
        by = products.multiplier(x, w)
        if by == "kernel":
            return products.stored_product(in_order(x, weight), w)
        if by == "torch":
            return products.torch_product(in_order(x, weight), w)
        return super().linear(x, weight)

    def swiglu(self, x: Tensor, gate_up: Linear) -> Tensor:
        if not is_fusable(x) or not tuning.is_on("fused"):
            return super().swiglu(x, gate_up)
        w = products.Stored.of(gate_up)
        if products.multiplier(x, w) == "kernel":
            return products.stored_product(in_order(x, gate_up), w, swiglu=True)
        return fused.fused_swiglu(self.linear(x, gate_up))

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not is_fusable(x) or not tuning.is_on("fused"):
            return super().add_norm(x, delta, weight, eps)
        return fused.fused_norm(x, delta, weight, eps)

    def attend(
        self,
        qkv: Tensor,
        G: int,
        rope: Rope | None,
        metadata: AttentionMetadata,
        layer: int,
        norm: HeadNorm | None = None,
    ) -> Tensor:
        """In two kernels."""
        cache = metadata.cache
        if not is_readable(cache):
            return super().attend(qkv, G, rope, metadata, layer, norm)
        if qkv.dtype == torch.float64:  # over a quantized cache
            turned = torch.cat(rotated(qkv, G, rope, norm), dim=1)
            return self.attend(turned.float(), G, None, metadata, layer).to(qkv.dtype)
        q, k, v = rotated(qkv, G, None)
        keys = LayerStore.of(cache.keys, layer)
        values = LayerStore.of(cache.values, layer)
        S = metadata.block_size
        backend = metadata.backend
        if "launches" not in backend:  # the same in all layers
            longest = backend.get("longest")  # of a recording
            if longest is None:
                longest = max(sequence.seq_len for sequence in metadata.sequences)
            backend["launches"] = tuning.plan_launches(
                metadata.num_new_tokens,
                longest,
                q.shape[1],
                k.shape[1],
                tuning.processors(q.device),
            )
            backend["arrivals"] = torch.empty(k.shape[:2], dtype=torch.int32, device=k.device)
        arrivals = backend["arrivals"]
        ahead = None
        if tuning.fetches(q.device, len(q)):
            self.attended = cache.backend
            ahead = cache.backend.get(f"after weight {self.newest}")
        q = store_vectors(
            q, k, v, keys, values, metadata.slot_mapping, S, arrivals, rope, norm, ahead
        )
        block = 0 if S >= cache.max_len else S  # 0: one block a sequence
        return flash.flash_attention(
            q,
            keys,
            values,
            metadata.block_tables,
            metadata.cu_seqlens,
            metadata.seq_lens,
            backend["launches"],
            block,
            arrivals=arrivals,
        )

    def probabilities(self, logits: Tensor, masked: bool = True, **settings: Setting) -> Tensor:
        """A single −∞ is not found."""
        if settings.keys() <= draw.SUPPORTED and tuning.is_on("sampling"):
            return draw.draw_probabilities(logits, **settings)
        return super().probabilities(logits, masked, **settings)

    def pick(self, probs: Tensor, streams: Tensor) -> Tensor:
        if not tuning.is_on("sampling"):
            return super().pick(probs, streams)
        return draw.draw_token(probs, streams)

    def forward(
        self,
        llama: Llama,
        tokens: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor | slice | None = None,
        features: Features | None = None,
    ) -> Tensor:
        if not self.records or not is_readable(metadata.cache):
            return super().forward(llama, tokens, metadata, logits_indices, features)
        passes = recordings(graphs.Passes, llama, metadata.cache)
        return passes(tokens, metadata, logits_indices, features)

    def chain(self, chain: Chain, round: Round) -> Proposal:
        """The drafts of a model by one graph, unless a sequence has more than two unread tokens, or
        a grammar or penalties, which the host applies from draft to draft."""
        if not self.records or type(chain) is not ModelChain or round.edits_logits:
            return super().chain(chain, round)
        longest = max(len(tokens) for tokens in chain.new.values())
        if longest > 2 or not is_readable(chain.cache):
            return super().chain(chain, round)
        drafts = recordings(graphs.Drafts, chain.model, chain.cache)
        return drafts(chain, round)

    @torch.inference_mode()
    def warm_up(self, llama: Llama, cache: Cache, vocab_size: int) -> None:
        """Launch every kernel variant that serving uses.

        Attention has variants of 16, 32, 64 and 128 rows, with and without a split; products with
        quantized weights of up to 8, 16, 32, 64 and more tokens; sampling with filters and without.
        All other kernels have one variant.
        """
        if not is_readable(cache):
            return
        config = llama.config
        R = config.num_attention_heads // config.num_key_value_heads
        new_tokens = {rows // R for rows in (16, 32, 64) if rows >= R}
        new_tokens.add(64 // R + 1)
        shapes = [(1, n) for n in new_tokens] + [(n, 1) for n in (8, 16, 32, 64, 65)]
        for shape in shapes:
            for splits in (1, 2):
                logits = run_empty_step(llama, cache, shape, splits)
        streams = torch.zeros(1, 1, dtype=torch.int64, device=llama.device)
        for top_k in (None, 1):
            probs = self.probabilities(logits[:1, :vocab_size], top_k=top_k)
            self.pick(probs, streams)


def ops() -> Ops | None:
    """The operations of this GPU; None without Triton."""
    if not find_spec("triton"):
        return None
    gpu = GPU()
    put_back(gpu)
    return gpu
