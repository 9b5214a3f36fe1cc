"""A Llama's shape, read from config.json and checked.

The names are those of the file. A setting that changes the numbers and that the code lacks is
refused by name; a setting without effect on them is ignored. Hub configs put the rotary base in
`rope_theta`, `rope_scaling` or `rope_parameters`, depending on their age.

Invariant: `Config.load` reads what `to_dict` made.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from checkpoint.files import read_json
from checkpoint.formats import Layout, check_setting
from checkpoint.layouts import load_quantization
from errors import UserError, brief

# The least and the largest value of each number: far beyond any real model, but so that no product
# overflows, and that a model on the meta device is made at once.
RANGES: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**31 - 1),
    "intermediate_size": (1, 2**20),
    "num_hidden_layers": (1, 2**9),
    "head_dim": (1, 2**12),
    "num_attention_heads": (1, 2**12),
    "num_key_value_heads": (1, 2**12),
    "max_position_embeddings": (1, 2**31 - 1),
    "original_max_position_embeddings": (1, 2**31 - 1),
    "rms_norm_eps": (1e-30, 1.0),
    "rope_theta": (1.0, 1e12),
    "factor": (1e-3, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
}
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias")
SUPPORTED: dict[str, tuple[Any, ...]] = {  # None: absent
    "model_type": ("llama",),
    "architectures": (None, [], ["LlamaForCausalLM"]),
    "hidden_act": (None, "silu"),
    "partial_rotary_factor": (None, 1, 1.0),
    **dict.fromkeys(FLAGS, (None, False, True)),
}
ROPE_NUMBERS: dict[str, tuple[str, ...]] = {  # rope_type -> the numbers it needs
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True)
class Config:
    """A Llama's shape."""

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
    rope_scaling: dict[str, Any] | None = None  # rope_type, and the numbers that it needs
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    quantization: Layout | None = None

    def __post_init__(self) -> None:
        H = self.num_attention_heads
        G = self.num_key_value_heads
        if H % G or self.head_dim % 2:
            raise UserError(
                f"num_attention_heads {H} must be a multiple of num_key_value_heads {G}, and "
                f"head_dim {self.head_dim} even: rotary embeddings turn pairs"
            )
        scaling = self.rope_scaling or {}
        if scaling.get("low_freq_factor", 0) >= scaling.get("high_freq_factor", 1):
            raise UserError(f"{scaling}: low_freq_factor must be below high_freq_factor")

    @property
    def query_size(self) -> int:
        """Numbers of all query heads of a token."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers of all key (or value) heads of a token."""
        return self.num_key_value_heads * self.head_dim

    @classmethod
    def load(cls, folder: Path) -> Config:
        """The config of a folder's config.json. FileNotFoundError or UserError names the file."""
        file = folder / "config.json"
        data = read_json(file)
        try:
            return cls.parse(data)
        except UserError as error:
            raise UserError(f"{file}: {brief(error)}") from None

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Config:
        """From the object in a config.json."""
        for name, values in SUPPORTED.items():
            check_setting(name, data.get(name), *values)
        num_heads = whole_number(data, "num_attention_heads")
        hidden_size = whole_number(data, "hidden_size")
        rope = rope_settings(data)
        return cls(
            vocab_size=whole_number(data, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=whole_number(data, "intermediate_size"),
            num_hidden_layers=whole_number(data, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=whole_number(data, "num_key_value_heads", num_heads),
            head_dim=whole_number(data, "head_dim", hidden_size // num_heads),
            max_position_embeddings=whole_number(data, "max_position_embeddings"),
            rms_norm_eps=number(data, "rms_norm_eps", cls.rms_norm_eps),
            rope_theta=number(rope, "rope_theta", cls.rope_theta),
            rope_scaling=parse_rope_scaling(rope),
            tie_word_embeddings=bool(data.get("tie_word_embeddings")),
            attention_bias=bool(data.get("attention_bias")),
            mlp_bias=bool(data.get("mlp_bias")),
            eos_token_ids=end_tokens(data),
            quantization=load_quantization(data.get("quantization_config")),
        )

    def to_dict(self) -> dict[str, Any]:
        """The config.json of this model, as transformers reads it too."""
        data = asdict(self)
        ends = list(data.pop("eos_token_ids"))
        data["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
        data.pop("quantization")
        if self.quantization is not None:
            data["quantization_config"] = self.quantization.to_dict()
        return dict(
            architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", **data
        )

    def quantized(self, layout: Layout) -> Config:
        """The same model with quantized weights. UserError if they are already."""
        if self.quantization is not None:
            raise UserError(
                f"the weights are {self.quantization.name} already: quantize the folder that they "
                "were made from"
            )
        return replace(self, quantization=layout)


def rope_settings(data: dict[str, Any]) -> dict[str, Any]:
    """All settings of the rotary embeddings, wherever this config.json has them."""
    settings = {"rope_theta": data.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        found = data.get(name) or {}
        if not isinstance(found, dict):
            raise UserError(f"{name} is {found!r}; it must be an object")
        settings |= {key: value for key, value in found.items() if value is not None}
    return settings


def parse_rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    """The rope_type and its numbers; None for unscaled embeddings."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    check_setting("rope_type", kind, *ROPE_NUMBERS)
    check_setting("partial_rotary_factor", rope.get("partial_rotary_factor", 1), 1, 1.0)
    if kind == "default":
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        unknown = sorted(rope.keys() - known)
        if unknown:
            names = " and ".join(unknown)
            raise UserError(f"rope_type is 'default', which has no use for {names}")
        return None
    scaling: dict[str, Any] = {"rope_type": kind}
    for name in ROPE_NUMBERS[kind]:
        is_length = name == "original_max_position_embeddings"
        scaling[name] = whole_number(rope, name) if is_length else number(rope, name)
    return scaling


def number(data: dict[str, Any], name: str, default: float | None = None) -> float:
    """data[name], or the default for null. UserError unless it is a number in its range."""
    return _number(data, name, default, (int, float), "a number")


def whole_number(data: dict[str, Any], name: str, default: int | None = None) -> int:
    """data[name], or the default for null. UserError unless it is an int in its range."""
    return _number(data, name, default, (int,), "a whole number")


def _number(
    data: dict[str, Any], name: str, default: Any, types: tuple[type, ...], kind: str
) -> Any:
    value = data.get(name)
    if value is None:
        value = default
    low, high = RANGES[name]
    if type(value) not in types or not low <= value <= high:
        found = "missing" if value is None else brief(repr(value))
        raise UserError(f"{name} is {found}; it must be {kind} from {low} to {high}")
    return types[-1](value)


def end_tokens(data: dict[str, Any]) -> tuple[int, ...]:
    """The eos_token_id of a config.json or generation_config.json: none, one, or several."""
    eos = data.get("eos_token_id")
    if eos is None:
        return ()
    ends = tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(type(end) is int and end >= 0 for end in ends):
        raise UserError(f"eos_token_id is {eos!r}; it must be a token, or a list of tokens")
    return ends
