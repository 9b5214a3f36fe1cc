"""Llama: the forward pass.

A forward pass is a packed row of tokens: the new tokens of every sequence of this step, end to end. The model knows nothing
of sequences or caches; what it needs of them is in the `step`: each token's position, and `attend`, which stores the new keys
and values and lets every token look back within its own sequence.

    x = embed[tokens]                                           [T, C]
    for each layer:
        q, k, v = rotate(qkv_proj(norm(x)))                     [T, H, D], [T, G, D], [T, G, D]
        x = x + o_proj(step.attend(layer, q, k, v))
        gate, up = gate_up_proj(norm(x))                        [T, F] each
        x = x + down_proj(silu(gate) · up)
    logits = head(norm(x))[rows]                                [R, V]

Without a step, `llama(tokens)` is one sequence from its first token, with no cache: the plain specification.

  - RMSNorm (Zhang & Sennrich 2019): x / √(mean x² + ε) · w, computed in at least float32. What a layer adds to x waits for the next norm,
    which adds it as it reads x: on a GPU that is one launch (fused.py).
  - Rotary embeddings (Su et al. 2021): dimension pair (i, i + D/2) of q and k turns by position · θ^(−2i/D), so that q · k
    depends on the distance alone. `llama3` scaling (Llama 3.1) slows the low frequencies down for long texts, `linear` all.
  - Grouped-query attention (Ainslie et al. 2023): H query heads share G key/value heads.
  - SwiGLU (Shazeer 2020).

Cost: 2 · parameters operations a token, and reading every weight once a step, however many tokens it has.

    T tokens of a step · R rows asked for · C hidden_size · H query heads · G key/value heads · D head_dim
    F intermediate_size · V vocab_size
"""
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import native
from config import Config, Quantization, inverse_frequencies
from kernels import on_gpu
from kvcache import Alone, KVCache, free_memory, tokens_that_fit
from kvquant import Bits
from matmul import Linear, default_dtype
from nativestep import NativeStep
from quant import quantize
from quantmatmul import QuantizedLinear
from weights import Checkpoint, find


class Step(Protocol):
    """What a forward pass needs to know of the texts its tokens belong to."""
    positions: Tensor                                                       # int64[T]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


def fuses(x: Tensor, *others: Tensor | None) -> Any:
    """Who does what is between the products in one launch each, for such tensors: fused.py on a GPU, native.py on a CPU; None: plain torch."""
    if on_gpu(x.device) and x.dtype != torch.float64 and not (x.requires_grad and torch.is_grad_enabled()):
        import fused
        return fused
    return native if native.serves(x, *others) else None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of x: [T, heads, D]. cos, sin: [T, 1, D], the first half of sin negated."""
    if own := fuses(x, cos, sin):
        return own.rotate(x, cos, sin)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up. x: [T, 2 F], gate and up side by side -> [T, F]."""
    if own := fuses(x):
        return own.swiglu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, **where: Any):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size, **where), requires_grad=False), eps
        self.twice: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:                                 # [T, C] -> [T, C]
        if self.twice is not None:
            return F.layer_norm(torch.cat((x, -x), -1), self.twice.shape, self.twice, None, self.eps)[:, :x.shape[-1]]
        wide = x.float() if x.dtype.itemsize == 2 else x
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + delta, and its norm: [T, C] each. None adds nothing."""
        if (own := fuses(x, delta, self.weight)) and not self._forward_pre_hooks:       # whoever looks on (train/calibrate.py) sees what the norm gets
            return own.add_norm(x, delta, self.weight, self.eps)
        x = x if delta is None else x + delta
        return x, self(x)

    def pack(self) -> None:
        """The mean of (x, −x) is 0, so its LayerNorm begins with the RMSNorm of x: on a CPU one kernel instead of six."""
        if self.weight.device.type == "cpu":
            self.twice = torch.cat((self.weight.detach(), self.weight.detach()))


def product(config: Config, head: bool = False) -> Callable[..., Linear | QuantizedLinear]:
    """The kind of product that a model's layers, or its head and embedding, are made of."""
    how = config.quantization
    bits = 16 if how is None else how.head_bits if head else how.bits
    return Linear if bits == 16 else partial(QuantizedLinear, bits=bits, group=how.group)


class Layer(nn.Module):
    """Attention, then the feed-forward network, each added to the residual stream."""

    def __init__(self, config: Config, **where: Any):
        super().__init__()
        C, D = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, D
        make = product(config)
        self.input_norm = RMSNorm(C, config.rms_norm_eps, **where)
        self.qkv_proj = make(C, (self.heads + 2 * self.kv_heads) * D, config.attention_bias, **where)
        self.o_proj = make(self.heads * D, C, config.attention_bias, **where)
        self.post_norm = RMSNorm(C, config.rms_norm_eps, **where)
        self.gate_up_proj = make(C, 2 * config.intermediate_size, config.mlp_bias, **where)
        self.down_proj = make(config.intermediate_size, C, config.mlp_bias, **where)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Any) -> Tensor:           # [T, C] -> [T, C]
        x, delta = self.ahead(x, None, cos, sin, attend)
        return x + delta

    def ahead(self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, attend: Any, turned: Any = None) -> tuple[Tensor, Tensor]:
        """Of a stream x + delta: x + delta + attention, and what the network adds to that, for the next norm to add. [T, C] each. turned: what
        attends and rotates in one (kernelstep.py), if there is such a thing."""
        T, H, G = x.shape[0], self.heads, self.kv_heads
        x, y = self.input_norm.add(x, delta)
        qkv = self.qkv_proj(y).view(T, H + 2 * G, self.head_dim)
        if turned is not None:
            mixed = turned(qkv, cos, sin)
        else:
            qk, v = qkv.split((H + G, G), dim=1)
            q, k = rotate(qk, cos, sin).split((H, G), dim=1)
            mixed = attend(q, k, v)
        x, y = self.post_norm.add(x, self.o_proj(mixed.reshape(T, H * self.head_dim)))
        return x, self.down_proj(swiglu(self.gate_up_proj(y)))

    def parts(self) -> list[tuple[Linear | QuantizedLinear, dict[str, int]]]:
        """The products, and what a checkpoint has of each, by name, with its rows: q, k and v are one product, gate and up another."""
        q, kv, wide = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.gate_up_proj.out_features // 2
        return [(self.qkv_proj, {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}),
                (self.o_proj, {"self_attn.o_proj": self.o_proj.out_features}),
                (self.gate_up_proj, {"mlp.gate_proj": wide, "mlp.up_proj": wide}),
                (self.down_proj, {"mlp.down_proj": self.down_proj.out_features})]

    def places(self, prefix: str) -> dict[str, Tensor]:
        """Where the checkpoint's tensors go."""
        places = {f"{prefix}.input_layernorm.weight": self.input_norm.weight, f"{prefix}.post_attention_layernorm.weight": self.post_norm.weight}
        for linear, rows in self.parts():
            for kind, whole in linear.tensors().items():
                places |= {f"{prefix}.{name}.{kind}": part for name, part in zip(rows, whole.split(list(rows.values())))}
        return places


class Llama(nn.Module):
    """`llama(tokens, step, rows)`: logits for the tokens at `rows` of a packed step."""

    def __init__(self, config: Config, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int | None = 0):
        """A model with random weights, drawn with `seed`; None leaves them to be filled."""
        super().__init__()
        where = dict(device=device, dtype=dtype)
        self.config = config
        make = partial(product(config, head=True), config.hidden_size, config.vocab_size, **where)
        self.embed = make()
        self.layers = nn.ModuleList(Layer(config, **where) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **where)
        self.head = self.embed if config.tie_word_embeddings else make()
        frequencies = inverse_frequencies(config)
        self.few: native.Layers | None = None                                               # all layers in one call, for a few tokens on a CPU
        self.register_buffer("frequencies", torch.cat((-frequencies, frequencies)).to(device), persistent=False)       # [D]
        if seed is not None:
            self._randomize(seed)

    @torch.no_grad()
    def _randomize(self, seed: int) -> None:
        if self.config.quantization is not None:
            raise ValueError("a quantized model has no random weights: make it with seed=None, and fill it")
        generator = torch.Generator(self.device).manual_seed(seed)
        for name, place in self.places().items():
            if name.endswith("norm.weight"):
                place.fill_(1)
            else:
                place.normal_(0, 0.02, generator=generator)

    @classmethod
    def load(cls, name: str | Path, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
             trainable: bool = False, bits: int = 16) -> "Llama":
        """A model from an alias, a Hub id or a folder. FileNotFoundError and ValueError name what is wrong and the way out.

        device: a GPU if there is one. dtype: the checkpoint's, or what this CPU is good at. trainable: plain weights with
        gradients; otherwise they are packed for a CPU's products. bits: 8 or 4 rounds the weights of an ordinary model to that many.
        """
        config, checkpoint, sources, rules = cls._open(find(name))                  # before any memory is asked for
        if trainable and (config.quantization or bits != 16):
            raise ValueError(f"{name}: quantized weights cannot be trained or changed: use the model in 16 or 32 bits that they were made from")
        if bits != 16:
            config = config.quantized(Quantization(bits))
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        width = config.quantization.bits if config.quantization else 16
        dtype = dtype or default_dtype(checkpoint.dtype, device, is_small(config), width)
        needs = sum(place.nbytes for place in cls(config, "meta", dtype, seed=None).places().values())
        if needs > (free := free_memory(device)):
            raise ValueError(f"{name} needs {needs / 1e9:.1f} GB for its weights, and {device} has {free / 1e9:.1f} GB "
                             "free: use fewer --bits, another --device, or a smaller model")
        model = cls(config, device, dtype, seed=None)
        model.fill(checkpoint.tensors(sources, **rules))
        return model.requires_grad_() if trainable else model.pack()

    @classmethod
    def _open(cls, folder: Path) -> tuple[Config, Checkpoint, dict[str, Tensor], dict[str, Any]]:
        """A folder's config, its checkpoint, the tensors that it must hold (on no device), and what else it may: all checked."""
        config, checkpoint = Config.load(folder), Checkpoint(folder)
        rules = dict(ignore=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
                     twice={"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {})
        sources = cls(config, "meta", seed=None).places()
        checkpoint.audit(sources, **rules)
        return config, checkpoint, sources, rules

    def rounded(self, folder: Path, bits: int = 4, group: int = 128) -> "Llama":
        """A second model whose layers' products have fewer bits, rounded to the nearest from this one's folder, a tensor at a time. All else,
        embedding, norms and head, is this model's own."""
        config, checkpoint, sources, _ = self._open(folder)
        copy = Llama(config.quantized(Quantization(bits, group)), "meta", self.dtype, seed=None)
        copy.embed, copy.head, copy.norm, copy.frequencies = self.embed, self.head, self.norm, self.frequencies
        for i, own in enumerate(self.layers):
            copy.layers[i] = layer = Layer(copy.config, device=self.device, dtype=self.dtype)
            layer.input_norm, layer.post_norm = own.input_norm, own.post_norm
        copy.fill((name, checkpoint.read(name)) for name in sources if name.startswith("model.layers.") and not name.endswith("norm.weight"))
        for linear in (linear for layer in copy.layers for linear, _ in layer.parts()):
            linear.pack()
        return copy

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Put each tensor of a checkpoint in its place; where that has fewer bits, rounded to the nearest."""
        places = self.places()
        for name, tensor in tensors:
            if tensor.is_floating_point() and f"{name}_scale" in places:
                bits = 8 if places[name].dtype == torch.int8 else 4
                for part, numbers in zip(("", "_scale", "_zero"), quantize(tensor, bits, self.config.quantization.group)):
                    if numbers is not None:
                        places[name + part].copy_(numbers)
            else:
                places[name].copy_(tensor)

    def places(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, by their names there."""
        places = {f"model.embed_tokens.{kind}": whole for kind, whole in self.embed.tensors().items()} | {"model.norm.weight": self.norm.weight}
        for i, layer in enumerate(self.layers):
            places |= layer.places(f"model.layers.{i}")
        head = {} if self.config.tie_word_embeddings else self.head.tensors()
        return places | {f"lm_head.{kind}": whole for kind, whole in head.items()}

    def pack(self) -> "Llama":
        """Make ready to run on a CPU: products in the order that it multiplies fastest (matmul.py), norms in one piece; no-op on a GPU."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.pack()
            elif isinstance(module, (Linear, QuantizedLinear)):
                read = module is self.embed and native.library() is None                     # row by row: oneDNN's order cannot be
                if not read or module is self.head:
                    module.pack(keep=read)
        self.few = native.Layers.of(self)
        return self

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def cache(self, max_len: int | None = None, sequences: int = 1, dtype: torch.dtype | None = None, bits: Bits = (16, 16)) -> KVCache:
        """A contiguous cache of this model's shape, for `sequences` texts of up to `max_len` tokens (its own limit)."""
        c = self.config
        return KVCache(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, c.max_position_embeddings if max_len is None else max_len, sequences,
                       self.device, dtype or self.dtype, bits)

    def max_len(self, bits: Bits = (16, 16)) -> int:
        """The longest text: this model's limit, or what a cache can hold in the memory that is left."""
        c = self.config
        return min(c.max_position_embeddings, tokens_that_fit(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, self.dtype, self.device, bits=bits))

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What `rotate` needs at these positions: int64[T] -> cos, sin: [T, 1, D]."""
        angles = positions[:, None, None] * self.frequencies                                 # [T, 1, D], the first half negated
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def forward(self, tokens: Tensor, step: Step | None = None, rows: Tensor | slice | None = None) -> Tensor:
        """tokens: int64[T] -> logits [R, V] of the tokens at `rows` (indices or a slice into the step; None: every row)."""
        step = step or Alone(tokens)
        x, delta = self.embed.rows(tokens), None                                                # [T, C]
        if self.few is not None and isinstance(step, NativeStep) and step.whole:
            y = step.through(self.few, x, *self.turns(step.positions))
            return self.head(y if rows is None else y[rows])
        cos, sin = self.turns(step.positions)
        turned = getattr(step, "attend_turned", None) if fuses(x) else None
        for i, layer in enumerate(self.layers):
            x, delta = layer.ahead(x, delta, cos, sin, partial(step.attend, i), turned and partial(turned, i))
        if rows is not None:
            x, delta = x[rows], None if delta is None else delta[rows]
        return self.head(self.norm.add(x, delta)[1])


def is_small(config: Config) -> bool:
    """Whether this model's numbers lie in a core's cache: 4 MB in float32."""
    return sum(place.numel() for place in Llama(config, "meta", seed=None).places().values()) <= 2**20


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: what is in a Llama, and that it does not matter how a text is cut.

@torch.inference_mode()
def main(name: str = "tiny") -> None:
    llama = Llama.load(name, dtype=torch.float32)
    config, places = llama.config, Llama(Config.load(find(name)), seed=None, device="meta").places()
    print(f"{name}: {sum(place.numel() for place in places.values()):,} parameters in {len(places)} tensors; {config.num_hidden_layers} layers, "
          f"{config.num_attention_heads} query heads on {config.num_key_value_heads} key/value heads of {config.head_dim}")
    text = torch.arange(1, 101, device=llama.device)
    whole, cache = llama(text), llama.cache(len(text))
    print("100 tokens at once, and in chunks through a cache: the largest difference of their logits, over the largest logit")
    for sizes in ([100], [99, 1], [50, 50], [1] * 100, [7, 13, 80]):
        seq, _ = cache.open(())
        parts = [llama(chunk, cache.extend([(seq, chunk)])) for chunk in text.split(sizes)]
        cache.free(seq)
        error = ((torch.cat(parts) - whole).abs().max() / whole.abs().max()).item()
        print(f"  {len(sizes):3} chunks of {', '.join(map(str, sizes[:3]))}{', …' if len(sizes) > 3 else '':3} {error:.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
