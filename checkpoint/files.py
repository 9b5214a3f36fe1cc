"""Text and JSON of a model folder, which is untrusted: ordinary files of a bounded size."""

import json
from pathlib import Path
from typing import Any

from errors import UserError, brief

Json = dict[str, Any]  # an object in a JSON file

LARGEST_JSON = 2**22  # bytes


def read_bytes(file: Path, limit: int) -> bytes:
    """An ordinary file's bytes (a pipe may have no end). FileNotFoundError or UserError names the
    file."""
    if not file.exists():
        raise FileNotFoundError(
            f"{file} is missing: a model folder needs config.json, tokenizer.json (or "
            "tokenizer.model), and model.safetensors or its shards (a pytorch_model.bin is a "
            "pickle: convert it first; a repository of GGUFs: name owner/name:FILE.gguf)"
        )
    if not file.is_file() or file.stat().st_size > limit:
        raise UserError(
            f"{file} is no ordinary file, or too large (of its bytes, at most {limit} make sense)"
        )
    return file.read_bytes()


def read_bounded(file: Path, limit: int = LARGEST_JSON) -> str:
    """An ordinary file's text. FileNotFoundError or UserError names it."""
    data = read_bytes(file, limit)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        problem = f"{error.reason} at byte {error.start}"
        raise UserError(f"{file} is not UTF-8 ({problem}): fetch it again") from None


def parse_json(text: str) -> Any:
    """JSON without NaN and Infinity, which Python's `json` would accept."""

    def refuse(constant: str) -> None:
        raise UserError(f"{constant} is not a JSON number")

    return json.loads(text, parse_constant=refuse)


def read_json(file: Path, limit: int = LARGEST_JSON) -> Json:
    """The object in a JSON file. FileNotFoundError or UserError names the file."""
    text = read_bounded(file, limit)
    try:
        data = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {brief(error)}; fetch it again") from None
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise UserError(f"{file} is not valid JSON: it holds a {kind}, not an object")
    return data
