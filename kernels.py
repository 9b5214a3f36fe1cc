"""The operations of a forward pass in plain torch: the specification, which backends override.

`Ops` has the operations that a machine may do faster than plain PyTorch. The folders cpu/ and gpu/
and flash.py, the page about FlashAttention, each have a subclass that overrides some of them and
calls super() for the rest; `ops_for` chooses one. With LLAMA_PLAIN=1, or without these, this page
computes everything.

    attention(q, k, v)_i = Σ_j softmax_j(q_i · k_j / √D) v_j,      j ≤ i + (m − n)

for n queries and m ≥ n keys. The queries are the *last* n of the m tokens, so the causal mask is
aligned bottom-right: the last query sees everything. (Aligned top-left, as by PyTorch's is_causal,
it is right only for n = m.) In grouped-query attention (Ainslie et al. 2023) H / G query heads
share each of the G key/value heads, so the cache is smaller by that factor: query head h reads
key/value head h // (H / G).

`AttentionMetadata` (kvcache.py) says where the new tokens of a step belong. Attention stores their
keys and values first and reads all of them from the cache, so up to rounding a result does not
depend on how a prompt was split into chunks.

Damaged weights give NaN or ∞, which must not become a plausible token:

- Both spread through the operations to the logits, where `Ops.probabilities` raises NotFinite.
- Two operations would hide them, and make NaN instead: `rms_norm`, where x / ∞ would be 0, and
  `Ops.attend`, where a score of −∞ would have the weight 0.
- On a GPU a check would make the host wait. There `pick` returns −1, and the runner raises.

    T tokens of a step · B sequences · H query heads · G key/value heads · D head size
    C hidden_size · F intermediate_size · V vocab_size · L layers · S tokens of a block of the cache
    W [N, K] a matrix, N outputs and K inputs
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sampling
from devices import make_current
from quant import Quantized, dequantized_product, rounded_product
from sampling import Setting, check_finite

if TYPE_CHECKING:
    from drafters import Chain
    from eagle import EagleHead
    from kvcache import AttentionMetadata, Cache
    from model import Features, Llama, Rope
    from runner import Drawn, ModelRunner, ScheduledRequest
    from speculative import Proposal, Rng, Round, Verify

# For each kind of device, the modules that have a subclass of Ops; the fastest one comes first.
BACKENDS = {"cpu": ("cpu",), "cuda": ("gpu", "flash")}
Packed = Any  # a weight in a backend's own format, made by `Ops.pack_weight`; here a Linear


class Linear(NamedTuple):
    """y = x Wᵀ + b."""

    weight: Tensor | Quantized  # [N, K]
    bias: Tensor | None = None  # [N]


class HeadNorm(NamedTuple):
    """RMSNorm of each head of q and of k, before the rotation (Qwen 3)."""

    weight: Tensor  # [2 D]: of q, then of k
    eps: float


# ---- The operations ------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence's newest n tokens to all of its m.

    q: [n, H, D]; k, v: [m, G, D] -> [n, H, D].
    """
    n = len(q)
    m = len(k)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, tokens, D]
    if n in (1, m):  # no mask for one query; for n = m PyTorch's own mask is the same
        out = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1, enable_gqa=True)
    else:
        mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turn the pairs (i, i + D/2) of x, [T, heads, D], by the angles whose cosines and sines, of
    [T, 1, D / 2] each, are `rope`."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    turned_a = a * cos - b * sin
    turned_b = b * cos + a * sin
    return torch.cat((turned_a, turned_b), dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean x² + ε), computed in at least float32, · w, over the last dimension."""
    wide = x.float() if x.dtype.itemsize == 2 else x
    mean_square = wide.square().mean(-1, keepdim=True)
    # 1 / √∞ is 0, which would hide an overflow.
    mean_square = mean_square.masked_fill(mean_square == math.inf, math.nan)
    normed = wide * torch.rsqrt(mean_square + eps)
    return normed.to(x.dtype) * weight


def rotated(
    qkv: Tensor, G: int, rope: Rope | None, norm: HeadNorm | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [T, H + 2 G, D] into q [T, H, D], k and v [T, G, D]. q and k are normed unless
    `norm` is None, then rotated unless `rope` is None."""
    H = qkv.shape[1] - 2 * G
    qk, v = qkv.split((H + G, G), dim=1)
    if norm is not None:
        of_q, of_k = norm.weight.chunk(2)
        weight = torch.cat((of_q.expand(H, -1), of_k.expand(G, -1)))  # [H + G, D]
        qk = rms_norm(qk, weight, norm.eps)
    if rope is not None:
        qk = rotate(qk, rope)
    q, k = qk.split((H, G), dim=1)
    return q, k, v


class Ops:
    """The plain operations, differentiable, in every dtype."""

    step_budget = 512  # tokens of a pass, at most: longer prompts are read in chunks (batcher.py)
    language = "plain PyTorch"  # what computes, as the first line of a program says it

    # ---- Weights and storage

    def dtypes(
        self, stored: list[torch.dtype], asked: torch.dtype | None
    ) -> tuple[torch.dtype, torch.dtype]:
        """The dtype that a model computes in, and the one that its matrices have in memory.

        stored: the dtypes in the checkpoint, the commonest first. asked: the user's choice; None:
        the commonest, but float32 in place of 16 bits. A backend may prefer another one, and may
        keep matrices in a narrower dtype than it computes in, if no bit is lost.
        """
        dtype = asked or stored[0]
        if asked is None and dtype.itemsize == 2:
            dtype = torch.float32
        return dtype, dtype

    def pack_weight(self, weight: Linear, dtype: torch.dtype) -> Packed:
        """The weight in the format that `linear` or `embed` reads fastest. dtype: that of x."""
        return weight

    def empty_kv(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialized keys or values [L, blocks, S, G, D], in the order in memory that `attend`
        reads fastest."""
        return torch.empty(shape, dtype=dtype, device=device)

    # ---- The operations of a layer

    def embed(self, tokens: Tensor, weight: Packed, dtype: torch.dtype) -> Tensor:
        """The rows of W of these tokens: int64[T] -> [T, C]."""
        w = weight.weight
        if isinstance(w, Tensor):
            return F.embedding(tokens, w)
        return w.rows(tokens).dequantize(dtype)

    def linear(self, x: Tensor, weight: Packed) -> Tensor:
        """x Wᵀ + b: [T, K] -> [T, N]."""
        w, bias = weight
        if isinstance(w, Tensor):
            return F.linear(x, w, bias)
        if w.input_bits == 8:  # x is rounded to 8 bits, too: W8A8
            y = rounded_product(x, w)
        else:
            y = dequantized_product(x, w)
        return y if bias is None else y + bias

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and the RMSNorm of that sum: [T, C] each. delta: None stands for 0."""
        if delta is not None:
            x = x + delta
        return x, rms_norm(x, weight, eps)

    def swiglu(self, x: Tensor, gate_up: Packed) -> Tensor:
        """silu(gate) · up, the two halves of gate_up's product: [T, C] -> [T, F]."""
        gate, up = self.linear(x, gate_up).chunk(2, dim=-1)
        return F.silu(gate) * up

    def attend(
        self,
        qkv: Tensor,
        G: int,
        rope: Rope | None,
        metadata: AttentionMetadata,
        layer: int,
        norm: HeadNorm | None = None,
    ) -> Tensor:
        """Norm and rotate q and k, store k and v, then attend within each sequence.

        qkv: [T, H + 2 G, D] -> [T, H, D]. norm: None if the model has none. rope: None if q and k
        are normed and rotated already (a backend that does both in one pass calls super() so).
        """
        q, k, v = rotated(qkv, G, rope, norm)
        cache = metadata.cache
        zero = (0 * qkv).sum()  # NaN if a number of qkv is NaN or ∞, which attention may hide
        if cache is None:  # all sequences are new and have the same length: one call for all
            B = len(metadata.sequences)
            q, k, v = (x.unflatten(0, (B, -1)).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1) + zero
        cache.write(layer, metadata.slot_mapping.long(), k, v)
        outputs = []
        for queries, slots in zip(
            q.split(metadata.num_new_tokens), metadata.slots
        ):  # of all its tokens
            keys = cache.keys.read(layer, slots, q.dtype)
            values = cache.values.read(layer, slots, q.dtype)
            outputs.append(attention(queries, keys, values))
        return torch.cat(outputs) + zero

    # ---- Sampling

    def probabilities(self, logits: Tensor, masked: bool = True, **settings: Setting) -> Tensor:
        """logits [B, V] -> their distributions, float[B, V] (sampling.py).

        NotFinite for NaN or ∞, and for −∞ unless `masked`: a grammar may have put it there.
        """
        return sampling.probabilities(check_finite(logits, masked), **settings)

    def pick(self, probs: Tensor, streams: Tensor) -> Tensor:
        """Draw a token from each row of probs, [B, V] -> int64[B]. streams: int64[B, 1], where each
        row's random numbers come from (sampling.py)."""
        return sampling.pick(probs, streams)

    # ---- Loops of other pages, which a backend may run in one call
    # Those pages import this one, so they hand in what is to run: a model, a chain, a function.

    def forward(
        self,
        llama: Llama,
        tokens: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor | slice | None = None,
        features: Features | None = None,
    ) -> Tensor:
        """A forward pass of the target or of a draft model (model.py)."""
        return llama.forward(tokens, metadata, logits_indices, features)

    def forward_head(
        self, head: EagleHead, f: Tensor, tokens: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """A forward pass of an EAGLE head (eagle.py)."""
        return head.forward(f, tokens, metadata)

    def chain(self, chain: Chain, round: Round) -> Proposal:
        """All drafts of a round (drafters.py)."""
        return chain.one_by_one(round)

    def verify_block(
        self, verify_block: Verify, p: Tensor, q: Tensor, drafted: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor]:
        """Accepted drafts, and the token after them: int64[B] each (speculative.py)."""
        return verify_block(p, q, drafted, rng)

    def run_rounds(
        self,
        runner: ModelRunner,
        scheduled: Sequence[ScheduledRequest],
        features: Features | None,
    ) -> list[Drawn]:
        """The pass of a step, and the tokens that each request draws (runner.py). Where nothing is
        drafted, a GPU makes several passes before the host looks."""
        return runner.run_rounds(scheduled, features)

    def warm_up(self, llama: Llama, cache: Cache, vocab_size: int) -> None:
        """Compile now what steps with many sequences will need; plain torch compiles nothing.
        vocab_size: the number of tokens that can be drawn."""


# ---- The choice ----------------------------------------------------------------------------------


def ops_for(device: torch.device | str) -> Ops:
    """The fastest operations for this device: a backend's that is here, or the plain ones."""
    device = torch.device(device)
    make_current(device)
    if os.environ.get("LLAMA_PLAIN") == "1":
        return Ops()
    for name in BACKENDS.get(device.type, ()):
        if find_spec(name):
            ops = import_module(name).ops()
            if ops is not None:  # it has what it needs
                return ops
    return Ops()


def main() -> None:
    """The demonstration: what a mask aligned top-left makes of a cache."""
    n = 3
    m = 10
    q = torch.randn(n, 1, 16)  # [tokens, heads, head size]
    k = torch.randn(m, 1, 16)
    v = torch.randn(m, 1, 16)
    top_left = torch.ones(n, m, dtype=torch.bool).tril()
    heads = [x.transpose(0, 1) for x in (q, k, v)]  # [1, tokens, 16]
    outputs = {
        "bottom-right": attention(q, k, v)[:, 0],
        "top-left": F.scaled_dot_product_attention(*heads, attn_mask=top_left)[0],
    }
    print(f"the last {n} of {m} tokens: x marks the keys that a query sees, and its error")
    for i in range(n):
        last = m - n + 1 + i  # keys that it should see
        scores = q[i] @ k[:last, 0].T / 4
        wanted = scores.softmax(-1) @ v[:last, 0]
        for name, num_keys in (("bottom-right", last), ("top-left", i + 1)):
            error = (outputs[name][i] - wanted).abs().max()
            print(f"  {name:14}{'x' * num_keys:·<{m}}{error:10.1e}")


if __name__ == "__main__":
    main()
