"""Llama: the forward pass.

A forward pass reads a packed row of tokens: the new tokens of every sequence of this step, end to
end. The model knows nothing of sequences and caches: `metadata` (kvcache.py) says where each token
belongs, and `ops` (kernels.py) computes.

    x = embed[tokens]                                      [T, C]
    for each layer:
        q, k, v = qkv(norm(x))                             [T, H, D], [T, G, D], [T, G, D]
        x = x + o(attend(q, k, v))                         attend rotates q and k, stores k and v
        gate, up = gate_up(norm(x))                        [T, F] each
        x = x + down(silu(gate) · up)                      swiglu multiplies by gate_up, too
    logits = head(norm(x[logits_indices]))                 [R, V]

  - RMSNorm (Zhang & Sennrich 2019) is x / √(mean x² + ε) · w. The next norm adds x + … itself,
    because both together are one pass over x (`add_norm`).
  - Rotary embeddings (Su et al. 2021) turn the dimension pair (i, i + D/2) of q and k by position ·
    θ^(−2i/D), so that q · k depends on the distance alone. (The paper's pairs are (2i, 2i + 1). The
    Hub's checkpoints have the rows of q and k in the order for halves, most GGUFs in the paper's.)
  - Qwen 2.5 adds biases to q, k and v. Qwen 3 has a norm of each head of q and of k, which attend
    applies before it rotates them (`HeadNorm`).
  - In grouped-query attention (Ainslie et al. 2023) H query heads share G key/value heads. SwiGLU
    is by Shazeer 2020.

Cost: a token takes about 2 · parameters operations, and attention; a step reads every weight once,
however many tokens it has.

    T tokens of a step · R logits asked for · C hidden_size · H query heads · G key/value heads
    D head_dim · F intermediate_size · V vocab_size · [N, K] a matrix: outputs, inputs
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from checkpoint.load import load_llama
from checkpoint.progress import do_each
from errors import UserError
from kernels import HeadNorm, Linear, Ops, ops_for
from kvcache import AttentionMetadata, KVSpec
from parallel import ROW_PARALLEL, group_for
from quant import Bits, Kind, Quantized, named_tensors
from settings import check_known

if TYPE_CHECKING:
    from checkpoint.config import Config

Rope = tuple[Tensor, Tensor]  # cos and sin of the positions of a step: [T, 1, D / 2] each


class Features(NamedTuple):
    """x at the input of some layers, which a pass hands out if it is asked to (eagle.py)."""

    layers: tuple[int, ...]
    values: Tensor  # [T, len(layers), C], to be filled


@dataclass
class Layer:
    """The weights of a layer. After `pack_weights` each Linear is in the backend's own format."""

    input_norm: Tensor  # [C]
    qkv: Linear  # [(H + 2 G) D, C]
    head_norm: HeadNorm | None  # of q and k; None: the model has none
    o: Linear  # [C, H D]
    post_norm: Tensor  # [C]
    gate_up: Linear  # [2 F, C]
    down: Linear  # [C, F]


class Llama:
    """`llama(tokens, metadata, logits_indices)` -> logits. Without metadata the tokens are one
    sequence, and there is no cache."""

    def __init__(
        self,
        config: Config,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int | None = 0,
        ops: Ops | None = None,
        weight_dtype: torch.dtype | None = None,
    ):
        """Make random weights from `seed`; None: leave them uninitialized, to be filled.

        weight_dtype: the matrices' dtype, if it is not `dtype`.
        """
        # As tensors name it, with an index.
        self.device = torch.empty(0, device=device, dtype=dtype).device
        self.dtype = dtype
        self.weight_dtype = weight_dtype or dtype
        self.ops = ops or ops_for(device)
        # Each of several processes (parallel.py) holds a part of every matrix, and a smaller config
        # says how large. For one process, shard is config.
        self.group = group_for(self.device)
        shard = self.group.shard(config)
        self.vocab_rows = shard.vocab_size
        self.config = replace(shard, vocab_size=config.vocab_size)
        C = config.hidden_size
        rows = 2 * (shard.query_size + shard.kv_size) + 3 * shard.intermediate_size
        self.even_context = C * rows // (2 * shard.query_size)  # C₀ of `price`
        self.embed = self._embedding()
        self.layers = [self._layer(i) for i in range(config.num_hidden_layers)]
        self.norm = self._empty(C)
        self.head = self.embed
        if not config.tie_word_embeddings:
            self.head = self._linear("head", self.vocab_rows, C)
        self.frequencies = rope_frequencies(config).to(device)  # [D / 2]
        self.packed_bytes: dict[str, int] = {}  # of each tensor, when it has been packed
        if seed is not None:
            self._randomize(seed)

    # ---- The forward pass

    def __call__(
        self,
        tokens: Tensor,
        metadata: AttentionMetadata | None = None,
        logits_indices: Tensor | slice | None = None,
        features: Features | None = None,
    ) -> Tensor:
        """tokens: int64[T] -> logits [R, V] after the tokens at `logits_indices` (None: after all).

        features: the pass fills them, too.
        """
        if metadata is None:
            tokens = self.checked(tokens)
            metadata = AttentionMetadata.without_cache(1, len(tokens)).to(self.device)
        # A backend may do the whole pass at once; the plain one calls `forward`, below.
        return self.ops.forward(self, tokens, metadata, logits_indices, features)

    def checked(self, tokens: Tensor) -> Tensor:
        """The tokens of one text, as int64[T]. UserError if this model cannot read them."""
        most = self.config.max_position_embeddings
        is_text = tokens.dim() == 1 and 0 < len(tokens) <= most
        if not is_text or tokens.dtype not in (torch.int32, torch.int64):
            raise UserError(
                f"tokens are {tokens.dtype} of shape {[*tokens.shape]}: give those of one text, "
                f"int64[T] with T from 1 to {most}, the model's limit"
            )
        check_known(tokens.tolist(), self.config.vocab_size)
        return tokens.long()

    def forward(
        self,
        tokens: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor | slice | None,
        features: Features | None = None,
    ) -> Tensor:
        """The plain loop over the layers."""
        rope = self.rope(metadata.positions)
        x = self.embedding(tokens)  # [T, C]
        mlp_out = None
        for i, layer in enumerate(self.layers):
            for f, wanted in enumerate(features.layers if features else ()):
                if wanted == i:  # a head may want a layer twice
                    features.values[:, f] = x if i == 0 else x + mlp_out
            x, mlp_out = self.decoder_layer(layer, x, mlp_out, rope, metadata, i)
        if logits_indices is not None:
            x = x[logits_indices]  # [R, C]
            mlp_out = mlp_out[logits_indices]
        _, normed = self.ops.add_norm(x, mlp_out, self.norm, self.config.rms_norm_eps)
        return self.group.gather(self.ops.linear(normed, self.head), self.config.vocab_size)

    def embedding(self, tokens: Tensor) -> Tensor:
        """int64[T] -> [T, C]."""
        embed = partial(self.ops.embed, weight=self.embed, dtype=self.dtype)
        return self.group.embed(tokens, self.vocab_rows, embed)

    def empty_features(self, layers: tuple[int, ...], T: int) -> Features:
        """Features that a pass over T tokens fills."""
        shape = T, len(layers), self.config.hidden_size
        return Features(layers, torch.empty(shape, dtype=self.dtype, device=self.device))

    def rope(self, positions: Tensor) -> Rope:
        """The turns of dimension pairs at these positions: int[T] -> cos and sin, [T, 1, D / 2]
        each. A pair (a, b) becomes (a cos − b sin, b cos + a sin)."""
        angles = torch.outer(positions, self.frequencies)[:, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def decoder_layer(
        self,
        layer: Layer,
        x: Tensor,
        mlp_out: Tensor | None,
        rope: Rope,
        metadata: AttentionMetadata,
        i: int,
    ) -> tuple[Tensor, Tensor]:
        """Layer i: x and mlp_out, [T, C], to be added -> the same two after this layer."""
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

    def kv_spec(self, bits: Bits = (16, 16), draft_layers: int = 0) -> KVSpec:
        """What a cache stores of a token. draft_layers: the layers of a head that shares the cache
        (eagle.py)."""
        spec = KVSpec.of(self.config, self.dtype, bits, self.device, draft_layers)
        return replace(spec, ops=self.ops)

    def price(self, context: int) -> int:
        """What a token costs that is read after `context` others, in tokens read at the start of
        a text: 1 + context / C₀, rounded down.

        At C₀ its attention takes as many operations as its matrices: 2 for each of their weights,
        and 4 · H · D for each key, in every layer. At most 8: chunks of very few tokens would not
        be faster, because a pass reads all keys for them, too.
        """
        return min(8, 1 + context // self.even_context)

    # ---- The weights

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def _linear(self, name: str, N: int, K: int, bias: bool = False) -> Linear:
        weight = None
        if self.config.quantization is not None:
            weight = self.config.quantization.empty(name, N, K, self.device)
        if weight is None:
            weight = self._empty(N, K, dtype=self.weight_dtype)
        return Linear(weight, self._empty(N) if bias else None)

    def _embedding(self) -> Linear:
        return self._linear("embed", self.vocab_rows, self.config.hidden_size)

    def _layer(self, i: int) -> Layer:
        c = self.config
        C = c.hidden_size
        F = c.intermediate_size
        head_norm = None
        if c.has_head_norm:
            head_norm = HeadNorm(self._empty(2 * c.head_dim), c.rms_norm_eps)
        return Layer(
            input_norm=self._empty(C),
            qkv=self._linear(f"{i}.qkv", c.query_size + 2 * c.kv_size, C, c.qkv_bias),
            head_norm=head_norm,
            o=self._linear(f"{i}.o", C, c.query_size, c.o_bias),
            post_norm=self._empty(C),
            gate_up=self._linear(f"{i}.gate_up", 2 * F, C, c.mlp_bias),
            down=self._linear(f"{i}.down", C, F, c.mlp_bias),
        )

    @torch.no_grad()
    def _randomize(self, seed: int) -> None:
        if self.config.quantization is not None:
            raise ValueError("a quantized model has no random weights: seed=None, then fill it")
        generator = torch.Generator(self.device).manual_seed(seed)
        for name, tensor in self.named_tensors().items():
            if name.endswith("norm.weight"):
                tensor.fill_(1)
            elif tensor.is_floating_point():
                tensor.normal_(0, 0.02, generator=generator)

    def named_tensors(self) -> dict[str, Tensor]:
        """The tensors of `named_weights`: a quantized weight has several."""
        tensors = {}
        for name, weight in self.named_weights().items():
            tensors |= named_tensors(name, weight)
        return tensors

    def named_weights(self) -> dict[str, Tensor | Quantized]:
        """The weights before `pack_weights`, by their names in a checkpoint. They are views, to be
        filled."""
        weights = dict(named_parts(self.embed, {"model.embed_tokens": self.vocab_rows}))
        weights["model.norm.weight"] = self.norm
        for i, layer in enumerate(self.layers):
            weights |= self._layer_weights(layer, f"model.layers.{i}.")
        if not self.config.tie_word_embeddings:
            weights |= named_parts(self.head, {"lm_head": self.vocab_rows})
        return weights

    def _layer_weights(self, layer: Layer, name: str) -> dict[str, Tensor | Quantized]:
        c = self.config
        q = c.query_size
        kv = c.kv_size
        C = c.hidden_size
        F = c.intermediate_size
        weights = {name + "input_layernorm.weight": layer.input_norm}
        weights[name + "post_attention_layernorm.weight"] = layer.post_norm
        for linear, rows in (
            (layer.qkv, {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}),
            (layer.o, {"self_attn.o_proj": C}),
            (layer.gate_up, {"mlp.gate_proj": F, "mlp.up_proj": F}),
            (layer.down, {"mlp.down_proj": C}),
        ):
            weights |= named_parts(linear, rows, name)
        if layer.head_norm is not None:
            of_q, of_k = layer.head_norm.weight.chunk(2)
            weights[name + "self_attn.q_norm.weight"] = of_q
            weights[name + "self_attn.k_norm.weight"] = of_k
        return weights

    def pack_weights(self) -> Llama:
        """Put the weights in the order that this machine multiplies fastest. `named_weights` has no
        use after that."""
        self._pack_layers()
        is_tied = self.head is self.embed
        self.embed = self.ops.pack_weight(self.embed, self.dtype)
        self.head = self.embed if is_tied else self.ops.pack_weight(self.head, self.dtype)
        return self

    def _pack_layers(self) -> None:
        self.packed_bytes = tensor_bytes(self)
        places = [*product(self.layers, ("qkv", "o", "gate_up", "down"))]
        num_bytes = sum(getattr(layer, role).weight.nbytes for layer, role in places)

        def pack(place: tuple[Layer, str]) -> int:
            layer, role = place
            linear = getattr(layer, role)
            if role in ROW_PARALLEL and self.group.rank > 0:  # a sum has a bias once
                linear = linear._replace(bias=None)
            setattr(layer, role, self.ops.pack_weight(linear, self.dtype))
            return linear.weight.nbytes

        do_each("packing", pack, places, self.device, num_bytes)

    @classmethod
    def load(
        cls,
        name: str | Path,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        trainable: bool = False,
        bits: Kind = 16,
        ops: Ops | None = None,
    ) -> Llama:
        """A model from an alias, a Hub id, a folder or a GGUF: see `checkpoint.load.load_llama`."""
        return load_llama(cls, name, device, dtype, trainable, bits, ops)


def named_parts(
    linear: Linear, rows: dict[str, int], prefix: str = ""
) -> Iterator[tuple[str, Tensor | Quantized]]:
    """The weights of a checkpoint that are rows of this matrix: q, k and v in qkv, say.

    rows: name -> number of rows. The parts of a quantized matrix share the order of its columns.
    """
    for kind, matrix in zip(("weight", "bias"), linear):
        if matrix is not None:
            for name, part in zip(rows, matrix.split(list(rows.values()))):
                yield f"{prefix}{name}.{kind}", part


def weight_bytes(llama: Llama, read: bool = False) -> int:
    """The bytes of the weights as they are stored, scales included; a tied head counts once.

    read: count only what a step reads. It reads single rows of an embedding that is not tied.
    """
    is_tied = llama.embed is llama.head
    total = 0
    for name, num_bytes in (llama.packed_bytes or tensor_bytes(llama)).items():
        if is_tied or not read or "embed_tokens" not in name:
            total += num_bytes
    return total


def tensor_bytes(llama: Llama) -> dict[str, int]:
    """The bytes of each tensor of a model that is not packed."""
    return {name: tensor.nbytes for name, tensor in llama.named_tensors().items()}


def rope_frequencies(config: Config) -> Tensor:
    """Radians by which each pair of dimensions turns from a position to the next: float32[D/2].

    For texts longer than in training (`rope_scaling`), frequencies are divided. The linear kind
    divides all of them by `factor`. The llama3 kind divides those of slow pairs: pairs that make
    fewer than low_freq_factor turns over the original context, and in part pairs that make up to
    high_freq_factor. With `factors`, each frequency has its own.
    """
    D = config.head_dim
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, D, 2, dtype=torch.float32) / D)
    scaling = config.rope_scaling or {}
    if "factors" in scaling:
        return frequencies / torch.tensor(scaling["factors"], dtype=torch.float32)
    slowed = frequencies / scaling.get("factor", 1)
    if "original_max_position_embeddings" not in scaling:
        return slowed
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: a fast pair, kept; 0: a slow one
    return keep * frequencies + (1 - keep) * slowed


@torch.inference_mode()
def main(name: str = "tiny") -> None:
    """The demonstration shows that it does not matter how a text is split into chunks."""
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
