"""Text and JSON of a model folder, which is untrusted: ordinary files of a bounded size."""

import json
import math
from pathlib import Path
from typing import Any

from errors import UserError, brief

LARGEST_JSON = 2**22  # bytes


def read_text(file: Path, limit: int = LARGEST_JSON, encoding: str = "utf-8") -> str:
    """An ordinary file's text (a pipe or a device may have no end). FileNotFoundError or ValueError names the file."""
    if not file.exists():
        raise FileNotFoundError(
            f"{file} is missing: a model folder needs config.json, tokenizer.json or .model, and "
            "model.safetensors or its shards (a pytorch_model.bin is a pickle: convert it first)"
        )
    if not file.is_file() or file.stat().st_size > limit:
        raise UserError(
            f"{file} is no ordinary file, or too large (of its bytes, at most {limit} make sense)"
        )
    try:
        return file.read_bytes().decode(encoding)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 ({error.reason} at byte {error.start}): fetch it again"
        ) from None


def parse_json(text: str) -> Any:
    """JSON, strictly: ValueError for a number that is not finite, or a name that stands twice in an object."""

    def finite(number: str) -> float:
        if math.isfinite(value := float(number)):
            return value
        raise UserError(
            f"{brief(number, 40)} is {'too large' if number[-1].isdigit() else 'not a JSON number'}"
        )

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) == len(pairs):
            return found
        raise UserError("a name stands twice in an object")

    return json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)


def read_json(file: Path, limit: int = LARGEST_JSON) -> dict[str, Any]:
    """The object in a JSON file. FileNotFoundError or ValueError names the file."""
    text = read_text(file, limit)
    try:
        if isinstance(data := parse_json(text), dict):
            return data
        raise UserError(f"it holds a {type(data).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {brief(error)}; fetch it again") from None
