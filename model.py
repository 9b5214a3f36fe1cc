"""Llama: the forward pass.

A forward pass reads a packed row of tokens: the new tokens of every sequence of this step, end to end. The model knows
nothing of sequences, caches or devices: `step` says where each token belongs, and `ops` (kernels.py) computes.

    x = embed[tokens]                                           [T, C]
    for each layer:
        q, k, v = qkv(norm(x))                                  [T, H, D], [T, G, D], [T, G, D]
        x = x + o(attend(q, k, v))                              attend rotates q and k, and stores k and v
        gate, up = gate_up(norm(x))                             [T, F] each
        x = x + down(silu(gate) · up)
    logits = head(norm(x))[rows]                                [R, V]

  - RMSNorm (Zhang & Sennrich 2019): x / √(mean x² + ε) · w. The next norm computes the sum x + …, in one pass over x.
  - Rotary embeddings (Su et al. 2021): dimension pair (i, i + D/2) of q and k turns by position · θ^(−2i/D), so that
    q · k depends on the distance alone (weights.py has the scalings for long texts).
  - Grouped-query attention (Ainslie et al. 2023): H query heads share G key/value heads. SwiGLU (Shazeer 2020).

Cost: 2 · parameters operations a token, and reading every weight once a step, however many tokens it has.

    T tokens of a step · R rows asked for · C hidden_size · H query heads · G key/value heads · D head_dim
    F intermediate_size · V vocab_size
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.config import Config, inverse_frequencies
from checkpoint.formats import Quantization
from checkpoint.hub import find_folder
from checkpoint.tensors import Checkpoint
from errors import UserError
from kernels import Linear, Ops, Step, find_device, free_memory, ops_for
from quant import GROUPS, Kind, Quantized, quantize, stored_bits

OLD = (
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # tensors of old checkpoints, not needed
)


@dataclass
class Layer:
    """The weights of a layer. After `Llama.prepare` each Linear is in the backend's own format."""

    input_norm: Tensor  # [C]
    qkv: Linear  # [(H + 2 G) D, C]
    o: Linear  # [C, H D]
    post_norm: Tensor  # [C]
    gate_up: Linear  # [2 F, C]
    down: Linear  # [C, F]


class Llama:
    """`llama(tokens, step, rows)`: logits for the tokens at `rows` of a step. Without a step: one text, no cache."""

    def __init__(
        self,
        config: Config,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int | None = 0,
        ops: Ops | None = None,
        weight_dtype: torch.dtype | None = None,
    ):
        """Random weights from `seed`; None: uninitialized, to be filled. weight_dtype: of matrices, if not `dtype`."""
        self.device, self.ops = torch.empty(0, device=device).device, ops or ops_for(device)
        self.dtype, self.weight_dtype, own = (
            dtype,
            weight_dtype or dtype,
            self.ops.share_config(config),
        )
        self.config, self.rows = (
            replace(own, vocab_size=config.vocab_size),
            own.vocab_size,
        )  # of embedding and head
        C, V = config.hidden_size, self.rows
        self.embed = self._linear(V, C, head=True)
        self.layers = [self._layer() for _ in range(config.num_hidden_layers)]
        self.norm = self._empty(C)
        self.head = self.embed if config.tie_word_embeddings else self._linear(V, C, head=True)
        frequencies = inverse_frequencies(config)
        self.frequencies = torch.cat((-frequencies, frequencies)).to(device)  # [D]
        if seed is not None:
            self._randomize(seed)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def _linear(self, N: int, K: int, bias: bool = False, head: bool = False) -> Linear:
        how = self.config.quantization
        bits = 16 if how is None else how.head_bits if head else how.bits
        if bits == 16:
            weight = self._empty(N, K, dtype=self.weight_dtype)
        else:
            weight = how.empty(N, K, self.device, head)
        return Linear(weight, self._empty(N) if bias else None)

    def _layer(self) -> Layer:
        c, make = self.config, self._linear
        C, F, q, kv = c.hidden_size, c.intermediate_size, c.query_size, c.kv_size
        return Layer(
            self._empty(C),
            make(q + 2 * kv, C, c.attention_bias),
            make(C, q, c.attention_bias),
            self._empty(C),
            make(2 * F, C, c.mlp_bias),
            make(C, F, c.mlp_bias),
        )

    @torch.no_grad()
    def _randomize(self, seed: int) -> None:
        if self.config.quantization is not None:
            raise UserError(
                "a quantized model has no random weights: make it with seed=None, and fill it"
            )
        generator = torch.Generator(self.device).manual_seed(seed)
        for name, place in self.places().items():
            place.fill_(1) if name.endswith("norm.weight") else place.normal_(
                0, 0.02, generator=generator
            )

    # ---- The forward pass

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What `rotate` needs at these positions: int64[T] -> cos, sin: [T, 1, D], the first half of sin negated."""
        angles = positions[:, None, None] * self.frequencies
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def __call__(
        self, tokens: Tensor, step: Step | None = None, rows: Tensor | slice | None = None
    ) -> Tensor:
        """tokens: int64[T] -> logits [R, V] of the tokens at `rows` (indices or a slice; None: every row)."""
        step = step or Step.alone(1, len(tokens), self.device)
        return self.ops.forward(self._forward, self, tokens, step, rows)

    def _forward(self, tokens: Tensor, step: Step, rows: Tensor | slice | None) -> Tensor:
        ops, rope = self.ops, self.rope(step.places.positions)
        x, delta = ops.embed(tokens, self.embed, self.dtype), None  # [T, C]
        for i, layer in enumerate(self.layers):
            x, delta = self.through(layer, x, delta, rope, step, i)
        if rows is not None:
            x, delta = x[rows], None if delta is None else delta[rows]
        return ops.linear(ops.add_norm(x, delta, self.norm, self.config.rms_norm_eps)[1], self.head)

    def through(
        self,
        w: Layer,
        x: Tensor,
        delta: Tensor | None,
        rope: tuple[Tensor, Tensor],
        step: Step,
        i: int,
    ) -> tuple[Tensor, Tensor]:
        """Layer i on the residual stream x + delta -> x after attention, and the MLP's output as delta: [T, C] each."""
        ops, G, D, eps = (
            self.ops,
            self.config.num_key_value_heads,
            self.config.head_dim,
            self.config.rms_norm_eps,
        )
        x, y = ops.add_norm(x, delta, w.input_norm, eps)
        mixed = ops.attend(ops.linear(y, w.qkv).unflatten(1, (-1, D)), G, *rope, step, i)
        x, y = ops.add_norm(x, ops.linear(mixed.flatten(1), w.o), w.post_norm, eps)
        return x, ops.linear(ops.swiglu(ops.linear(y, w.gate_up)), w.down)

    # ---- The weights

    @classmethod
    def load(
        cls,
        name: str | Path,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        trainable: bool = False,
        bits: Kind = 16,
    ) -> "Llama":
        """A model from an alias, a Hub id or a folder. FileNotFoundError or ValueError names the way out.

        device: a GPU if there is one. dtype: float32 on a CPU, on a GPU the checkpoint's. trainable: plain weights with
        gradients; otherwise weights are prepared. bits: other than 16 rounds the weights of a model in 16 or 32 bits.
        """
        config, checkpoint = Config.load(folder := find_folder(name)), Checkpoint(folder)
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
        rules = dict(ignore=OLD, twice=tied, how=config.quantization)
        sources = cls(config, "meta", seed=None).places()
        checkpoint.audit(sources, **rules)  # before any memory is asked for
        if trainable and (config.quantization or bits != 16):
            raise UserError(
                f"{name}: quantized weights cannot be trained or changed: "
                "use the model in 16 or 32 bits that they were made from"
            )
        if bits != 16:
            config = config.quantized(Quantization(bits, GROUPS.get(bits, 128)))
        ops = ops_for(device := torch.device(device) if device else find_device())
        dtype = dtype or ops.dtype(checkpoint.dtypes[0])
        matrices = dtype if trainable else ops.weight_dtype(checkpoint.dtypes, dtype)
        places = {
            id(place): place
            for place in cls(config, "meta", dtype, None, ops, matrices).places().values()
        }
        needs = sum(place.nbytes for place in places.values())
        if needs > (free := free_memory(device)):
            raise UserError(
                f"{name} needs {needs / 1e9:.1f} GB for its weights, and {device} has {free / 1e9:.1f} GB "
                "free: use fewer --bits, another --device, or a smaller model"
            )
        model = cls(config, device, dtype, None, ops, matrices)
        model.fill(checkpoint.tensors(sources, **rules))
        return model.requires_grad_() if trainable else model.prepare()

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each tensor of a checkpoint to its place. A plain tensor is rounded to nearest for a quantized place."""
        places, share = self.places(), self.ops.share_tensor
        for name, tensor in tensors:
            if tensor.dtype != places[name].dtype and f"{name}_scale" in places:
                bits = stored_bits(places[name].dtype, f"{name}_zero" in places)
                rows = share(
                    tensor, (len(places[name]), tensor.shape[1])
                )  # whole rows: a scale is of one
                q = quantize(rows, bits, self.config.quantization.group)
                for part, numbers in zip(("", "_scale", "_zero"), q):
                    if numbers is not None:
                        places[name + part].copy_(share(numbers, places[name + part].shape))
            else:
                places[name].copy_(share(tensor, places[name].shape))

    def places(self) -> dict[str, Tensor]:
        """The model's tensors before `prepare`, by their names in a checkpoint, to be filled."""
        c = self.config
        C, F, V, q, kv = c.hidden_size, c.intermediate_size, self.rows, c.query_size, c.kv_size
        places = dict(split(self.embed, {"model.embed_tokens": V})) | {
            "model.norm.weight": self.norm
        }
        for i, layer in enumerate(self.layers):
            parts = [
                ("input_layernorm.weight", layer.input_norm),
                ("post_attention_layernorm.weight", layer.post_norm),
                *split(
                    layer.qkv,
                    {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv},
                ),
                *split(layer.o, {"self_attn.o_proj": C}),
                *split(layer.gate_up, {"mlp.gate_proj": F, "mlp.up_proj": F}),
                *split(layer.down, {"mlp.down_proj": C}),
            ]
            places |= {f"model.layers.{i}.{name}": part for name, part in parts}
        return places if c.tie_word_embeddings else places | dict(split(self.head, {"lm_head": V}))

    def prepare(self) -> "Llama":
        """Put the weights in the order that this machine multiplies fastest. No `places` or `fill` after that."""
        for layer in self.layers:
            for name in ("qkv", "o", "gate_up", "down"):
                setattr(layer, name, self.ops.prepare(getattr(layer, name), self.dtype, name))
        tied = self.head is self.embed
        self.embed = self.ops.prepare(self.embed, self.dtype, "embed")
        self.head = self.embed if tied else self.ops.prepare(self.head, self.dtype, "head")
        return self

    def parameters(self) -> list[Tensor]:
        """All tensors of a plain model, each once: what training changes."""
        ends = [self.embed] if self.head is self.embed else [self.embed, self.head]
        linears = [
            *ends,
            *(w for layer in self.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)),
        ]
        norms = [
            self.norm,
            *(norm for layer in self.layers for norm in (layer.input_norm, layer.post_norm)),
        ]
        return [*(part for linear in linears for part in linear if part is not None), *norms]

    def requires_grad_(self, on: bool = True) -> "Llama":
        for parameter in self.parameters():
            parameter.requires_grad_(on)
        return self


def split(linear: Linear, rows: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Name each tensor of a checkpoint that is some rows of this matrix: q, k and v in qkv, gate and up in gate_up.
    rows: name -> number of rows. If columns are reordered, all share one order."""
    weight = (
        linear.weight[:3] if isinstance(linear.weight, Quantized) else (linear.weight, None, None)
    )
    for kind, whole in zip(
        ("weight", "weight_scale", "weight_zero", "bias"), (*weight, linear.bias)
    ):
        if whole is not None:
            yield from (
                (f"{name}.{kind}", part)
                for name, part in zip(rows, whole.split(list(rows.values())))
            )
    if isinstance(linear.weight, Quantized) and linear.weight.order is not None:
        yield from ((f"{name}.weight_order", linear.weight.order) for name in rows)


# The demonstration: it does not matter how a text is split into chunks.


@torch.inference_mode()
def main(name: str = "tiny") -> None:
    llama, text = Llama.load(name, dtype=torch.float32), torch.arange(1, 101)
    whole = llama(text)
    print(
        "100 tokens at once, and in chunks through a cache: the largest difference of their logits, over the largest"
    )
    for sizes in ([100], [99, 1], [50, 50], [1] * 100, [7, 13, 80]):
        cache = KVCache.of(llama, len(text))
        seq, _ = cache.open(())
        parts = [llama(chunk, cache.extend([(seq, chunk)])) for chunk in text.split(sizes)]
        error = (torch.cat(parts) - whole).abs().max() / whole.abs().max()
        print(f"  {len(sizes):3} chunks, the first of {sizes[0]:3}: {error:.1e}")


if __name__ == "__main__":
    from kvcache import KVCache

    main(*sys.argv[1:])
