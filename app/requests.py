"""Requests from a file, one JSON object a line.

    {"prompt": "Once upon a time", "max_tokens": 40, "seed": 1, "id": "a"}
    {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40}

The prompt is a text, or chat messages; `messages` is another name for these. If they have calls of
tools, they are read as a server reads them. Settings have the names that `Settings` gives them. A
bad line becomes an error that keeps the line's `id`; the other lines are served.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from checkpoint.files import parse_object
from errors import UserError, check_names
from request import Request
from settings import Options, Settings, refuse_value, settings_of

if TYPE_CHECKING:
    from loading import Model

OF_TOOLS = {"tool_calls", "tool_call_id"}
NAMES = ("prompt", "messages", "id", "system", "raw", *Settings.__dataclass_fields__)


@dataclass
class Line:
    """A line of the file: its JSON object, and its request or what is wrong with it."""

    number: int  # from 1, blank lines too
    fields: dict[str, Any] = field(default_factory=dict)
    request: Request | None = None
    error: UserError | None = None

    @property
    def labels(self) -> dict[str, Any]:
        """What the result repeats: the line's number, and its field `id`."""
        labels: dict[str, Any] = {"line": self.number}
        if "id" in self.fields:
            labels["id"] = self.fields["id"]
        return labels


def read_requests(
    lines: Iterable[str],
    model: "Model",
    defaults: Settings,
    options: Options,
    system: str | None,
    use_template: bool | None,
    check: Callable[[Request], None],
) -> Iterator[Line]:
    """Each line that is not blank.

    defaults: the settings where a line has none; check: UserError for a request to be refused.
    """
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        line = Line(number)
        try:
            line.fields = fields_of(text)
            check_fields(line.fields)
            line.fields.setdefault("prompt", line.fields.get("messages"))
            own_system = line.fields.get("system")
            chat = use_template
            raw = line.fields.get("raw")
            if raw is not None:  # false takes --raw back: the model's template, if it has one
                chat = False if raw else (use_template or None)
            request = model.request(
                with_tools_read(line.fields["prompt"], model),
                settings_of(line.fields, defaults),
                options,
                system if own_system is None else own_system,
                chat,
            )
            check(request)
            line.request = request
        except UserError as error:
            line.error = error
        yield line


def with_tools_read(prompt: str | list, model: "Model") -> str | list:
    """The prompt; of messages with calls, each result follows its call, and arguments are objects.
    Only these need the server's packages."""
    if not any(isinstance(turn, dict) and OF_TOOLS & turn.keys() for turn in prompt):
        return prompt
    try:
        from app.openai import ChatBody, call_format_of, read_body, read_conversation
    except ModuleNotFoundError as error:
        needs = f"messages with calls of tools need the package {error.name}"
        raise UserError(f"{needs}: pip install '.[server]'") from None
    body = read_body(json.dumps({"messages": prompt}).encode(), ChatBody)
    return read_conversation(body.messages, call_format_of(model).one_call)


def fields_of(text: str) -> dict[str, Any]:
    """The fields of a line."""
    try:
        return parse_object(text)
    except UserError as error:
        raise UserError(f'{error}: a line must be a JSON object like {{"prompt": "…"}}') from None


def check_fields(fields: dict[str, Any]) -> None:
    """UserError for a name or a type that is not known. `Settings` checks its own."""
    if "custom_id" in fields:
        raise UserError("a line of OpenAI's batch API is for a server: send it the body")
    check_names(fields, NAMES, "field of a line")
    prompt = fields.get("prompt", fields.get("messages"))
    if not isinstance(prompt, str | list) or {"prompt", "messages"} <= fields.keys():
        refuse_value("prompt", prompt, "a text, or chat messages, and one of prompt and messages")
    if not isinstance(fields.get("raw"), bool | None):
        refuse_value("raw", fields["raw"], "true or false")
