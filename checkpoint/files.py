"""Files: text and JSON of a model folder, which is untrusted, are read only from ordinary files of
a bounded size; and a file that is written is there whole, or as it was."""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from errors import UserError, brief

Json = dict[str, Any]  # an object in a JSON file

LARGEST_JSON = 2**22  # bytes


def read_bytes(file: Path, limit: int) -> bytes:
    """The bytes of a regular file (a pipe may have no end). FileNotFoundError or UserError names
    the file."""
    if not file.exists():
        raise FileNotFoundError(
            f"{file} is missing: a model folder needs config.json, tokenizer.json (or "
            "tokenizer.model), and model.safetensors or its shards (a pytorch_model.bin is a "
            "pickle: convert it first; a repository of GGUFs: name owner/name:FILE.gguf)"
        )
    if not file.is_file() or file.stat().st_size > limit:
        raise UserError(
            f"{file} is not a regular file, or it is too large (at most {limit} bytes are read)"
        )
    return file.read_bytes()


def read_bounded(file: Path, limit: int = LARGEST_JSON) -> str:
    """The text of a regular file, without a byte order mark. FileNotFoundError or UserError names
    the file."""
    data = read_bytes(file, limit)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"{error.reason} at byte {error.start}"
        raise UserError(f"{file} is not UTF-8 ({problem}): fetch it again") from None


def finite_number(text: str) -> float:
    """A number in JSON. UserError for 1e999, NaN and Infinity, which `json` would accept."""
    value = float(text)
    if not math.isfinite(value):
        raise UserError(f"{text} is not a finite number")
    return value


def parse_object(text: str) -> Json:
    """The object that a JSON text holds. UserError says why it holds none."""
    try:
        value = json.loads(text, parse_float=finite_number, parse_constant=finite_number)
    except json.JSONDecodeError as error:
        raise UserError(f"{error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(str(error)) from None
    if not isinstance(value, dict):
        raise UserError(f"it holds a {type(value).__name__}, not an object")
    return value


def read_json(file: Path, limit: int = LARGEST_JSON) -> Json:
    """The object in a JSON file. FileNotFoundError or UserError names the file."""
    text = read_bounded(file, limit)
    try:
        return parse_object(text)
    except UserError as error:
        raise UserError(f"{file} is not valid JSON: {brief(error)}; fetch it again") from None


def check_file(path: Path) -> None:
    """UserError if no file can be written there. Nothing changes."""
    other = path.exists() and not path.is_file()  # a folder, a device or a pipe
    if other or not path.parent.is_dir() or not os.access(path.resolve().parent, os.W_OK):
        raise UserError(
            f"{path} is not a file, or cannot be written to: name a file in a folder that "
            "you can write to"
        )


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A new file to write, which replaces `path` once it is complete, and not after an error."""
    check_file(path)
    path = path.resolve()  # a link stays, its target is replaced
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = Path(folder, path.name)
        yield new
        new.replace(path)


def write_json(file: Path, data: Json | list) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    with new_file(file) as new:
        new.write_text(text, encoding="utf-8")
