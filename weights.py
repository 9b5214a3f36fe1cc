"""From a name to a folder, a checked config, and tensors in their places.

Rotary embeddings (Su et al. 2021) turn the dimensions (i, i + D/2) of a query or key at position p by p · θ^(−2i/D).
For texts longer than in training, angles are divided by `factor`: all angles (`linear`), or those of slow pairs
(`llama3`): below low_freq_factor turns over the original context, and up to high_freq_factor turns in part.

A safetensors file is a JSON header (name → dtype, shape, byte range), then the bytes. So names, shapes and dtypes are
checked before a weight is read: the folder must hold each tensor of the model, and no other. A file is mapped anew for
each tensor: the peak of memory is the model and one tensor. No pickle is ever opened.
Invariants: every tensor of the model is filled, or an error names it; `Config.load` reads what `to_dict` made.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from formats import Quantization, supported
from layouts import load_quantization
from shell import brief

ALIASES = {
    "1B": "meta-llama/Llama-3.2-1B-Instruct",
    "3B": "meta-llama/Llama-3.2-3B-Instruct",
    "8B": "meta-llama/Llama-3.1-8B-Instruct",
    "70B": "meta-llama/Llama-3.3-70B-Instruct",
}
EMBEDDED = {"tiny": "models/tiny", "tiny-draft": "models/tiny-draft"}  # beside this file
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
UNWANTED = ["original/*.json", "*/*.safetensors"]  # Meta's own layout, adapters
LARGEST_JSON = 2**22  # bytes
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
DTYPES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}
EXACT = {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}  # dtypes of quantized weights


def find(name: str | Path) -> Path:
    """The folder of a model: an alias, an embedded model, a folder, or a Hub id (fetched). Else FileNotFoundError."""
    text = str(name)
    repo, own = ALIASES.get(text, text), EMBEDDED.get(text)
    folder = Path(__file__).parent / own if own else Path(os.path.expanduser(text))
    if text and folder.is_dir():
        return folder
    if repo.count("/") != 1 or text.startswith(("/", ".", "~")):
        raise FileNotFoundError(
            f"{text!r} is neither a folder, nor a Hub id (owner/name), nor one of "
            f"{', '.join(ALIASES | EMBEDDED)}"
        )
    from huggingface_hub import snapshot_download

    problems = list[Exception]()
    for offline in (False, True):  # from the Hub, or else from the local cache
        try:
            found = snapshot_download(
                repo, allow_patterns=WANTED, ignore_patterns=UNWANTED, local_files_only=offline
            )
            if not offline or any(Path(found).glob("*.safetensors")):
                return Path(found)
        except Exception as error:  # of the Hub, its HTTP library or the file system
            problems.append(error)
    said = brief(f"{type(problems[0]).__name__}: {problems[0]}", 200)
    raise FileNotFoundError(
        f"{repo} is not in the cache, and the Hub refuses it ({said}). Check the name; accept"
        f" a gated model's licence at https://huggingface.co/{repo} and run `hf auth login`; go "
        "online once; or give a folder that holds the model"
    )


def read_text(file: Path, limit: int = LARGEST_JSON, encoding: str = "utf-8") -> str:
    """An ordinary file's text (a pipe or a device may have no end). FileNotFoundError or ValueError names the file."""
    if not file.exists():
        raise FileNotFoundError(
            f"{file} is missing: a model folder needs config.json, tokenizer.json or .model, and "
            "model.safetensors or its shards (a pytorch_model.bin is a pickle: convert it first)"
        )
    if not file.is_file() or file.stat().st_size > limit:
        raise ValueError(
            f"{file} is no ordinary file, or too large (of its bytes, at most {limit} make sense)"
        )
    try:
        return file.read_bytes().decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 ({error.reason} at byte {error.start}): fetch it again"
        ) from None


def parse_json(text: str) -> Any:
    """JSON, strictly: ValueError for a number that is not finite, or a name that stands twice in an object."""

    def finite(number: str) -> float:
        if math.isfinite(value := float(number)):
            return value
        raise ValueError(
            f"{brief(number, 40)} is {'too large' if number[-1].isdigit() else 'not a JSON number'}"
        )

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) == len(pairs):
            return found
        raise ValueError("a name stands twice in an object")

    return json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)


def read_json(file: Path, limit: int = LARGEST_JSON) -> dict[str, Any]:
    """The object in a JSON file. FileNotFoundError or ValueError names the file."""
    text = read_text(file, limit)
    try:
        if isinstance(data := parse_json(text), dict):
            return data
        raise ValueError(f"it holds a {type(data).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {brief(error)}; fetch it again") from None


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
            raise ValueError(
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
                    raise ValueError(f"{name} is {found!r}; it must be an object")
                rope |= {key: value for key, value in found.items() if value is not None}
            supported(
                "rope_type", kind := rope.pop("rope_type", rope.pop("type", "default")), *ROPE_TYPES
            )
            supported("partial_rotary_factor", rope.pop("partial_rotary_factor", 1), 1, 1.0)
            if kind == "default" and (more := rope.keys() - {"rope_theta"}):
                raise ValueError(
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
            raise ValueError(f"{file}: {brief(error)}") from None

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
            raise ValueError(
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
        raise ValueError(
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
    raise ValueError(f"eos_token_id is {eos!r}; it must be a token, or a list of tokens")


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
        raise ValueError(
            f"rope_theta {config.rope_theta:g}, {scaling}: low_freq_factor must be below high_freq_factor"
            ", and a position must turn by no more than a million radians"
        )
    return found


def _open(file: Path) -> Any:
    """A safetensors file, memory-mapped. ValueError names the file."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is not a whole safetensors file and cannot be read ({brief(error)}): fetch it again"
        )


class Checkpoint:
    """The tensors of a folder: names, shapes and dtypes are read at once, a tensor's numbers by `read`."""

    def __init__(self, folder: Path):
        self.folder, self.stored = (
            folder,
            dict[str, tuple[Path, list[int], str]](),
        )  # name -> file, shape, dtype
        index, says, files = (
            folder / "model.safetensors.index.json",
            {},
            {"model.safetensors"},
        )  # says: name -> file
        if not (folder / "model.safetensors").is_file():
            says = read_json(index).get("weight_map")
            files = {*map(str, says.values())} if says and isinstance(says, dict) else {repr(says)}
        for file in sorted(files):
            if not re.fullmatch(r"[^/\\]+\.safetensors", file) or not (folder / file).is_file():
                raise ValueError(
                    f"{index}: weight_map must give a .safetensors file in the same folder for each tensor"
                    f"; {brief(file)} is none, or is missing: fetch the model again"
                )
            with _open(folder / file) as opened:
                headers = {name: opened.get_slice(name) for name in opened.keys()}
                self.stored |= {
                    name: (folder / file, h.get_shape(), h.get_dtype())
                    for name, h in headers.items()
                }
            for name in says and headers.keys() ^ {name for name in says if says[name] == file}:
                raise ValueError(
                    f"{index} and {file} do not agree on whether tensor {brief(name)} is in {file}"
                )

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of floating-point weights and biases (not of scales), the dtype of most numbers first."""
        count = Counter[torch.dtype]()
        for name, (_, shape, dtype) in self.stored.items():
            if dtype in DTYPES and name.endswith((".weight", ".bias")):
                count[DTYPES[dtype]] += math.prod(shape)
        return [dtype for dtype, _ in count.most_common()]

    def audit(
        self,
        places: Mapping[str, Tensor],
        ignore: str = "(?!)",
        twice: Mapping[str, str] = {},
        how: Quantization | None = None,
    ) -> None:
        """ValueError unless the folder holds a tensor for each place (name -> tensor to be filled), and no other.
        ignore: pattern of names to skip; twice: name -> the place it repeats; how: how quantized weights are stored."""
        self.stored = {
            name: header for name, header in self.stored.items() if not re.fullmatch(ignore, name)
        }
        places = how.stored(places, self.stored) if how else places
        places = {**places, **{name: places[twice[name]] for name in twice if name in self.stored}}
        for name, place in places.items():
            if name not in self.stored:
                raise ValueError(
                    f"tensor {name} {list(place.shape)} is missing from {self.folder}: wrong config.json?"
                )
            file, shape, dtype = self.stored[name]
            kind = EXACT.get(place.dtype)
            if dtype not in ([kind] if kind else DTYPES):
                raise ValueError(
                    f"tensor {name} in {file} is {dtype}; weights must be {kind or f'one of {[*DTYPES]}'}"
                )
            if shape != list(place.shape):
                raise ValueError(
                    f"tensor {name} in {file} is {shape}; config.json asks for {list(place.shape)}"
                )
        for name in self.stored.keys() - places.keys():
            raise ValueError(
                f"tensor {brief(name)} in {self.stored[name][0]} has no place in the model of config.json"
            )

    def read(self, name: str) -> Tensor:
        """One tensor, memory-mapped: its bytes are read when they are used, and unmapped with its last reference."""
        file, shape, _ = self.stored[name]
        with _open(file) as opened:
            tensor = opened.get_tensor(name)
        if list(tensor.shape) != shape:
            raise ValueError(
                f"tensor {name} in {file} is another than a moment ago: something writes this file"
            )
        return tensor

    def tensors(self, places: Mapping[str, Tensor], **rules: Any) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) for each place, one after the other. rules: those of `audit`, which runs again first."""
        self.audit(places, **rules)
        for name, other in rules.get("twice", {}).items():
            if name in self.stored and not torch.equal(self.read(name), self.read(other)):
                raise ValueError(
                    f"tensor {name} of {self.folder} differs from {other}, though config.json ties them"
                )
        how = rules.get("how")
        yield from (
            how.tensors(places, self.stored, self.read)
            if how
            else ((name, self.read(name)) for name in places)
        )
