"""Llama: the forward pass.

A forward pass reads a packed row of tokens: the new tokens of every sequence of this step, end to
end. The model knows nothing of sequences and caches: `metadata` (kvcache.py) says where each token
belongs, and `ops` (kernels.py) computes.

    x = embed[tokens]                                      [T, C]
    for each layer:
        q, k, v = qkv(norm(x))                             [T, H, D], [T, G, D], [T, G, D]
        x = x + o(attend(q, k, v))                         attend rotates q and k, stores k and v
        gate, up = gate_up(norm(x))                        [T, F] each
        x = x + down(silu(gate) · up)                      Ops.swiglu: silu(gate) · up, from norm(x)
    logits = head(norm(x[logits_indices]))                 [R, V]

  - RMSNorm (Zhang & Sennrich 2019) is x / √(mean x² + ε) · w. `add_norm` computes x = x + … and
    the norm after it together, because that reads x from memory only once.
  - Rotary embeddings (Su et al. 2021) turn the dimension pair (i, i + D/2) of q and k by position ·
    θ^(−2i/D), so that q · k depends only on the distance of their tokens. (The paper's pairs are
    (2i, 2i + 1). In the Hub's checkpoints the rows of q and k are reordered to match.)
  - Qwen 2.5 adds biases to q, k and v. Qwen 3 has a norm of each head of q and of k, which attend
    applies before it rotates them (`HeadNorm`).
  - In grouped-query attention (Ainslie et al. 2023) H query heads share G key/value heads. SwiGLU
    is by Shazeer 2020.

Cost: a token takes about 2 · parameters operations, and attention; a step reads every weight once,
however many tokens it has. If several processes share the model, each has a part of every
matrix, and `group` (parallel.py) joins what they compute: `group.sum` adds up their products with o
and with down. In a single process it does nothing.

    T tokens of a step · R logits asked for · C hidden_size · H query heads · G key/value heads
    D head_dim · F intermediate_size · V vocab_size
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint.load import load_llama
from checkpoint.weights import Layer, Weights
from errors import UserError
from kvcache import AttentionMetadata, KVSpec
from quant import Bits
from settings import check_in_vocabulary

Rope = tuple[Tensor, Tensor]  # cos and sin of the positions of a step: [T, 1, D / 2] each


class Features(NamedTuple):
    """The residual stream at the input of some layers, which a pass stores if it is asked to: an
    EAGLE head reads it (eagle.py)."""

    layers: tuple[int, ...]  # one may occur twice: some published heads repeat a layer
    values: Tensor  # [T, len(layers), C], to be filled

    def store(self, i: int, x: Tensor, mlp_out: Tensor | None) -> None:
        """The input of layer i has come; store it if it is wanted."""
        for place, layer in enumerate(self.layers):
            if layer == i:
                self.values[:, place] = x if mlp_out is None else x + mlp_out


class Llama(Weights):
    """`llama(tokens, metadata, logits_indices)` -> logits. `Weights` (checkpoint/weights.py) makes,
    names and packs the attributes: embed, layers, norm and head; config, ops, group, dtype, device,
    and the rotary frequencies."""

    load = classmethod(load_llama)  # checkpoint/load.py

    # ---- The forward pass

    def forward(
        self,
        tokens: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor | slice | None,
        features: Features | None = None,
    ) -> Tensor:
        """tokens: int64[T] -> logits [R, V] after the tokens at `logits_indices` (None: after all).
        features: filled, too, if they are given."""
        rope = self.rope(metadata.positions)
        x = self.embedding(tokens)  # [T, C]
        mlp_out = None  # the residual stream is x + mlp_out: the next norm adds them
        for i, layer in enumerate(self.layers):
            if features is not None:
                features.store(i, x, mlp_out)
            x, mlp_out = self.decoder_layer(layer, x, mlp_out, rope, metadata, i)
        if logits_indices is not None:
            x = x[logits_indices]  # [R, C]
            mlp_out = mlp_out[logits_indices]
        _, normed = self.ops.add_norm(x, mlp_out, self.norm, self.config.rms_norm_eps)
        return self.group.gather(self.ops.linear(normed, self.head), self.config.vocab_size)

    def decoder_layer(
        self,
        layer: Layer,
        x: Tensor,
        mlp_out: Tensor | None,
        rope: Rope,
        metadata: AttentionMetadata,
        i: int,
    ) -> tuple[Tensor, Tensor]:
        """Layer i. The residual stream, [T, C], comes and goes as two terms, x and mlp_out (None
        before layer 0)."""
        ops = self.ops
        G = self.config.num_key_value_heads
        D = self.config.head_dim
        eps = self.config.rms_norm_eps
        x, normed = ops.add_norm(x, mlp_out, layer.input_norm, eps)  # x + mlp_out, and its norm
        qkv = ops.linear(normed, layer.qkv).unflatten(1, (-1, D))  # [T, H + 2 G, D]
        heads = ops.attend(qkv, G, rope, metadata, i, layer.head_norm)  # [T, H, D]
        attn_out = self.group.sum(ops.linear(heads.flatten(1), layer.o))
        x, normed = ops.add_norm(x, attn_out, layer.post_norm, eps)
        hidden = ops.swiglu(normed, layer.gate_up)  # [T, F]
        mlp_out = self.group.sum(ops.linear(hidden, layer.down))
        return x, mlp_out

    def embedding(self, tokens: Tensor) -> Tensor:
        """int64[T] -> [T, C]. With several processes each has some of the rows, so `group` makes
        row numbers of its process out of the tokens, and adds up what the processes find."""

        def look_up(rows: Tensor) -> Tensor:
            return self.ops.embed(rows, self.embed, self.dtype)

        return self.group.embed(tokens, self.config.vocab_size, look_up)

    def rope(self, positions: Tensor) -> Rope:
        """The turns of dimension pairs at these positions: int[T] -> cos and sin, [T, 1, D / 2]
        each. A pair (a, b) becomes (a cos − b sin, b cos + a sin). Both are multiplied by yarn's
        attention factor, otherwise by 1 (checkpoint/config.py)."""
        angles = torch.outer(positions, self.frequencies)[:, None]
        cos = self.attention_factor * angles.cos()
        sin = self.attention_factor * angles.sin()
        return cos.to(self.dtype), sin.to(self.dtype)

    # ---- Calling it

    def __call__(
        self,
        tokens: Tensor,
        metadata: AttentionMetadata | None = None,
        logits_indices: Tensor | slice | None = None,
        features: Features | None = None,
    ) -> Tensor:
        """What `forward` returns. Without metadata the tokens are one sequence, without a cache."""
        if metadata is None:
            tokens = self.checked(tokens)
            metadata = AttentionMetadata.without_cache(1, len(tokens), self.device)
        # This calls `forward`, unless the backend has a faster version of the whole pass.
        return self.ops.forward(self, tokens, metadata, logits_indices, features)

    def checked(self, tokens: Tensor) -> Tensor:
        """The tokens of one sequence, as int64[T]. UserError if this model cannot read them."""
        most = self.config.max_position_embeddings
        is_text = tokens.dim() == 1 and 0 < len(tokens) <= most
        if not is_text or tokens.dtype not in (torch.int32, torch.int64):
            raise UserError(
                f"tokens are {tokens.dtype} of shape {[*tokens.shape]}: give those of one "
                f"sequence, int64[T] with T from 1 to {most}, the model's limit"
            )
        check_in_vocabulary(tokens.tolist(), self.config.vocab_size)
        return tokens.long()

    def empty_features(self, layers: tuple[int, ...], T: int) -> Features:
        """Features that a pass over T tokens fills."""
        shape = T, len(layers), self.config.hidden_size
        return Features(layers, torch.empty(shape, dtype=self.dtype, device=self.device))

    # ---- What caches and schedulers ask

    def kv_spec(self, bits: Bits = (16, 16), draft_layers: int = 0) -> KVSpec:
        """What a cache stores of a token. draft_layers: the layers of a head that shares the cache
        (eagle.py)."""
        spec = KVSpec.of(self.config, self.dtype, bits, self.device, draft_layers)
        return replace(spec, ops=self.ops)

    def price(self, context: int) -> int:
        """The cost of reading a token after `context` others. 1 is the cost at the start of a
        sequence; attention costs as much again after each `even_context` tokens.

        A step has a budget for these costs (batcher.py), so chunks of a prompt become smaller as
        its context grows. The price is at most 8, because even smaller chunks would save no time:
        every pass reads all keys.
        """
        return min(8, 1 + context // self.even_context)

    @cached_property
    def even_context(self) -> int:
        """How many keys a token attends to when its attention takes as many operations as its
        matrices. In a layer these take 2 operations a weight, and attention 4 · H · D a key."""
        c = self.config
        q, k, v, o = c.query_size, c.kv_size, c.kv_size, c.query_size
        gate, up, down = [c.intermediate_size] * 3
        num_weights = c.hidden_size * (q + k + v + o + gate + up + down)
        return 2 * num_weights // (4 * c.query_size)


@torch.inference_mode()
def main(name: str = "tiny") -> None:
    """The demonstration shows that it does not matter how a sequence is split into chunks."""
    llama = Llama.load(name, dtype=torch.float32)
    text = torch.arange(1, 101, device=llama.device)
    whole = llama(text)
    print("100 tokens at once, and in chunks through a cache:")
    for sizes in ([100], [99, 1], [50, 50], [1] * 100, [7, 13, 80]):
        cache = KVCache(llama.kv_spec(), len(text))
        seq, _ = cache.open(())
        logits = [llama(chunk, cache.extend([(seq, chunk)])) for chunk in text.split(sizes)]
        error = (torch.cat(logits) - whole).abs().max() / whole.abs().max()
        print(f"  {len(sizes):3} chunks, the first of {sizes[0]:3}: logits differ by {error:.1e}")


if __name__ == "__main__":
    from kvcache import KVCache

    main(*sys.argv[1:])
