"""A Llama's shape, read from config.json and checked.

Rotary embeddings (Su et al. 2021) turn the dimensions (i, i + D/2) of a query or key at position p by p · θ^(−2i/D).
For texts longer than in training, angles are divided by `factor`: all angles (`linear`), or those of slow pairs
(`llama3`): below low_freq_factor turns over the original context, and up to high_freq_factor turns in part.

Invariant: `Config.load` reads what `to_dict` made.
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.files import read_json
from checkpoint.formats import Quantization, supported
from checkpoint.layouts import load_quantization
from errors import UserError, brief

# Above any real model, but so low that no product overflows and that a model on the meta device is made at once.
LIMITS = dict(
    vocab_size=2**24,
    hidden_size=2**31 - 1,
    intermediate_size=2**20,
    num_hidden_layers=2**9,
    head_dim=2**12,
    num_attention_heads=2**12,
    num_key_value_heads=2**12,
    max_position_embeddings=2**31 - 1,
    rms_norm_eps=1.0,
)
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias")
SUPPORTED = {
    "model_type": ["llama"],
    "hidden_act": [None, "silu"],
    "partial_rotary_factor": [None, 1, 1.0],
    "architectures": [None, [], ["LlamaForCausalLM"]],
    **dict.fromkeys(FLAGS, [None, False, True]),
}
ROPE_TYPES = {
    "default": [],
    "linear": ["factor"],  # rope_type -> the numbers it needs
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
}


@dataclass(frozen=True)
class Config:
    """A Llama's shape, under the names of its config.json. A setting that the code lacks is refused by name."""

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
    rope_scaling: dict[str, Any] | None = (
        None  # None, or rope_type "linear" or "llama3" with its numbers
    )
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        if (H := self.num_attention_heads) % (G := self.num_key_value_heads) or self.head_dim % 2:
            raise UserError(
                f"num_attention_heads {H} must be a multiple of num_key_value_heads {G}, and head_dim "
                f"{self.head_dim} even: rotary embeddings turn pairs"
            )
        inverse_frequencies(self)  # refuses absurd rope settings

    @property
    def query_size(self) -> int:  # numbers of all query heads of a token
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:  # numbers of all key (or value) heads of a token
        return self.num_key_value_heads * self.head_dim

    @classmethod
    def load(cls, folder: Path) -> "Config":
        """The config of this folder's config.json. FileNotFoundError or ValueError names the file."""
        data = read_json(file := folder / "config.json")
        try:
            for name, known in SUPPORTED.items():
                supported(name, data.get(name), *known)
            heads = _number(data, "num_attention_heads")
            absent = dict(
                num_key_value_heads=heads,
                head_dim=_number(data, "hidden_size") // heads,
                rms_norm_eps=cls.rms_norm_eps,
            )
            rope: dict[str, Any] = {
                "rope_theta": data.get("rope_theta")
            }  # old configs; new ones: below
            for name in ("rope_scaling", "rope_parameters"):
                if not isinstance(found := data.get(name) or {}, dict):
                    raise UserError(f"{name} is {found!r}; it must be an object")
                rope |= {key: value for key, value in found.items() if value is not None}
            supported(
                "rope_type", kind := rope.pop("rope_type", rope.pop("type", "default")), *ROPE_TYPES
            )
            supported("partial_rotary_factor", rope.pop("partial_rotary_factor", 1), 1, 1.0)
            if kind == "default" and (more := rope.keys() - {"rope_theta"}):
                raise UserError(
                    f"rope_type is 'default', which has no use for {' and '.join(sorted(more))}"
                )
            scaling = {name: _number(rope, name) for name in ROPE_TYPES[kind]}
            return cls(
                **{name: _number(data, name, absent.get(name)) for name in LIMITS},
                **{name: bool(data.get(name)) for name in FLAGS},
                eos_token_ids=end_tokens(data),
                rope_theta=_number(rope, "rope_theta", cls.rope_theta),
                rope_scaling={**scaling, "rope_type": kind} if scaling else None,
                quantization=load_quantization(data.get("quantization_config")),
            )
        except ValueError as error:
            raise UserError(f"{file}: {brief(error)}") from None

    def to_dict(self) -> dict[str, Any]:
        """The config.json of this model, as transformers reads it too."""
        data = asdict(self)
        data["eos_token_id"] = (
            ends[0] if len(ends := data.pop("eos_token_ids")) == 1 else list(ends) or None
        )
        if data.pop("quantization"):
            data["quantization_config"] = self.quantization.to_dict()
        return dict(
            architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", **data
        )

    def quantized(self, how: Quantization) -> "Config":
        """The same model with quantized weights. ValueError if they are already."""
        if now := self.quantization:
            raise UserError(
                f"the weights are {now.name} already: quantize the folder that they were made from"
            )
        return replace(self, quantization=how)


def _number(data: dict[str, Any], name: str, absent: float | None = None) -> Any:
    """data[name], or `absent` for null, as int or float like its limit. ValueError unless above 0, up to the limit."""
    low, high = (
        1e-30 if name == "rms_norm_eps" else 0,
        LIMITS.get(name.removeprefix("original_"), 1e300),
    )
    value = absent if data.get(name) is None else data[name]
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, type(high)))
        or not low < value <= high
    ):
        raise UserError(
            f"{name} is {'missing' if value is None else brief(repr(value))}; it must be "
            f"{'a whole number' if type(high) is int else 'a number'} above {low} and at most {high}"
        )
    return type(high)(value)


def end_tokens(data: dict[str, Any]) -> tuple[int, ...]:
    """The eos_token_id of a config.json or generation_config.json: none, one, or several. ValueError if malformed."""
    eos = data.get("eos_token_id")
    ends = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if all(type(end) is int and end >= 0 for end in ends):
        return ends
    raise UserError(f"eos_token_id is {eos!r}; it must be a token, or a list of tokens")


def inverse_frequencies(config: Config) -> Tensor:
    """The angle of each pair of dimensions per position, scaling included: float32[D/2]. ValueError for absurd ones."""
    D, scaling = config.head_dim, config.rope_scaling or {}
    found = 1.0 / config.rope_theta ** (torch.arange(0, D, 2, dtype=torch.float32) / D)
    slow, keep = found / scaling.get("factor", 1), 0
    low, high = scaling.get("low_freq_factor", 0), scaling.get("high_freq_factor", 1)
    if "original_max_position_embeddings" in scaling:
        turns = scaling["original_max_position_embeddings"] * found / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: a high frequency, kept; 0: a low one
    found = keep * found + (1 - keep) * slow
    if low >= high or not (found < 1e6).all():  # NaN, too
        raise UserError(
            f"rope_theta {config.rope_theta:g}, {scaling}: low_freq_factor must be below high_freq_factor"
            ", and a position must turn by no more than a million radians"
        )
    return found
