"""GGUF, the file format of llama.cpp: a model's tensors, settings and vocabulary in one file.

All numbers are little-endian. A string is its length (u64) and its UTF-8 bytes.

    "GGUF" · version (u32: 2 or 3) · number of tensors (u64) · number of metadata (u64)
    metadata, one after the other:  key · type (u32) · value
    tensors, one after the other:   name · dims (u32) · each dim (u64) · type (u32) · offset (u64)
    padding, to a multiple of `general.alignment` (32, unless the metadata say so)
    the tensors' bytes: offsets count from here

Dims are listed fastest first, so they are reversed for PyTorch. A large model may be split into
files `…-00001-of-00009.gguf`; each has a header, and the first has the metadata.

Invariant: nothing in a header is believed. Nothing is read beyond the end of the file; every tensor
lies within its file; or a `UserError` names what is wrong.

Cost: a header is parsed in Python, a tenth of a second for a vocabulary of 128,000 tokens. Numbers
become Python's: the largest header, 64 MB of bytes, takes 1 GB while it is read. A tensor's bytes
are mapped, and read when they are used. Each mapped tensor holds an open file.

Not covered: version 1, big-endian files, arrays of arrays, types beyond `SUPPORTED`, and a file
that is cut while its tensors are in use (the operating system then ends the program).
"""

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from checkpoint.gguf_blocks import BLOCK_FORMATS
from errors import UserError, brief

LARGEST_HEADER = 2**26  # bytes; a vocabulary of 256,000 tokens takes 2**24
MAGIC = int.from_bytes(b"GGUF", "little")
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SUPPORTED = {
    type: (1, dtype.itemsize) for type, dtype in PLAIN.items()
}  # weights, bytes of a block
SUPPORTED |= {type: (form.weights, form.nbytes) for type, form in BLOCK_FORMATS.items()}
TYPES = (  # of tensors; a type's number is its place. (Those without a name are out of use.)
    "F32 F16 Q4_0 Q4_1 4 5 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS "
    "IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 31 32 33 "
    "TQ1_0 TQ2_0 36 37 38 MXFP4 NVFP4 Q1_0"
).split()
CODES = "BbHhIif?--Qqd"  # of metadata: as `struct` names them; a type's number is its place
STRING = 8
ARRAY = 9
U64 = struct.Struct("<Q")


class TensorInfo(NamedTuple):
    """Where a tensor is, and what."""

    file: Path
    shape: tuple[int, ...]  # 1 to 4 dims, none of them 0
    type: str  # one of SUPPORTED
    offset: int  # bytes from the beginning of the file
    nbytes: int


class HeaderReader:
    """The header of one file, read from its beginning to its end."""

    def __init__(self, file: Path, opened: BinaryIO) -> None:
        self.file = file
        self.opened = opened
        self.size = file.stat().st_size
        self.left = min(self.size, LARGEST_HEADER)  # bytes that may follow
        self.where = "header"  # what is read now, for errors

    def error(self, problem: str, remedy: str = "fetch the file again") -> UserError:
        return UserError(f"{self.file}: {brief(self.where)} {problem}: {remedy}")

    def check(self, holds: bool, problem: str) -> None:
        """UserError unless this holds."""
        if not holds:
            raise self.error(problem)

    # ---- Numbers and strings

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        if nbytes > self.left:
            raise self.error(
                f"needs {nbytes} bytes, but {self.left} are left of the file, or of the "
                f"{LARGEST_HEADER} that a header may have"
            )
        self.left -= nbytes
        return self.opened.read(nbytes)

    def numbers(self, code: str, count: int) -> list[Any]:
        """The next numbers; code: their type, as `struct` names it."""
        data = self.take(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", data))

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def string(self) -> str:
        (length,) = U64.unpack(self.take(8))
        text = self.take(length)
        try:
            return text.decode()
        except UnicodeDecodeError:
            shown = brief(text[:100])
            raise self.error(f"has {shown}, which is not UTF-8; strings must be") from None

    # ---- Entries

    def values(self, type: int, count: int) -> list[Any]:
        """The next values of one type of metadata."""
        if type == STRING:
            return [self.string() for _ in range(count)]
        is_number = type < len(CODES) and CODES[type] != "-"
        self.check(is_number, f"has values of type {type}; it must be 0 to 12, not 9 in an array")
        return self.numbers(CODES[type], count)

    def value(self) -> Any:
        """The next value of a metadata: an array becomes a list."""
        type = self.number("I")
        if type != ARRAY:
            return self.values(type, 1)[0]
        type = self.number("I")
        return self.values(type, self.number("Q"))

    def name(self, kind: str, taken: dict[str, Any]) -> str:
        """The next entry's name."""
        self.where = kind
        name = self.string()
        self.where = f"{kind} {name}"
        self.check(name not in taken, "is there twice; names must differ")
        return name

    def tensor(self) -> TensorInfo:
        """The next tensor. Its offset counts from the first tensor's bytes."""
        dims = self.numbers("Q", self.number("I"))
        is_shape = 1 <= len(dims) <= 4 and 0 not in dims
        self.check(is_shape, f"has dims {dims[:5]}; there must be 1 to 4, and none 0")
        number = self.number("I")
        type = TYPES[number] if number < len(TYPES) else str(number)
        if type not in SUPPORTED:
            raise self.error(
                f"has type {type}; it must be one of {', '.join(SUPPORTED)}",
                "fetch the model in one of these",
            )
        weights, nbytes = SUPPORTED[type]
        self.check(
            dims[0] % weights == 0,
            f"has rows of {dims[0]} weights; of {type} it must be a multiple of {weights}",
        )
        nbytes *= math.prod(dims) // weights
        return TensorInfo(
            self.file, tuple(dims[::-1]), type, offset=self.number("Q"), nbytes=nbytes
        )

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        """The metadata and the tensors."""
        magic, version = self.numbers("I", 2)
        self.check(
            magic == MAGIC and version in (2, 3),
            f"begins with {magic:#x}, version {version}; GGUF's begins with {MAGIC:#x}, version 2 "
            "or 3, little-endian",
        )
        num_tensors, num_metadata = self.numbers("Q", 2)
        metadata = dict[str, Any]()
        for _ in range(num_metadata):
            key = self.name("metadata", metadata)
            metadata[key] = self.value()
        tensors = dict[str, TensorInfo]()
        for _ in range(num_tensors):
            name = self.name("tensor", tensors)
            tensors[name] = self.tensor()
        alignment = metadata.get("general.alignment", 32)
        self.where = "general.alignment"
        is_alignment = isinstance(alignment, int) and alignment > 0 and alignment % 8 == 0
        self.check(is_alignment, f"is {brief(alignment)}; it must be a multiple of 8")
        position = self.opened.tell()
        first = position + -position % alignment
        for name, info in tensors.items():
            start = first + info.offset
            end = start + info.nbytes
            self.where = f"tensor {name}"
            self.check(
                start % alignment == 0 and end <= self.size,
                f"has bytes {start} to {end}; it must begin at a multiple of {alignment}, and the "
                f"file has {self.size}",
            )
            tensors[name] = info._replace(offset=start)
        return metadata, tensors


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """The metadata and the tensors of one file, which may be a part of a split."""
    if not file.is_file():
        raise UserError(f"{file} is missing, or not a regular file: fetch it again")
    with file.open("rb") as opened:
        return HeaderReader(file, opened).read()


def split_files(file: Path, count: Any) -> list[Path]:
    """The files of a split, by the name of one of them. count: what its header says."""
    match = re.fullmatch(r"(.*)-[0-9]{5}-of-([0-9]{5})\.gguf", file.name, re.DOTALL)
    if not match or int(match[2]) != count:
        raise UserError(
            f"{file}: its split.count is {brief(count)}, so its name must end as in "
            "-00001-of-00009.gguf, where 9 is this count: restore the original names of all files"
        )
    prefix, total = match.groups()
    return [file.with_name(f"{prefix}-{i:05}-of-{total}.gguf") for i in range(1, int(total) + 1)]


@dataclass(frozen=True)
class GGUF:
    """A model in GGUF: `open` reads the header, `read` a tensor."""

    file: Path  # of a split: the first
    metadata: dict[str, Any]  # numbers, strings, and lists of them; of a split: the first file's
    tensors: dict[str, TensorInfo]  # of all files

    @classmethod
    def open(cls, file: Path) -> "GGUF":
        """A file, or all files of a split, any of which may be named.

        UserError names the file that is missing or damaged.
        """
        metadata, tensors = read_header(file)
        count = metadata.get("split.count", 1)
        if count in (0, 1):
            return cls(file, metadata, tensors)
        files = split_files(file, count)
        headers = [read_header(part) for part in files]
        total = sum(len(tensors) for _, tensors in headers)
        joined = dict[str, TensorInfo]()
        for i, (metadata, tensors) in enumerate(headers):
            expected = {"split.no": i, "split.count": count, "split.tensors.count": total}
            stored = {key: metadata.get(key) for key in expected}
            if stored != expected or joined.keys() & tensors.keys():
                raise UserError(
                    f"{files[i]}: it has {brief(stored)}, and it must have {brief(expected)}, and "
                    "no tensor of another file: fetch all files of the model again"
                )
            joined |= tensors
        return cls(files[0], headers[0][0], joined)

    def read(self, name: str) -> Tensor:
        """One tensor, memory-mapped: its bytes are read when they are used, and unmapped with its
        last reference.

        F32, F16, BF16: in its shape. Quantized: blocks, uint8[rows, bytes of a row], rows being
        all dims but the last. The file never changes: writing to the tensor changes a copy.
        """
        info = self.tensors[name]
        before = info.offset % mmap.ALLOCATIONGRANULARITY  # a mapping begins at a page of memory
        with info.file.open("rb") as opened:
            try:
                data = mmap.mmap(
                    opened.fileno(),
                    before + info.nbytes,
                    access=mmap.ACCESS_COPY,
                    offset=info.offset - before,
                )
            except ValueError:
                raise UserError(
                    f"{info.file} was cut after its header was read: fetch it again"
                ) from None
        raw = torch.frombuffer(data, dtype=torch.uint8, offset=before)
        if info.type in PLAIN:
            return raw.view(PLAIN[info.type]).view(info.shape)
        rows = math.prod(info.shape[:-1])
        return raw.view(rows, -1)
