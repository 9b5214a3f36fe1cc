"""Requests from a file: JSONL, one a line.

    {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.7, "seed": 1, "id": "a"}

A line is an object with a prompt (a text, or chat messages) and any of the command line's settings by name; what it leaves out is as
the command line says. A line that cannot be served is told by its number, and becomes a result whose finish_reason is "error";
the others are served.

    every line that is not blank  =  a request, or an error with its reason
"""
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from pretrained import Model
from request import Request, Settings

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", "gamma")
OTHERS = ("prompt", "id", "system", "raw", "chat")
KINDS = (("prompt", (str, list), "a text, or a list of chat messages"), ("system", str, "a text"), ("raw", bool, "true or false"),
         ("chat", bool, "true or false"), ("stop", (str, list), "a text, or a list of texts"))


class Line(NamedTuple):
    """A line of the file: its number among the requests, and either what it asks for, or what is wrong with it."""
    index: int
    number: int                                         # in the file, from 1
    asked: dict[str, Any]
    request: Request | None
    error: str = ""


def read_requests(lines: Iterable[str], model: Model, defaults: Settings, max_len: int | None, system: str | None = None,
                  chat: bool | None = None) -> Iterator[Line]:
    """Each line that is not blank."""
    index = 0
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        asked: dict[str, Any] = {}
        try:
            asked = _object(text)
            yield Line(index, number, asked, _request(asked, model, defaults, max_len, system, chat))
        except ValueError as error:
            yield Line(index, number, asked, None, str(error))
        index += 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


def _object(text: str) -> dict[str, Any]:
    try:
        asked = json.loads(text, object_pairs_hook=_unique)
        json.dumps(asked, allow_nan=False)                                      # what comes in goes out again, with the result
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not JSON ({error}): a line must be an object like {{\"prompt\": \"…\"}}") from None
    if not isinstance(asked, dict) or "prompt" not in asked:
        raise ValueError('there is no "prompt": a line must be an object like {"prompt": "…"}')
    if unknown := asked.keys() - {*SETTINGS, *OTHERS}:
        raise ValueError(f"{', '.join(map(repr, sorted(unknown)))} is unknown here: a line may have {', '.join([*OTHERS, *SETTINGS])}")
    return asked


def _request(asked: dict[str, Any], model: Model, defaults: Settings, max_len: int | None, system: str | None, chat: bool | None) -> Request:
    for name, kinds, rule in KINDS:
        if asked.get(name) is not None and not isinstance(asked[name], kinds) or name == "prompt" and asked[name] is None:
            raise ValueError(f"{name} is {asked[name]!r}: it must be {rule}")
    if asked.get("chat") and asked.get("raw"):
        raise ValueError("chat and raw are both true: leave one out")
    chosen = {name: asked[name] for name in SETTINGS if asked.get(name) is not None}
    if "stop" in chosen:
        chosen["stop"] = (chosen["stop"],) if isinstance(chosen["stop"], str) else tuple(chosen["stop"])
    if chosen.get("gamma") == "auto":
        chosen["gamma"] = None
    settings = model.complete(replace(defaults, **chosen))
    how = True if asked.get("chat") else False if asked.get("raw") else chat
    tokens = model.encode(asked["prompt"], asked.get("system", system), how)
    return Request(tokens, replace(settings, max_tokens=model.room(len(tokens), settings.max_tokens, max_len) - len(tokens)), model.ends)
