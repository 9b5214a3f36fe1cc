"""The shape of a Llama, and how its positions turn: config.json, read and checked.

A config asks for more than sizes: another activation, another way to scale positions, biases, quantized weights. What this code
computes exactly is accepted, everything else is refused by name, so that no model is ever loaded as something that it is not.

Rotary embeddings (Su et al. 2021) turn the pair of dimensions (i, i + D/2) of a query or key at position p by the angle
p · θ^(−2i/D). To read longer texts than it was trained on, a model turns more slowly:

    linear   all pairs, by `factor`
    llama3   pairs that turn less than low_freq_factor times over the original context by `factor`, those that turn more than
             high_freq_factor times not at all, and between them in proportion (Llama 3.1)

Invariant: `Config.from_dict(config.to_dict()) == config`, and a quantized model's recipe (quant.py) is part of it.
"""
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vocabulary import brief, read_json

QUANT_METHOD = "quant.py"                                                   # in config.json, so that nobody takes our folders for theirs
# No model comes near these (Llama 3.1 405B: 128256, 53248, 126, 128, 8, 128). Up to them a model on no device is made in no
# time, no product of sizes overflows, and it can be compared with what the checkpoint holds.
LIMITS = dict(vocab_size=2**24, intermediate_size=2**20, num_hidden_layers=512,
              num_attention_heads=2**12, num_key_value_heads=2**12, head_dim=2**12)

@dataclass(frozen=True)
class Quantization:
    """How a model's weights are stored (quant.py): `quantization_config` of its config.json."""
    bits: int                                                               # of the layers: 8 or 4
    group: int = 128                                                        # numbers that share a scale where there are 4 bits
    head_bits: int = 8                                                      # of embedding and head; 16: as they were
    method: str = "rtn"                                                     # how the integers were found: this changes nothing here

    def __post_init__(self) -> None:
        known = dict(bits=(8, 4), group=(32, 64, 128), head_bits=(16, 8, 4), method=("rtn", "gptq", "awq", "awq+gptq"))
        for name, values in known.items():
            if (value := getattr(self, name)) not in values or isinstance(value, bool):
                raise ValueError(f"quantization: {name} is {value!r}; it must be {', '.join(map(str, values[:-1]))} or {values[-1]}")

    @classmethod
    def from_dict(cls, data: Any) -> "Quantization | None":
        """What a config.json asks for, if it is one of ours. Other projects' formats are refused: ValueError."""
        if data is None:
            return None
        names = cls.__dataclass_fields__.keys()
        if not isinstance(data, dict) or data.get("quant_method") != QUANT_METHOD or data.keys() != {"quant_method", *names}:
            raise ValueError(f"quantization_config is {data!r}, which is not supported; only {QUANT_METHOD}'s, with {', '.join(names)} "
                             "(python quant.py makes such a folder from one in 16 or 32 bits)")
        return cls(**{name: data[name] for name in names})


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
    quantization: Quantization | None = None

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
            raise ValueError(f"{path}: {brief(error)}") from None

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
                   rms_norm_eps=_number(data, "rms_norm_eps", 1e-6, 1e-30, 1),
                   tie_word_embeddings=_flag(data, "tie_word_embeddings"), attention_bias=_flag(data, "attention_bias"),
                   mlp_bias=_flag(data, "mlp_bias"), eos_token_ids=end_tokens(data),
                   quantization=Quantization.from_dict(data.get("quantization_config")))

    def to_dict(self) -> dict[str, Any]:
        """The config.json of this model, as transformers reads it too."""
        names = [f for f in self.__dataclass_fields__ if f not in ("eos_token_ids", "quantization")]
        how = {} if self.quantization is None else {"quantization_config": {"quant_method": QUANT_METHOD, **asdict(self.quantization)}}
        return how | dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", **{f: getattr(self, f) for f in names},
                    eos_token_id=list(self.eos_token_ids) if len(self.eos_token_ids) > 1 else next(iter(self.eos_token_ids), None))

    def quantized(self, how: Quantization) -> "Config":
        """The same model with quantized weights. ValueError if they are already."""
        if self.quantization is not None:
            raise ValueError(f"the weights have {self.quantization.bits} bits already: quantize the folder that they were made from")
        return replace(self, quantization=how)


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
            ("architectures", data.get("architectures"), (None, [], ["LlamaForCausalLM"]))]
    for key, value, known in asks:
        if value not in known:
            raise ValueError(f"{key} is {value!r}, which is not supported; only {' or '.join(map(repr, known))}")


def _positive(data: dict[str, Any], name: str, default: int | None = None) -> int:
    value = data.get(name)
    value = default if value is None else value
    limit = LIMITS.get(name, 2**31 - 1)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise ValueError(f"{name} is {'missing' if value is None else brief(repr(value))}; "
                         f"it must be a whole number from 1 to {limit}")
    return value


def _number(data: dict[str, Any], name: str, default: float | None = None, low: float = 0,
            high: float = 1e300) -> float:
    value = data.get(name)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low < value < high:
        raise ValueError(f"{name} is {'missing' if value is None else brief(repr(value))}; "
                         f"it must be a number above {low} and below {high:g}")
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
    theta, kind = rope.pop("rope_theta", None), rope.pop("type", None)
    theta = _number({"rope_theta": data.get("rope_theta") if theta is None else theta}, "rope_theta", 10000.0)
    rope["rope_type"] = rope.get("rope_type") or kind or "default"
    if rope["rope_type"] == "default" and len(rope) > 1:
        raise ValueError(f"rope_type is 'default', which has no use for {' and '.join(sorted(rope.keys() - {'rope_type'}))}")
    return theta, None if rope["rope_type"] == "default" else rope


def inverse_frequencies(config: Config) -> Tensor:
    """How far each pair of dimensions turns per position, after scaling: float32[D/2]. ValueError if that is absurd."""
    D = config.head_dim
    found = _scaled(1.0 / config.rope_theta ** (torch.arange(0, D, 2, dtype=torch.float32) / D), config.rope_scaling)
    if not (found < 1e6).all():                                             # nor for what is no number
        raise ValueError(f"rope_theta {config.rope_theta:g} with scaling {config.rope_scaling} turns positions by more "
                         "than a million radians each")
    return found


def _scaled(plain: Tensor, scaling: dict[str, Any] | None) -> Tensor:
    if scaling is None:
        return plain
    if scaling.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"partial_rotary_factor is {scaling['partial_rotary_factor']!r}, which is not supported; only 1")
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
