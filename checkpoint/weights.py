"""The weights of a model: their shapes, their names in a folder, random ones, packed ones.

A folder has separate matrices for q, k and v. Here their rows are joined in one matrix, so that one
product computes all three; gate and up are joined, too. So a model is loaded in three steps:

    Llama(config, seed=None)     empty matrices
    named_weights()              views of these, by the names in a folder; checkpoint/load.py
                                 copies the tensors of the folder into them
    pack_weights()               each matrix in the order that this machine multiplies fastest

Invariant: `named_weights` are all weights, each once.

    C hidden_size · H query heads · G key/value heads · D head_dim · F intermediate_size
    V vocab_size · n features of a head · [N, K] a matrix: outputs, inputs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from checkpoint.progress import do_each
from kernels import HeadNorm, Linear, Ops, ops_for
from parallel import ROW_PARALLEL, group_for
from quant import Quantized, named_tensors

if TYPE_CHECKING:
    from typing import Self

    from checkpoint.config import Config
    from checkpoint.eagle import EagleConfig
    from model import Llama

# The matrices here -> the matrices in a folder whose rows are joined in it.
PARTS = {
    "embed": ("model.embed_tokens",),
    "head": ("lm_head",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "fc": ("fc",),  # of an EAGLE head
}
OF_A_LAYER = ("qkv", "o", "gate_up", "down")


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


class Weights:
    """What a Llama (model.py) and an EAGLE head (eagle.py) have in common: embedding, layers, norm,
    head."""

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
        self.device = torch.empty(0, device=device, dtype=dtype).device  # "cuda" becomes "cuda:0"
        self.dtype = dtype
        self.weight_dtype = weight_dtype or dtype
        self.ops = ops or ops_for(device)
        # If several processes share the model (parallel.py), each has a shard of every matrix, as
        # in a smaller model. Otherwise shard is config.
        self.group = group_for(self.device)
        shard = config.shard(self.group.n)
        self.config = replace(shard, vocab_size=config.vocab_size)
        C = config.hidden_size
        self.embed = self.linear("embed", shard.vocab_size, C)  # [V, C]
        self.layers = [self._layer(i) for i in range(config.num_hidden_layers)]
        self.norm = self.empty(C)
        self.head = self.embed  # [V, C]
        self.outside = ["embed"]  # the matrices that belong to no layer
        if not config.tie_word_embeddings:
            self.head = self.linear("head", shard.vocab_size, C)
            self.outside.append("head")
        self.frequencies = config.rope_frequencies().to(device)  # [D / 2]
        self.attention_factor = config.attention_factor
        # The bytes of each tensor before `pack_weights`, which then has no more names.
        self.unpacked_bytes: dict[str, int] = {}
        if seed is not None:
            self.randomize(seed)

    # ---- Uninitialized

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def linear(self, name: str, N: int, K: int, bias: bool = False) -> Linear:
        """A matrix of the model ("embed", "head", "3.qkv"), as the config stores it."""
        weight = None
        if self.config.quantization is not None:
            weight = self.config.quantization.empty(name, N, K, self.device)
        if weight is None:
            weight = self.empty(N, K, dtype=self.weight_dtype)
        return Linear(weight, self.empty(N) if bias else None)

    def _layer(self, i: int) -> Layer:
        c = self.config
        C = c.hidden_size
        F = c.intermediate_size
        head_norm = None
        if c.has_head_norm:
            head_norm = HeadNorm(self.empty(2 * c.head_dim), c.rms_norm_eps)
        return Layer(
            input_norm=self.empty(C),
            qkv=self.linear(f"{i}.qkv", c.query_size + 2 * c.kv_size, C, c.qkv_bias),
            head_norm=head_norm,
            o=self.linear(f"{i}.o", C, c.query_size, c.o_bias),
            post_norm=self.empty(C),
            gate_up=self.linear(f"{i}.gate_up", 2 * F, C, c.mlp_bias),
            down=self.linear(f"{i}.down", C, F, c.mlp_bias),
        )

    @torch.no_grad()
    def randomize(self, seed: int) -> None:
        if self.config.quantization is not None:
            raise ValueError("a quantized model has no random weights: seed=None, then fill it")
        generator = torch.Generator(self.device).manual_seed(seed)
        for name, tensor in self.named_tensors().items():
            if name.endswith("norm.weight"):
                tensor.fill_(1)
            elif tensor.is_floating_point():
                tensor.normal_(0, 0.02, generator=generator)

    # ---- By name

    def named_weights(self) -> dict[str, Tensor | Quantized]:
        """The weights before `pack_weights`, by their names in a folder."""
        c = self.config
        heads = [c.query_size, c.kv_size, c.kv_size]
        weights = {"model.norm.weight": self.norm}
        for role in self.outside:
            weights |= parts(role, getattr(self, role))
        for i, layer in enumerate(self.layers):
            name = f"model.layers.{i}."
            weights[name + "input_layernorm.weight"] = layer.input_norm
            weights[name + "post_attention_layernorm.weight"] = layer.post_norm
            for role in OF_A_LAYER:
                rows = heads if role == "qkv" else None
                for part, weight in parts(role, getattr(layer, role), rows):
                    weights[name + part] = weight
            if layer.head_norm is not None:
                of_q, of_k = layer.head_norm.weight.chunk(2)
                weights[name + "self_attn.q_norm.weight"] = of_q
                weights[name + "self_attn.k_norm.weight"] = of_k
        return weights

    def named_tensors(self) -> dict[str, Tensor]:
        """The tensors of `named_weights`: a quantized weight has several."""
        tensors = {}
        for name, weight in self.named_weights().items():
            tensors |= named_tensors(name, weight)
        return tensors

    def tensor_bytes(self) -> dict[str, int]:
        """The bytes of each tensor, by its name in a folder. Packing does not change them."""
        if self.unpacked_bytes:
            return self.unpacked_bytes
        return {name: tensor.nbytes for name, tensor in self.named_tensors().items()}

    # ---- Packed

    def pack_weights(self) -> Self:
        """Put the weights in the order that this machine multiplies fastest. `named_weights` has no
        use after that."""
        self.unpacked_bytes = self.tensor_bytes()
        is_tied = self.head is self.embed
        places = [*product(self.layers, OF_A_LAYER), *((self, role) for role in self.outside)]
        num_bytes = sum(getattr(owner, role).weight.nbytes for owner, role in places)

        def pack(place: tuple[Layer | Weights, str]) -> int:
            owner, role = place
            linear = getattr(owner, role)
            if role in ROW_PARALLEL and self.group.rank > 0:
                linear = linear._replace(bias=None)  # products are summed: one process adds it
            setattr(owner, role, self.ops.pack_weight(linear, self.dtype))
            return linear.weight.nbytes

        do_each("packing", pack, places, self.device, num_bytes)
        if is_tied:
            self.head = self.embed
        return self


class HeadWeights(Weights):
    """Those of an EAGLE head (eagle.py): one layer, with an input of its own."""

    def __init__(
        self,
        config: EagleConfig,
        target: Llama,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int | None = 0,
        ops: Ops | None = None,
        weight_dtype: torch.dtype | None = None,
    ):
        """As for a Llama, but `self.config` is that of a Llama with the head's one layer, and
        `self.eagle` is the whole."""
        self.eagle = config
        self.target = target
        self.feature_layers = config.layers_of(target.config)
        self.cache_layer = target.config.num_hidden_layers  # after the target's own
        super().__init__(
            config.draft_config, device, dtype, seed=None, ops=ops, weight_dtype=weight_dtype
        )
        c = self.config
        C = c.hidden_size
        n = len(self.feature_layers)
        self.fc = self.linear("fc", C, n * config.target_hidden_size)
        (layer,) = self.layers
        layer.qkv = self.linear("qkv", c.query_size + 2 * c.kv_size, 2 * C, c.qkv_bias)
        self.hidden_norm = self.empty(C)  # of f in a
        self.feature_norms = {}  # of the features, before `fc`; most heads have none
        for name, size in config.feature_norms(n).items():
            self.feature_norms[name] = self.empty(size)
        # The head's token i is the target's token i + offsets[i].
        self.offsets = torch.zeros(c.vocab_size, dtype=torch.int64, device=device)
        self.outside = ["fc", "head"]
        self.embed = Linear(self.empty(0, C))  # none: the target's embedding is read
        if config.has_embedding:  # never quantized, and whole in every process
            self.outside.append("embed")
            self.embed = Linear(self.empty(target.config.vocab_size, C))
        if seed is not None:
            self.randomize(seed)

    def named_weights(self) -> dict[str, Tensor | Quantized]:
        """The weights, by their names in a folder (checkpoint/eagle.py)."""
        of_llama = super().named_weights().items()
        weights = {name.removeprefix("model."): weight for name, weight in of_llama}
        weights["layers.0.hidden_norm.weight"] = self.hidden_norm
        weights |= self.feature_norms
        if self.eagle.has_offsets:
            weights["d2t"] = self.offsets
        return weights


def parts(
    role: str, linear: Linear, rows: Sequence[int] | None = None
) -> Iterator[tuple[str, Tensor | Quantized]]:
    """The weights and biases in a folder that are joined in this matrix, by name, as views. rows:
    how many each has; None: the same number."""
    names = PARTS[role]
    for kind, matrix in zip(("weight", "bias"), linear):
        if matrix is not None:
            rows = rows or [matrix.shape[0] // len(names)] * len(names)
            for name, part in zip(names, matrix.split(rows)):
                yield f"{name}.{kind}", part


def weight_bytes(model: Weights, read: bool = False) -> int:
    """The bytes of the weights as they are stored, scales included; a tied head counts once.

    read: count only what a step reads. It reads single rows of an embedding that is not tied.
    """
    is_tied = model.embed is model.head
    total = 0
    for name, num_bytes in model.tensor_bytes().items():
        if is_tied or not read or "embed_tokens" not in name:
            total += num_bytes
    return total
