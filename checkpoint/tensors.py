"""The tensors of a checkpoint, in safetensors.

A safetensors file is a JSON header (name → dtype, shape, byte range), then the bytes. So names,
shapes and dtypes are checked before a weight is read: the folder must hold each tensor of the
model, and no other that might change its numbers. A file is mapped anew after MOST_MAPPED bytes:
the peak of memory is the model, so many bytes and one tensor. No pickle is ever opened.

Invariant: every tensor of the model is filled, or an error names it.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from checkpoint.files import read_json
from checkpoint.formats import FLOAT, FLOATS, Header
from errors import UserError, brief

MOST_MAPPED = 2**22  # bytes of tensors that a mapping gives: what is read stays in memory
HARMLESS = r".*\.rotary_emb\.inv_freq"  # in old checkpoints: computed from config.json here


def open_file(file: Path) -> Any:
    """A safetensors file, memory-mapped. UserError names the file."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        problem = brief(error)
        raise UserError(
            f"{file} is not a whole safetensors file and cannot be read ({problem}): fetch it again"
        ) from None


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file. OSError if that fails: the disk is full, say."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {brief(error)}") from None


class Checkpoint:
    """The tensors of a folder. Names, shapes and dtypes are read at once, numbers by `read`."""

    floats: Collection[str] = FLOATS  # dtypes that stand for FLOAT

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mapped: tuple[Path, Any] | None = None  # a file, open
        self.num_mapped = 0  # bytes that were asked of it
        self.headers: dict[str, Header] = {}
        self.files: dict[str, Path] = {}  # the file of each tensor
        single = folder / "model.safetensors"
        if single.is_file():
            self._read_headers(single)
            return
        weight_map = self._weight_map()
        for shard in sorted(set(weight_map.values())):
            names = {name for name, file in weight_map.items() if file == shard}
            self._read_headers(folder / shard, names)

    def _weight_map(self) -> dict[str, str]:
        """The file of each tensor, by the folder's index."""
        index = self.folder / "model.safetensors.index.json"
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: weight_map must give the file of each tensor")
        present = [file.name for file in self.folder.glob("*.safetensors") if file.is_file()]
        for file in weight_map.values():
            if file not in present:
                raise UserError(
                    f"{index}: weight_map must give a .safetensors file in the same folder for "
                    f"each tensor; {brief(file)} is none, or is missing: fetch the model again"
                )
        return weight_map

    def _read_headers(self, file: Path, names: set[str] | None = None) -> None:
        """The headers of this file's tensors; names: of these alone."""
        with open_file(file) as opened:
            for name in opened.keys():
                if names is None or name in names:
                    stored = opened.get_slice(name)
                    self.headers[name] = Header(stored.get_shape(), stored.get_dtype())
                    self.files[name] = file

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of floating-point weights and biases, the dtype of most numbers first."""
        count = Counter[torch.dtype]()
        for name, (shape, dtype) in self.headers.items():
            if dtype in FLOATS and name.endswith((".weight", ".bias")):
                count[FLOATS[dtype]] += math.prod(shape)
        return [dtype for dtype, _ in count.most_common()]

    def check(self, expected: Mapping[str, Header]) -> None:
        """UserError unless the folder holds these tensors, and no other with an effect."""
        for name, (shape, dtype) in expected.items():
            if name not in self.headers:
                why = "is the config its own?"
                if name.removeprefix("model.") in self.headers:
                    why = "it has no model. in front: is this an embedding model?"
                raise UserError(f"tensor {name} {shape} is missing from {self.folder}: {why}")
            stored = self.headers[name]
            where = f"tensor {name} in {self.files[name]}"
            dtypes = list(self.floats) if dtype == FLOAT else [dtype]
            if stored.dtype not in dtypes:
                rule = f"one of {dtypes}" if dtype == FLOAT else dtype
                raise UserError(f"{where} is {stored.dtype}; weights must be {rule}")
            if stored.shape != shape:
                raise UserError(f"{where} is {stored.shape}; the config asks for {shape}")
        for name in self.headers.keys() - expected.keys():
            if not re.fullmatch(HARMLESS, name):
                raise UserError(
                    f"tensor {brief(name)} in {self.files[name]} does not belong to the model of "
                    "the config"
                )

    def read(self, name: str) -> Tensor:
        """One tensor, memory-mapped: its bytes are read when they are used, and unmapped with the
        last tensor of its mapping."""
        file = self.files[name]
        if self.mapped is None or self.mapped[0] != file:
            self.mapped = file, open_file(file)
            self.num_mapped = 0
        tensor = self.mapped[1].get_tensor(name)
        self.num_mapped += tensor.nbytes
        if self.num_mapped > MOST_MAPPED:
            self.mapped = None
        return tensor
