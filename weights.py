"""Weights: from a name to a folder, from a folder to tensors in their places. Only safetensors; no pickle is ever opened.

A safetensors file is a JSON header (name → dtype, shape, byte range) and then the bytes. So everything can be checked before
a byte of weight is read: every tensor that the model has must be there, nothing else may be, each with its shape and a
floating-point dtype (quantized ones: exactly theirs). Then each tensor goes once from the memory-mapped file to its place in the model. A file is mapped anew
for each tensor and let go right after, so that the pages read do not pile up: the peak is the model and one tensor.

Invariant: `fill` either fills every place, or raises and names the tensor and the file.

Format: https://huggingface.co/docs/safetensors. Names and folders: the Hugging Face Hub's.
"""
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vocabulary import brief, read_json

ALIASES = {
    "1B": "meta-llama/Llama-3.2-1B-Instruct",
    "3B": "meta-llama/Llama-3.2-3B-Instruct",
    "8B": "meta-llama/Llama-3.1-8B-Instruct",
    "70B": "meta-llama/Llama-3.3-70B-Instruct",
}
EMBEDDED = {"tiny": "models/tiny", "tiny-draft": "models/tiny-draft"}      # beside this file
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
UNWANTED = ["original/*.json", "*/*.safetensors"]        # Meta's own layout, adapters
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
WHOLE = {torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16"}                # quantized: stored as they are used, or not at all


def find(name: str | Path) -> Path:
    """The folder of a model: an alias (1B, 3B, 8B, 70B, tiny, tiny-draft), a folder, or a Hub id, which is fetched if need be.

    Raises FileNotFoundError, with the way out, if there is no such thing or it cannot be had.
    """
    text = str(name)
    if text in EMBEDDED:
        folder = Path(__file__).parent / EMBEDDED[text]
        if not folder.is_dir():
            raise FileNotFoundError(f"the embedded model {text!r} should be in {folder}: fetch the repository again")
        return folder
    if text and Path(os.path.expanduser(text)).is_dir():
        return Path(os.path.expanduser(text))
    repo = ALIASES.get(text, text)
    if repo.count("/") != 1 or text.startswith(("/", ".", "~")):
        raise FileNotFoundError(f"{text!r} is neither a folder, nor a Hub id (owner/name), nor one of {', '.join([*ALIASES, *EMBEDDED])}")
    return _fetch(repo)


def _fetch(repo: str) -> Path:
    """Bring what is needed of a Hub repository here, or find it in the cache (also offline)."""
    from huggingface_hub import errors, snapshot_download
    try:
        return Path(snapshot_download(repo, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except Exception as error:             # its own, its HTTP library's (a connection that breaks half-way), the file system's
        problem = error
    try:
        cached = Path(snapshot_download(repo, allow_patterns=WANTED, ignore_patterns=UNWANTED, local_files_only=True))
        if any(cached.glob("*.safetensors")):
            return cached
    except (errors.HFValidationError, errors.LocalEntryNotFoundError, OSError):
        pass
    ways_out = {errors.GatedRepoError: f"is gated: accept its licence at https://huggingface.co/{repo} and run `hf auth login`",
                errors.RepositoryNotFoundError: "is not a repository that you may see: check the name, or run `hf auth login` if it is private",
                errors.HFValidationError: "is not a possible Hub id: owner/name, of letters, digits, '-', '_' and '.'",
                Exception: f"is not in the local cache, and the Hub cannot be reached ({' '.join(str(problem).split())[:120]}): go online once"}
    raise FileNotFoundError(f"{repo} {next(way for kind, way in ways_out.items() if isinstance(problem, kind))}; or give a folder that holds the model")


class Checkpoint:
    """The tensors of a folder: names, shapes and dtypes at once, the numbers when they are asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = self._files()                                       # tensor name -> the file that holds it
        self.headers = {name: (shape, dtype) for file in sorted(set(self.files.values())) for name, shape, dtype in _header(file)}

    def _files(self) -> dict[str, Path]:
        single, index = self.folder / "model.safetensors", self.folder / "model.safetensors.index.json"
        if single.is_file():
            return {name: single for name, _, _ in _header(single)}
        if index.is_file():
            return self._shards(index)
        raise FileNotFoundError(f"{self.folder} holds neither model.safetensors nor model.safetensors.index.json: weights are read "
                                "from safetensors only (a pytorch_model.bin is a pickle; convert it with its own library first)")

    def _shards(self, index: Path) -> dict[str, Path]:
        """What the index says, if it agrees with what the files hold."""
        says = read_json(index).get("weight_map")
        if not isinstance(says, dict) or not says or not all(isinstance(file, str) for file in says.values()):
            raise ValueError(f"{index}: weight_map must give a file name for each tensor")
        holds: dict[str, str] = {}
        for file in sorted(set(says.values())):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"{index} names {brief(repr(file))}: "
                                 "a shard is a .safetensors file in the same folder")
            if not (self.folder / file).is_file():
                raise FileNotFoundError(f"{brief(self.folder / file)} is missing, though {index.name} lists it: "
                                        "fetch the model again")
            for name, _, _ in _header(self.folder / file):
                if holds.setdefault(name, file) != file:
                    raise ValueError(f"tensor {name} is in both {holds[name]} and {file} of {self.folder}")
        for name in says.keys() | holds.keys():
            if says.get(name) != holds.get(name):
                raise ValueError(f"{index} puts tensor {brief(name)} in {says.get(name)}, "
                                 f"but it is in {holds.get(name)}")
        return {name: self.folder / file for name, file in says.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most numbers are stored in; of a quantized model, those that are not."""
        count: dict[str, int] = {}
        for shape, dtype in (header for name, header in self.headers.items() if not name.endswith("_scale") and header[1] not in WHOLE.values()):
            count[dtype] = count.get(dtype, 0) + torch.Size(shape).numel()
        return DTYPES.get(max(count, key=count.__getitem__, default="F32"), torch.float32)

    def audit(self, places: Mapping[str, Tensor], ignore: str = "(?!)", twice: Mapping[str, str] = MappingProxyType({})) -> None:
        """Every place has its tensor, every tensor its place, the shapes agree, the numbers are floating point. Else ValueError.

        ignore: a pattern of names that old checkpoints hold and nobody needs. twice: tensors that may be there although they must
        equal another one, {name: the other}. `places` may be on the meta device: only shapes are looked at.
        """
        self.headers = {name: header for name, header in self.headers.items() if not re.fullmatch(ignore, name)}
        places = {**places, **{name: places[twice[name]] for name in twice if name in self.headers}}
        for name, place in places.items():
            if name not in self.headers:
                raise ValueError(f"tensor {name} {list(place.shape)} is missing from {self.folder}: the checkpoint is incomplete, or "
                                 "config.json describes another model")
            (shape, dtype), file = self.headers[name], self.files[name]
            known = [WHOLE[place.dtype]] if place.dtype in WHOLE else list(DTYPES)
            if dtype not in known:
                raise ValueError(f"tensor {name} in {file} is {dtype}; weights must be {'one of ' * (len(known) > 1)}{', '.join(known)}")
            if list(shape) != list(place.shape):
                raise ValueError(f"tensor {name} in {file} is {list(shape)}; config.json asks for {list(place.shape)}")
        for name in self.headers.keys() - places.keys():
            raise ValueError(f"tensor {name} in {self.files[name]} has no place in the model that config.json describes")

    def read(self, name: str) -> Tensor:
        """One tensor, memory-mapped: it is read as it is used, and let go with the last reference."""
        try:
            with safe_open(self.files[name], framework="pt") as file:
                tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"tensor {name} cannot be read from {self.files[name]}: {error}") from None
        if list(tensor.shape) != list(self.headers[name][0]):
            raise ValueError(f"tensor {name} in {self.files[name]} is another than a moment ago: "
                             "something writes this file")
        return tensor

    def tensors(self, places: Mapping[str, Tensor], ignore: str = "(?!)", twice: Mapping[str, str] = MappingProxyType({})) -> Iterator[tuple[str, Tensor]]:
        """Every tensor and its name, one after the other; the arguments, and what is refused before the first, as in `audit`."""
        self.audit(places, ignore, twice)
        for name in twice.keys() & self.headers.keys():
            if not torch.equal(self.read(name), self.read(twice[name])):
                raise ValueError(f"tensor {name} in {self.files[name]} differs from {twice[name]}, though config.json ties them")
        yield from ((name, self.read(name)) for name in places)


def _header(file: Path) -> list[tuple[str, list[int], str]]:
    """(name, shape, dtype) of each tensor in a file, without reading the numbers."""
    try:
        with safe_open(file, framework="pt") as f:
            slices = ((name, f.get_slice(name)) for name in f.keys())
            found = [(name, part.get_shape(), part.get_dtype()) for name, part in slices]
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a whole safetensors file ({brief(error)}): fetch it again") from None
    for name, _, _ in found:
        if brief(name) != name:
            raise ValueError(f"{file} holds a tensor named {brief(repr(name))}: "
                             "a name is a line of at most 400 printable characters")
    return found
