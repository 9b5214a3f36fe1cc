"""Damaged files of a model: each is read, or one line says what is wrong, within a gigabyte.

TEST_TIMES (conftest.py) makes more of them: .ci/run damages each file 2,500 times.
"""

import json
import math
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from checkpoint.gguf import GGUF
from checkpoint.gguf_blocks import BLOCK_FORMATS, unpack
from conftest import TIMES
from errors import UserError
from generate import generate
from model import Llama
from testing.folders import CHATML, write_model
from testing.gguf import METADATA, SMALL, quantized, spm_gguf, write
from testing.gguf import write_model as write_gguf
from testing.pieces import tokenizer_json, tokenizer_model
from tokenizer import Tokenizer

GIGABYTE = 2**30
TENSORS = [("plain", SMALL)]
TENSORS += [(type, quantized(type, [2, form.weights])) for type, form in BLOCK_FORMATS.items()]
STRANGE = [
    *(None, True, 0, -1, 3, 2**31 - 1, 2**64, 10**400, 0.5, 1e-300, 1e300, math.nan),
    *("", "x", "\ud800", "x\n" * 9999, [], [[]], {}, {"x": 1}, [1] * 999, [None]),
]
PIECES = [b"", b"\x00", b"\xff", b"[[[[" * 999, b"9" * 30, b"{}", b"-", b"e999", b'"']


@pytest.fixture(autouse=True)
def a_gigabyte() -> Iterator[None]:
    """No damage may ask for more memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + GIGABYTE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def with_bytes(whole: bytes, draw: Random, header: int) -> bytes:
    """A few changes, most of them among the first `header` bytes."""
    data = bytearray(whole)
    for _ in range(draw.randrange(1, 5)):
        most = min(header, len(data)) if draw.random() < 0.8 else len(data)
        at = draw.randrange(most)
        match draw.randrange(9):
            case 1:
                del data[at : at + draw.randrange(1, 9)]
            case 2:
                data[at:at] = draw.randbytes(draw.randrange(1, 9))
            case 3:
                data[at : at + 4] = draw.choice((b"\xff" * 4, bytes(4), b"\x00\x00\x00\x80"))
            case _:
                data[at] = draw.randrange(256)
    if draw.random() < 0.1:
        del data[draw.randrange(len(data)) :]
    return bytes(data or b"\0")


def with_entries(data: bytes, draw: Random) -> bytes:
    """JSON with an entry replaced or left out; or bytes with some changed, cut off or put in."""
    if draw.random() < 0.6:
        whole = json.loads(data)
        inner = whole
        while isinstance(inner, (dict, list)) and inner:
            above = inner
            key = draw.choice([*inner] if isinstance(inner, dict) else range(len(inner)))
            inner = above[key]
            if draw.random() < 0.4:
                break
        above[key] = draw.choice(STRANGE)
        if draw.random() < 0.2:
            del above[key]
        return json.dumps(whole).encode()
    at = draw.randrange(len(data))
    cut = draw.choice([0, 1, len(data)])
    return data[:at] + draw.choice(PIECES) + data[at + cut :]


def read_tensors(file: Path) -> None:
    opened = GGUF.open(file)
    for name, info in opened.tensors.items():
        tensor = opened.read(name)
        assert tensor.nbytes == info.nbytes <= file.stat().st_size
        if info.type in BLOCK_FORMATS:
            unpack(info.type, tensor)


class Kind(NamedTuple):
    """A file, how it is written and read, and where most of its damage is."""

    name: str
    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    header: int


def read_tokenizer(file: Path) -> None:
    Tokenizer.load(file.parent)


KINDS = [
    Kind("tokenizer.model", lambda f: f.write_bytes(tokenizer_model()), read_tokenizer, 20_000),
    Kind(
        "tokenizer.json",
        lambda f: f.write_text(json.dumps(tokenizer_json())),
        read_tokenizer,
        20_000,
    ),
    Kind("vocabulary.gguf", spm_gguf, Tokenizer.load, 8_000),
    Kind("model.gguf", lambda f: write_gguf(f, {"": "Q4_K"}), Llama.load, 2_500),
    Kind("tensors.gguf", lambda f: write(f, METADATA, TENSORS), read_tensors, 2_500),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_bytes_of_a_file_are_damaged(kind, tmp_path):
    file = tmp_path / kind.name
    kind.write(file)
    whole = file.read_bytes()
    draw = Random(kind.name)
    num_refused = 0
    for _ in range(250 * TIMES):
        file.write_bytes(with_bytes(whole, draw, kind.header))
        try:
            kind.read(file)
        except UserError as error:
            assert "\n" not in str(error)
            num_refused += 1
    assert num_refused


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    + ["model.safetensors"],
)
def test_entries_of_a_folder_are_damaged(name, tmp_path):
    """A text is made, or one line says why not. Of tensors, the header is damaged."""
    recommended = dict(do_sample=True, temperature=0.7, eos_token_id=[256, 258])
    folder = write_model(tmp_path, CHATML, generation=recommended)
    file = folder / name
    draw = Random(name)
    head, whole, rest = b"", file.read_bytes(), b""
    if file.suffix == ".safetensors":
        end = 8 + int.from_bytes(whole[:8], "little")
        whole, rest = whole[8:end], whole[end:]
    for _ in range(20 * TIMES):
        data = with_entries(whole, draw)
        head = len(data).to_bytes(8, "little") if rest else b""
        file.write_bytes(head + data + rest)
        try:
            generate("Once upon a time", folder, max_tokens=2, seed=1, device="cpu")
        except (UserError, OSError) as error:
            assert len(str(error)) < 1000 and "\n" not in str(error)
