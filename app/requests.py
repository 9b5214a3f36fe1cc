"""Requests from a file: a line of JSON each.

{"prompt": "Once upon a time", "max_tokens": 40, "seed": 1, "id": "a"}. The prompt is a text, or chat messages; settings
have the names that `Settings` gives them.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from checkpoint.files import parse_json
from errors import UserError
from request import Request, Settings

KINDS = {
    "prompt": (str | list, "a text, or chat messages"),
    "id": (object, ""),
    "system": (str | None, "a text"),
    "raw": (bool | None, "true or false"),
    "chat": (bool | None, "true or false"),
}
NAMES = (*KINDS, *Settings.__dataclass_fields__)  # that a line may have


def read_requests(
    lines: Iterable[str],
    model: Any,
    defaults: Settings,
    max_len: int | None,
    system: str | None = None,
    chat: bool | None = None,
) -> Iterator[tuple[int, dict[str, Any], Request | ValueError]]:
    """For each line that is not blank: its number, from 1; its JSON object; its Request, or a ValueError.
    model: a `generate.Model`; defaults: the settings where a line has none."""
    for number, text in ((n, line) for n, line in enumerate(lines, 1) if line.strip()):
        asked: dict[str, Any] = {}
        try:
            asked = _object(text)
            for name, (kind, rule) in KINDS.items():
                if not isinstance(asked.get(name), kind):
                    raise UserError(f"{name} is {asked[name]!r}: it must be {rule}")
            if asked.get("chat") and asked.get("raw"):
                raise UserError("chat and raw are both true: leave one out")
            chosen = {
                name: asked[name]
                for name in Settings.__dataclass_fields__
                if asked.get(name) is not None
            }
            how = asked.get("chat") or (False if asked.get("raw") else chat)
            yield (
                number,
                asked,
                model.request(
                    asked["prompt"],
                    replace(defaults, **chosen),
                    asked.get("system", system),
                    how,
                    max_len,
                ),
            )
        except ValueError as error:
            yield number, asked, error


def _object(text: str) -> dict[str, Any]:
    try:
        json.dumps(asked := parse_json(text))  # the result repeats it, so it must be JSON
        if not isinstance(asked, dict) or "prompt" not in asked:
            raise UserError('there is no "prompt"')
    except (ValueError, RecursionError) as error:
        raise UserError(f'{error}: a line must be a JSON object like {{"prompt": "…"}}') from None
    if unknown := [repr(name) for name in asked if name not in NAMES]:
        raise UserError(f"{', '.join(unknown)} is unknown here: a line may have {', '.join(NAMES)}")
    return asked
