"""Llama: config, weights, forward pass.

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

  - RMSNorm (Zhang & Sennrich 2019): x / √(mean x² + ε) · w, computed in at least float32.
  - Rotary embeddings (Su et al. 2021): dimension pair (i, i + D/2) of q and k turns by position · θ^(−2i/D), so that q · k
    depends on the distance alone. `llama3` scaling (Llama 3.1) slows the low frequencies down for long texts, `linear` all.
  - Grouped-query attention (Ainslie et al. 2023): H query heads share G key/value heads.
  - SwiGLU (Shazeer 2020).

Cost: 2 · parameters operations a token, and reading every weight once a step, however many tokens it has.

    T tokens of a step · R rows asked for · C hidden_size · H query heads · G key/value heads · D head_dim
    F intermediate_size · V vocab_size
"""
import math
import sys
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import attention
from kvcache import KVCache
from matmul import Linear
from weights import Checkpoint, find, read_json


class Step(Protocol):
    """What a forward pass needs to know of the texts its tokens belong to."""
    positions: Tensor                                                       # int64[T]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Config:
    """A Llama's shape, under the names of its config.json."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None                              # None, or rope_type "linear" or "llama3" with its numbers
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads {self.num_key_value_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embeddings turn pairs")
        inverse_frequencies(self)                                           # refuses what it lacks

    @classmethod
    def load(cls, folder: Path) -> "Config":
        """Read config.json. What it asks for and this code lacks is refused by name: ValueError."""
        path = folder / "config.json"
        data = read_json(path)
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Config":
        _refuse_unknown(data)
        sizes = {name: _positive(data, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                                          "num_attention_heads", "max_position_embeddings")}
        heads = sizes["num_attention_heads"]
        if data.get("head_dim") is None and sizes["hidden_size"] % heads:
            raise ValueError(f"hidden_size {sizes['hidden_size']} is not a multiple of num_attention_heads {heads}, and there is no head_dim")
        theta, scaling = _rope(data)
        return cls(**sizes, rope_theta=theta, rope_scaling=scaling,
                   num_key_value_heads=_positive(data, "num_key_value_heads", heads),
                   head_dim=_positive(data, "head_dim", sizes["hidden_size"] // heads),
                   rms_norm_eps=_number(data, "rms_norm_eps", 1e-6),
                   tie_word_embeddings=_flag(data, "tie_word_embeddings"), attention_bias=_flag(data, "attention_bias"),
                   mlp_bias=_flag(data, "mlp_bias"), eos_token_ids=end_tokens(data))

    def to_dict(self) -> dict[str, Any]:
        """The config.json of this model, as transformers reads it too."""
        names = [f for f in self.__dataclass_fields__ if f != "eos_token_ids"]
        return dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", **{f: getattr(self, f) for f in names},
                    eos_token_id=list(self.eos_token_ids) if len(self.eos_token_ids) > 1 else next(iter(self.eos_token_ids), None))


def end_tokens(data: dict[str, Any]) -> tuple[int, ...]:
    """eos_token_id of a config.json or generation_config.json: absent, one, or several."""
    eos = data.get("eos_token_id")
    ends = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if any(not isinstance(end, int) or isinstance(end, bool) or end < 0 for end in ends):
        raise ValueError(f"eos_token_id is {eos!r}; it must be a token, or a list of tokens")
    return ends


def _refuse_unknown(data: dict[str, Any]) -> None:
    """Only what this code computes exactly may pass."""
    asks = [("model_type", data.get("model_type"), ("llama",)),
            ("hidden_act", data.get("hidden_act", "silu"), ("silu",)),
            ("partial_rotary_factor", data.get("partial_rotary_factor"), (None, 1, 1.0)),
            ("quantization_config", data.get("quantization_config"), (None,)),
            ("architectures", data.get("architectures"), (None, [], ["LlamaForCausalLM"]))]
    for key, value, known in asks:
        if value not in known:
            raise ValueError(f"{key} is {value!r}, which is not supported; only {' or '.join(map(repr, known))}")


def _positive(data: dict[str, Any], name: str, default: int | None = None) -> int:
    value = data.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {'missing' if value is None else repr(value)}; it must be a whole number of at least 1")
    return value


def _number(data: dict[str, Any], name: str, default: float | None = None) -> float:
    value = data.get(name)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {'missing' if value is None else repr(value)}; it must be a positive number")
    return float(value)


def _flag(data: dict[str, Any], name: str) -> bool:
    if not isinstance(data.get(name, False), bool):
        raise ValueError(f"{name} is {data[name]!r}; it must be true or false")
    return data.get(name, False)


def _rope(data: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """The rotary base and its scaling: at the top, in rope_scaling or in rope_parameters, depending on the config's age."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(data.get(name) or {}, dict):
            raise ValueError(f"{name} is {data[name]!r}; it must be an object")
    rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    theta = _number({"rope_theta": rope.pop("rope_theta", None) or data.get("rope_theta")}, "rope_theta", 10000.0)
    kind = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or kind or "default"
    return theta, None if rope["rope_type"] == "default" else rope


def inverse_frequencies(config: Config) -> Tensor:
    """How far each pair of dimensions turns per position, after scaling: float32[D/2]."""
    D, scaling = config.head_dim, config.rope_scaling
    plain = 1.0 / config.rope_theta ** (torch.arange(0, D, 2, dtype=torch.float32) / D)
    if scaling is None:
        return plain
    if scaling["rope_type"] not in ("linear", "llama3"):
        raise ValueError(f"rope_type is {scaling['rope_type']!r}, which is not supported; only 'default', 'linear' or 'llama3'")
    slow = plain / _number(scaling, "factor")
    if scaling["rope_type"] == "linear":
        return slow
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if low >= high:
        raise ValueError(f"rope scaling: low_freq_factor {low} must be below high_freq_factor {high}")
    turns = _positive(scaling, "original_max_position_embeddings") * plain / (2 * math.pi)      # over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)                       # 1: a high frequency, kept; 0: a low one, slowed down
    return keep * plain + (1 - keep) * slow


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of x: [T, heads, D]. cos, sin: [T, 1, D], the first half of sin negated."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, **where: Any):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size, **where), requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:                                 # [T, C] -> [T, C]
        wide = x.float() if x.dtype.itemsize == 2 else x
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Layer(nn.Module):
    """Attention, then the feed-forward network, each added to the residual stream."""

    def __init__(self, config: Config, **where: Any):
        super().__init__()
        C, D = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, D
        self.input_norm = RMSNorm(C, config.rms_norm_eps, **where)
        self.qkv_proj = Linear(C, (self.heads + 2 * self.kv_heads) * D, config.attention_bias, **where)
        self.o_proj = Linear(self.heads * D, C, config.attention_bias, **where)
        self.post_norm = RMSNorm(C, config.rms_norm_eps, **where)
        self.gate_up_proj = Linear(C, 2 * config.intermediate_size, config.mlp_bias, **where)
        self.down_proj = Linear(config.intermediate_size, C, config.mlp_bias, **where)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Any) -> Tensor:           # [T, C] -> [T, C]
        T, H, G = len(x), self.heads, self.kv_heads
        qkv = self.qkv_proj(self.input_norm(x)).view(T, H + 2 * G, self.head_dim)
        qk, v = qkv.split((H + G, G), dim=1)
        q, k = rotate(qk, cos, sin).split((H, G), dim=1)
        x = x + self.o_proj(attend(q, k, v).reshape(T, H * self.head_dim))
        gate, up = self.gate_up_proj(self.post_norm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)

    def places(self, prefix: str) -> dict[str, Tensor]:
        """Where the checkpoint's tensors go: q, k and v into one product, gate and up into another."""
        places = {f"{prefix}.input_layernorm.weight": self.input_norm.weight, f"{prefix}.post_attention_layernorm.weight": self.post_norm.weight}
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for linear, names, sizes in [(self.qkv_proj, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q, kv, kv)),
                                     (self.o_proj, ("self_attn.o_proj",), (self.o_proj.out_features,)),
                                     (self.gate_up_proj, ("mlp.gate_proj", "mlp.up_proj"), (self.gate_up_proj.out_features // 2,) * 2),
                                     (self.down_proj, ("mlp.down_proj",), (self.down_proj.out_features,))]:
            for kind, whole in (("weight", linear.weight), ("bias", linear.bias)):
                if whole is not None:
                    places |= {f"{prefix}.{name}.{kind}": part for name, part in zip(names, whole.split(sizes))}
        return places


class Alone:
    """The step of one whole text without a cache."""

    def __init__(self, tokens: Tensor):
        self.positions = torch.arange(len(tokens), device=tokens.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k.transpose(0, 1), v.transpose(0, 1))


class Llama(nn.Module):
    """`llama(tokens, step, rows)`: logits for the tokens at `rows` of a packed step."""

    def __init__(self, config: Config, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int | None = 0):
        """A model with random weights, drawn with `seed`; None leaves them to be filled."""
        super().__init__()
        where = dict(device=device, dtype=dtype)
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **where), requires_grad=False)
        self.layers = nn.ModuleList(Layer(config, **where) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **where)
        self.head = Linear(config.hidden_size, config.vocab_size, **where) if not config.tie_word_embeddings else None
        if config.tie_word_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, device="meta")
            self.head.weight = self.embed
        self.register_buffer("frequencies", inverse_frequencies(config).to(device), persistent=False)
        if seed is not None:
            self._randomize(seed)

    @torch.no_grad()
    def _randomize(self, seed: int) -> None:
        generator = torch.Generator(self.embed.device).manual_seed(seed)
        for name, place in self.places().items():
            if name.endswith("norm.weight"):
                place.fill_(1)
            else:
                place.normal_(0, 0.02, generator=generator)

    @classmethod
    def load(cls, name: str | Path, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
             trainable: bool = False) -> "Llama":
        """A model from an alias, a Hub id or a folder. FileNotFoundError and ValueError name what is wrong and the way out.

        device: a GPU if there is one. dtype: the checkpoint's, or what this CPU is good at. trainable: plain weights with
        gradients; otherwise they are packed for a CPU's products.
        """
        folder = find(name)
        config, checkpoint = Config.load(folder), Checkpoint(folder)
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model = cls(config, device, dtype or default_dtype(checkpoint.dtype, device), seed=None)
        checkpoint.fill(model.places(), ignore=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
                        twice={"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {})
        return model.requires_grad_() if trainable else model.pack()

    def places(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, by their names there."""
        places = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm.weight}
        for i, layer in enumerate(self.layers):
            places |= layer.places(f"model.layers.{i}")
        return places if self.config.tie_word_embeddings else places | {"lm_head.weight": self.head.weight}

    def pack(self) -> "Llama":
        """Put the weights of all products in the order that this CPU multiplies fastest (see matmul.py); no-op on a GPU."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(keep=module.weight is self.embed)
        return self

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def cache(self, max_len: int | None = None, sequences: int = 1, dtype: torch.dtype | None = None) -> KVCache:
        """A contiguous cache of this model's shape, for `sequences` texts of up to `max_len` tokens (its own limit)."""
        c = self.config
        return KVCache(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, max_len or c.max_position_embeddings, sequences,
                       self.device, dtype or self.dtype)

    def forward(self, tokens: Tensor, step: Step | None = None, rows: Tensor | slice | None = None) -> Tensor:
        """tokens: int64[T] -> logits [R, V] of the tokens at `rows` (indices or a slice into the step; None: every row)."""
        step = step or Alone(tokens)
        angles = step.positions[:, None, None].float() * self.frequencies                    # [T, 1, D/2]
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)             # [T, 1, D]
        x = F.embedding(tokens, self.embed)                                                  # [T, C]
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, partial(step.attend, i))
        return self.head(self.norm(x if rows is None else x[rows]))


def default_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The checkpoint's dtype on a GPU; on a CPU without instructions for it, where it is many times slower, float32, and says so."""
    native = torch.cpu._is_avx512_bf16_supported() if hasattr(torch.cpu, "_is_avx512_bf16_supported") else False
    if device.type != "cpu" or stored in (torch.float32, torch.float64) or (stored == torch.bfloat16 and native):
        return stored
    warnings.warn(f"this CPU has no fast {str(stored)[6:]} products: computing in float32 (--dtype {str(stored)[6:]} insists)", stacklevel=3)
    return torch.float32


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
