"""A Llama's shape, read from config.json and checked.

Llama 2, its kin (CodeLlama, Vicuna, TinyLlama) and Mistral are Llamas. A Mistral with a sliding
window is one for texts of so many tokens: longer ones, where tokens look back over less, are not
covered. Qwen 2.5 (model_type qwen2) is a Llama with biases of q, k and v; Qwen 3 has a norm of each
head of q and of k; their sliding windows are as a Mistral's. The names are those of the file. A
setting that changes the numbers and that the code lacks is refused by name; a setting without
effect on them is ignored. Hub configs put the rotary base in `rope_theta`, `rope_scaling` or
`rope_parameters`, depending on their age.

Invariant: `Config.load` reads what `to_dict` made of a folder's config. (A GGUF may divide
frequencies by numbers that no config.json has.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.files import Json, read_json
from checkpoint.formats import Layout, check_setting
from checkpoint.layouts import load_quantization
from errors import UserError, brief

# The largest value of each number, far above any real model; an int asks for a whole number.
LARGEST: dict[str, float] = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**9,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**31 - 1,
    "rms_norm_eps": 1.0,
}
LARGEST_BESIDE: dict[str, float] = {  # of those that not every config has
    "sliding_window": 2**31 - 1,
    "rope_theta": 1e12,
    "draft_vocab_size": 2**24,
    "target_hidden_size": 2**20,
    "factor": 1e6,
    "low_freq_factor": 1e6,
    "high_freq_factor": 1e6,
    "beta_fast": 1e6,
    "beta_slow": 1e6,
    "attention_factor": 1e3,
    "original_max_position_embeddings": 2**31 - 1,
}
SMALLEST = 1e-12
MAX_TURN = 1e6  # radians a position
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias")
ARCHITECTURES = {  # model_type -> its class in transformers
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SUPPORTED: dict[str, tuple[Any, ...]] = {  # None: absent
    "model_type": (*ARCHITECTURES,),
    "architectures": (None, [], *([name] for name in ARCHITECTURES.values())),
    "hidden_act": (None, "silu"),
    "use_sliding_window": (None, False, True),
    "is_causal": (None, True),
    "dual_chunk_attention_config": (None,),
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
    "yarn": (
        "factor",
        "beta_fast",
        "beta_slow",
        "original_max_position_embeddings",
        "attention_factor",
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
    rope_scaling: Json | None = None  # rope_type, and the numbers that it needs
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    model_type: str = "llama"  # or "qwen2", "qwen3"
    eos_token_ids: tuple[int, ...] = ()
    quantization: Layout | None = None

    def __post_init__(self) -> None:
        H = self.num_attention_heads
        G = self.num_key_value_heads
        if H % G or self.head_dim % 2 or not self.head_dim:
            raise UserError(
                f"num_attention_heads {H} must be a multiple of num_key_value_heads {G}, and "
                f"head_dim {self.head_dim} even and above 0, because rotary embeddings rotate pairs"
            )
        scaling = self.rope_scaling or {}
        if scaling.get("low_freq_factor", 0) >= scaling.get("high_freq_factor", 1):
            raise UserError(f"{scaling}: low_freq_factor must be below high_freq_factor")
        if "beta_fast" in scaling and self.rope_theta <= 1:
            raise UserError(f"rope_theta {self.rope_theta} with yarn: it must be above 1")
        fastest = 1 / min(1.0, self.rope_theta) / scaling.get("factor", 1)
        if fastest > MAX_TURN:
            raise UserError(
                f"rope_theta {self.rope_theta} with factor {scaling.get('factor', 1)}: a position "
                f"must turn by no more than {MAX_TURN:.0e} radians"
            )

    @property
    def query_size(self) -> int:
        """Numbers of all query heads of a token."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers of all key (or value) heads of a token."""
        return self.num_key_value_heads * self.head_dim

    @property
    def architecture(self) -> str:
        """The model's class in transformers."""
        return ARCHITECTURES[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def o_bias(self) -> bool:
        """Whether o has a bias. Qwen 2's has none, whatever its config says."""
        return self.attention_bias and self.model_type != "qwen2"

    @property
    def has_head_norm(self) -> bool:
        """Whether each head of q and of k is normed."""
        return self.model_type == "qwen3"

    def rope_frequencies(self) -> Tensor:
        """Radians by which each pair of dimensions turns from a position to the next: float32[D/2].

        For texts longer than in training (`rope_scaling`), frequencies are divided. The linear
        kind divides all of them by `factor`. The llama3 kind divides those of slow pairs: pairs
        that make fewer than low_freq_factor turns over the original context, and in part pairs that
        make up to high_freq_factor. The yarn kind keeps the pairs up to the one that makes
        beta_fast turns, and slows those from the one that makes beta_slow turns on (Peng et al.
        2023, arXiv:2309.00071). With `factors`, each frequency has its own.
        """
        D = self.head_dim
        frequencies = 1.0 / self.rope_theta ** (torch.arange(0, D, 2, dtype=torch.float32) / D)
        scaling = self.rope_scaling or {}
        if "factors" in scaling:
            return frequencies / torch.tensor(scaling["factors"], dtype=torch.float32)
        slowed = frequencies / scaling.get("factor", 1)
        if "original_max_position_embeddings" not in scaling:
            return slowed
        original = scaling["original_max_position_embeddings"]
        if scaling["rope_type"] == "yarn":

            def pair_of(turns: float) -> float:
                """The pair that makes this number of turns over the original context."""
                ratio = original / (2 * math.pi * turns)
                return D * math.log(ratio) / (2 * math.log(self.rope_theta))

            first = max(math.floor(pair_of(scaling["beta_fast"])), 0)
            last = min(math.ceil(pair_of(scaling["beta_slow"])), D - 1)
            keep = 1 - (torch.arange(D // 2) - first) / max(last - first, 0.001)
        else:
            turns = original * frequencies / (2 * math.pi)
            low = scaling["low_freq_factor"]
            keep = (turns - low) / (scaling["high_freq_factor"] - low)
        keep = keep.clamp(0, 1)  # 1: a fast pair, kept; 0: a slow one
        return keep * frequencies + (1 - keep) * slowed

    @property
    def attention_factor(self) -> float:
        """What yarn multiplies each query and each key by, because more keys share the attention:
        usually 0.1 ln(factor) + 1. Other kinds have 1."""
        return (self.rope_scaling or {}).get("attention_factor", 1.0)

    @classmethod
    def load(cls, folder: Path) -> Config:
        """The config of a folder's config.json. FileNotFoundError or UserError names the file."""
        return parse_file(folder / "config.json", cls.parse)

    @classmethod
    def parse(cls, data: Json) -> Config:
        """From the object in a config.json."""
        for name, values in SUPPORTED.items():
            check_setting(name, data.get(name), *values)
        num_heads = number(data, "num_attention_heads")
        defaults = {
            "num_key_value_heads": num_heads,
            "head_dim": number(data, "hidden_size") // num_heads,
            "rms_norm_eps": cls.rms_norm_eps,
        }
        present = {name: value for name, value in data.items() if value is not None}
        rope = rope_settings(present)
        scaling = parse_rope_scaling(rope, present)
        if "beta_fast" in (scaling or {}):  # Qwen's configs keep the length of the training
            longest = int(scaling["factor"] * scaling["original_max_position_embeddings"])
            present["max_position_embeddings"] = max(longest, present["max_position_embeddings"])
        num_layers = number(data, "num_hidden_layers")
        if has_window(data, num_layers):
            window = number({"sliding_window": 4096} | present, "sliding_window")  # transformers'
            longest = number(present, "max_position_embeddings")
            present["max_position_embeddings"] = min(longest, window)
        quantization = data.get("quantization_config", data.get("quantization"))  # or MLX's
        return cls(
            **{name: number(defaults | present, name) for name in LARGEST},
            **{name: bool(data.get(name)) for name in FLAGS},
            rope_theta=number(rope, "rope_theta"),
            rope_scaling=scaling,
            model_type="llama" if data["model_type"] == "mistral" else data["model_type"],
            eos_token_ids=end_tokens(data),
            quantization=load_quantization(quantization),
        )

    def to_dict(self) -> Json:
        """The config.json of this model, as transformers reads it too."""
        data = asdict(self)
        ends = list(data.pop("eos_token_ids"))
        data["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
        data.pop("quantization")
        if self.quantization is not None:
            data["quantization_config"] = self.quantization.to_dict()
        return dict(architectures=[self.architecture], hidden_act="silu", **data)

    def quantized(self, layout: Layout) -> Config:
        """The same model with quantized weights. UserError if they are already."""
        if self.quantization is not None:
            raise UserError(
                f"the weights are already {self.quantization.name}, and {layout.name} is asked "
                "for: quantize the folder that they were made from, or leave the bits out"
            )
        return replace(self, quantization=layout)

    # ---- A share of the model (parallel.py)

    def shard(self, n: int) -> Config:
        """The model of each of n processes. UserError if n processes cannot share it."""
        if n == 1:
            return self
        self._check_divisible(n)
        return replace(
            self,
            num_attention_heads=self.num_attention_heads // n,
            num_key_value_heads=max(1, self.num_key_value_heads // n),
            intermediate_size=self.intermediate_size // n,
            vocab_size=math.ceil(self.vocab_size / n),  # the last shard is padded
        )

    def _check_divisible(self, n: int) -> None:
        """UserError if n processes cannot share this model."""
        stored = self.quantization
        if stored is not None and stored.ordered:
            raise UserError(
                "the columns of each matrix are stored in another order (act-order), which "
                f"{n} processes cannot share: use one process, or another checkpoint"
            )
        # Inputs of o and down are cut in whole groups, which share a scale or a byte.
        group = 1 if stored is None else stored.shard_multiple
        columns = f"a multiple of {n * group}"
        if group > 1:
            columns += (
                f" ({n} processes · {group} columns that stay together: --bits, --draft-bits)"
            )
        kv_heads = self.num_key_value_heads
        rules = {
            "num_attention_heads": (self.num_attention_heads % n == 0, f"a multiple of {n}"),
            "num_key_value_heads": (
                kv_heads % n == 0 or n % kv_heads == 0,
                f"a multiple or a divisor of {n}",
            ),
            "intermediate_size": (self.intermediate_size % (n * group) == 0, columns),
            "query_size": (self.query_size % (n * group) == 0, columns),
            # No shard is empty: with V ≥ n², n − 1 shards of ⌈V / n⌉ hold fewer than V.
            "vocab_size": (self.vocab_size >= n * n, f"at least {n * n}"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise UserError(
                    f"{name} is {getattr(self, name)}, which {n} processes cannot share: it must "
                    f"be {rule}; start another number of processes"
                )


def has_window(data: Json, num_layers: int) -> bool:
    """Whether a layer looks back over a sliding window: all of a Mistral's do; of a Qwen's with
    use_sliding_window those of layer_types or, without it, those from max_window_layers on."""
    kinds = data.get("layer_types")
    is_mistral = data["model_type"] == "mistral"
    if not (is_mistral or data.get("use_sliding_window")):
        check_setting("layer_types", kinds, None, ["full_attention"] * num_layers)
        return False
    first = 0 if is_mistral else data.get("max_window_layers", 28)  # transformers'
    if kinds is None and type(first) is int:
        kinds = ["full_attention"] * first + ["sliding_attention"]
        kinds = kinds[:num_layers]
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        check_setting("layer_types", kind, "full_attention", "sliding_attention")
    return "sliding_attention" in kinds and data.get("sliding_window", 0) is not None


def parse_file(file: Path, parse: Callable[[Json], Any]) -> Any:
    """What `parse` makes of the object in a file. UserError names the file."""
    data = read_json(file)
    try:
        return parse(data)
    except UserError as error:
        raise UserError(f"{file}: {brief(error)}") from None


def rope_settings(present: Json) -> Json:
    """All settings of the rotary embeddings, wherever this config.json has them. UserError if its
    two objects disagree. A rope_theta beside rope_scaling, or its default, counts as one of its
    own; beside rope_parameters alone it is often stale."""
    settings = {}
    for name in ("rope_scaling", "rope_parameters"):
        more = present.get(name, {})
        if not isinstance(more, dict):
            raise UserError(f"{name} is {more!r}; it must be an object")
        more = {key: value for key, value in more.items() if value is not None}
        if "type" in more:
            more = {"rope_type": more["type"]} | more
        for key, value in more.items():
            if isinstance(value, dict):
                raise UserError(f"{name} has {key}: only settings for all layers are supported")
            if settings.get(key, value) != value:
                raise UserError(
                    f"{key} is {settings[key]!r} in rope_scaling, or beside it, and {value!r} in "
                    "rope_parameters: remove one of the two from the file"
                )
        settings |= more
        if settings or name == "rope_parameters":
            theta = present.get("rope_theta", Config.rope_theta)
            settings = {"rope_theta": theta} | settings
    return settings


def parse_rope_scaling(rope: Json, config: Json) -> Json | None:
    """The rope_type and its numbers; None for unscaled embeddings."""
    kind = rope.get("rope_type", "default")
    check_setting("rope_type", kind, *ROPE_NUMBERS)
    check_setting("partial_rotary_factor", rope.get("partial_rotary_factor", 1), 1, 1.0)
    if kind == "default":
        check_setting("factor of rope_type 'default'", rope.get("factor", 1), 1, 1.0)
        return None
    if kind == "yarn":
        for name in ("mscale", "mscale_all_dim"):  # DeepSeek's
            check_setting(f"{name} of rope_type 'yarn'", rope.get(name), None)
        check_setting("truncate of rope_type 'yarn'", rope.get("truncate", True), True)
        length = number(config, "max_position_embeddings")
        usual = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": length}
        usual["attention_factor"] = 0.1 * math.log(max(number(rope, "factor"), 1)) + 1
        rope = usual | rope
    scaling = {name: number(rope, name) for name in ROPE_NUMBERS[kind]}
    return scaling | {"rope_type": kind}


def number(data: Json, name: str) -> Any:
    """data[name]. UserError unless it is a number above 0, up to its limit."""
    value = data.get(name)
    limit = (LARGEST | LARGEST_BESIDE)[name]
    kind = type(limit)
    smallest = 1 if kind is int else SMALLEST
    if type(value) not in (int, kind) or not smallest <= value <= limit:
        problem = "missing" if value is None else brief(repr(value))
        what = "a whole number" if kind is int else "a number"
        raise UserError(f"{name} is {problem}; it must be {what} from {smallest} to {limit}")
    return kind(value)


def end_tokens(data: Json) -> tuple[int, ...]:
    """The eos_token_id of a config.json or generation_config.json: none, one, or several."""
    eos = data.get("eos_token_id")
    if eos is None:
        return ()
    ends = tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(type(end) is int and end >= 0 for end in ends):
        raise UserError(f"eos_token_id is {eos!r}; it must be a token, or a list of tokens")
    return ends
