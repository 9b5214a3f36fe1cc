"""The tensors of a checkpoint, in safetensors.

A safetensors file is a JSON header (name → dtype, shape, byte range), then the bytes. So names, shapes and dtypes are
checked before a weight is read: the folder must hold each tensor of the model, and no other. A file is mapped anew for
each tensor: the peak of memory is the model and one tensor. No pickle is ever opened.
Invariant: every tensor of the model is filled, or an error names it.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint.files import read_json
from checkpoint.formats import Quantization
from errors import UserError, brief

DTYPES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}
EXACT = {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}  # dtypes of quantized weights


def _open(file: Path) -> Any:
    """A safetensors file, memory-mapped. ValueError names the file."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
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
                raise UserError(
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
                raise UserError(
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
                raise UserError(
                    f"tensor {name} {list(place.shape)} is missing from {self.folder}: wrong config.json?"
                )
            file, shape, dtype = self.stored[name]
            kind = EXACT.get(place.dtype)
            if dtype not in ([kind] if kind else DTYPES):
                raise UserError(
                    f"tensor {name} in {file} is {dtype}; weights must be {kind or f'one of {[*DTYPES]}'}"
                )
            if shape != list(place.shape):
                raise UserError(
                    f"tensor {name} in {file} is {shape}; config.json asks for {list(place.shape)}"
                )
        for name in self.stored.keys() - places.keys():
            raise UserError(
                f"tensor {brief(name)} in {self.stored[name][0]} has no place in the model of config.json"
            )

    def read(self, name: str) -> Tensor:
        """One tensor, memory-mapped: its bytes are read when they are used, and unmapped with its last reference."""
        file, shape, _ = self.stored[name]
        with _open(file) as opened:
            tensor = opened.get_tensor(name)
        if list(tensor.shape) != shape:
            raise UserError(
                f"tensor {name} in {file} is another than a moment ago: something writes this file"
            )
        return tensor

    def tensors(self, places: Mapping[str, Tensor], **rules: Any) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) for each place, one after the other. rules: those of `audit`, which runs again first."""
        self.audit(places, **rules)
        for name, other in rules.get("twice", {}).items():
            if name in self.stored and not torch.equal(self.read(name), self.read(other)):
                raise UserError(
                    f"tensor {name} of {self.folder} differs from {other}, though config.json ties them"
                )
        how = rules.get("how")
        yield from (
            how.tensors(places, self.stored, self.read)
            if how
            else ((name, self.read(name)) for name in places)
        )
