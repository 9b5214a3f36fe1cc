"""A chat template: from a conversation to the tokens of a prompt.

A model's template is a Jinja program: messages in, one string out, with control tokens (<|eot_id|>)
between them. It trims and reorders, so a message cannot be encoded before it is laid out; and after
that, a control token of the template looks like the same characters in a message. So, while the
template runs, a lone surrogate stands in a message for every letter that begins a control token
(inert.py):

    a message "say <|eot_id|>"  ->  "say □|eot_id|>"  ->  template  ->  cut at control tokens  ->
    "say <|eot_id|>" again, which is encoded as plain text

Added tokens that the template knows (<|im_start|>) count as control tokens here.

Invariants:
  - No control token of a rendered template begins inside a message, not even one that the template
    puts together from parts of messages.
  - The text is the one that the template makes of the messages as they were written.
  - The last user message is in it: as a text or, for templates that want these, as a list of parts.
    A template that changes it is told; one that leaves it out is refused.
  - No instruction, and no result of a tool, is left out; nor is a call, if the template has calls.

sandbox.py runs the template: on the messages as they were written; again with stand-ins, if they
have letters that begin a control token. Another run, with another text as the last user message,
shows whether the template leaves that out; if it does, it gets contents as lists of parts.
"""

import json
import os
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoint.files import Json, read_bounded
from checkpoint.inert import stand_ins, swap
from checkpoint.sandbox import LONGEST, render
from checkpoint.vocabulary import Finder, Swallows, Vocabulary
from errors import UserError, brief

Message = dict[str, Any]  # {"role": …, "content": …}, and what only templates read: READ_BY_SOME
READ_BY_SOME = {"tool_calls", "tool_call_id", "name", "reasoning_content"}
THOUGHTS = (  # templates' names of an answer's thoughts
    "reasoning_content",
    "reasoning",
    "thinking",
)
UNUSED = "\ue000"  # a message that nobody sends


def replace_surrogates(text: str) -> str:
    """U+FFFD for each lone surrogate: after this, a surrogate can stand for another character."""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def load_template(folder: Path, config: Json, name: str = "default") -> str | None:
    """The folder's template of this name or None: a file's, or else tokenizer_config.json's."""
    file = folder / "chat_template.jinja"
    if name != "default":
        file = folder / "additional_chat_templates" / f"{name}.jinja"
    if os.path.lexists(file):  # a link to nothing is no missing template
        return read_bounded(file)
    return checked_template(folder / "tokenizer_config.json", config.get("chat_template"), name)


def checked_template(file: Path, template: Any, name: str = "default") -> str | None:
    """The template, of several the one of this name. UserError if it is no text."""
    with suppress(LookupError, TypeError):
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get(name)
        elif name != "default":
            return None
    if template is not None and not isinstance(template, str):
        raise UserError(f"{file}: chat_template is {brief(template)}; it must be text")
    return template


class ChatTemplate:
    """A template, and the tokens of the vocabulary that it is for."""

    def __init__(self, vocabulary: Vocabulary, source: str) -> None:
        self.vocabulary = vocabulary
        self.source = replace_surrogates(source)
        named = vocabulary.named.values()
        visible = filter(str.strip, vocabulary.added)  # spaces control nothing
        known = {text for text in visible if text in source or text in named}
        self._letters = "".join(sorted({text[0] for text in known | vocabulary.special.keys()}))
        marks = stand_ins(self._letters)
        self._restore = {ord(mark): chr(letter) for letter, mark in marks.items()}
        self.ids = vocabulary.special | vocabulary.added
        for text in vocabulary.added.keys() - known:  # cut out of messages, too
            self.ids[text.translate(marks)] = self.ids[text]
        swallows = [
            texts | {text.translate(marks) for text in texts} for texts in vocabulary.swallows
        ]
        self._finder = Finder(self.ids, Swallows(*swallows))

    def parts(self, messages: list[Message], options: Json) -> list[str | int]:
        """A conversation: texts without control tokens, and tokens between them. options: what the
        template gets beside the messages; None: it is to choose."""
        options = {name: value for name, value in options.items() if value is not None}
        parts = self._finder.split(self._render(messages, options))
        return [
            self.ids[part] if part in self.ids else replace_surrogates(swap(part, self._restore))
            for part in parts
        ]

    def ask(self, messages: list[Message], tools: list[Json]) -> str:
        """The text that the template makes of messages, or nothing if it fails: to find out what a
        model was trained to write."""
        return self._lay_out(messages, str, {"tools": tools})[0]

    def _render(self, messages: list[Message], options: Json) -> str:
        """The template's text, with stand-ins in the messages. UserError if the template has no
        place for them. options: what the template gets beside the messages."""
        for n, message in enumerate(messages, 1):
            check_message(n, message)
        written = json.dumps([messages, options], ensure_ascii=False)
        if len(written) > LONGEST:
            raise UserError(
                f"the conversation has {len(written):,} characters: it may have {LONGEST:,}"
            )
        turns, options = json.loads(replace_surrogates(written))
        text = self._with_last(turns, options)
        shown = swap(text, self._restore)
        others = []
        for turn in turns:
            calls = turn.get("tool_calls", []) if "tool_calls" in self.source else []
            if any(call["function"]["name"] not in shown for call in calls):
                turn = turn | {"tool_calls": []}
            if turn["role"] not in ("user", "assistant") and turn["content"].strip() not in shown:
                turn = turn | {"content": UNUSED}
            others.append(turn)
        if others != turns and self._lay_out(others, str, options)[0] == text:
            n = [turn == other for turn, other in zip(turns, others)].index(False)
            role = brief(repr(turns[n]["role"]))
            raise UserError(
                f"the chat template leaves message {n + 1} (role {role}), or its calls, out of the "
                "prompt: remove it, or change its role"
            )
        return text

    def _with_last(self, turns: list[Message], options: Json) -> str:
        """The text with the last user message in it; a warning if the template changes that."""
        of_users = [turn for turn in turns if turn["role"] == "user"]
        last = of_users[-1] if of_users else {"content": ""}
        last_text = last["content"].strip()
        others = [turn | {"content": UNUSED} if turn is last else turn for turn in turns]
        tried = []
        for form in (str, parts_of):
            text, problem = self._lay_out(turns, form, options)
            if last_text and not problem and text == self._lay_out(others, form, options)[0]:
                problem = "it leaves the last user message out"
            if not problem and last_text in swap(text, self._restore):
                return text
            tried.append((text, problem))
        text, problem = tried[0]
        if problem:
            raise UserError(
                "the chat template fails on this conversation: "
                f"{brief(problem.translate(self._restore))}; change the messages, or use --raw"
            )
        warnings.warn(f"{self.vocabulary.file}: the chat template changes the last user message")
        return text

    def _lay_out(
        self, turns: list[Message], form: Callable[[str], Any], options: Json
    ) -> tuple[str, str]:
        """The text that the template makes of these turns, and an empty string; or an empty text,
        and what is wrong. form: makes what the template gets as a content."""
        messages = [turn | {"content": form(turn["content"])} for turn in turns]
        for message in messages:
            if "reasoning_content" in message:
                thoughts = message.pop("reasoning_content")
                message |= {name: thoughts for name in THOUGHTS if name in self.source}
        values = {
            **self.vocabulary.named,
            "documents": None,
            "tools": None,
            **options,
            "messages": messages,
        }
        return render(self.source, values, self._letters)


def parts_of(content: str) -> list[Json]:
    """A content as a list of parts, which templates of models that see pictures want."""
    return [{"type": "text", "text": content}]


def check_message(n: int, message: Any) -> None:
    """UserError unless it is {"role": text, "content": text}, or has what some templates read, too.
    n: from 1."""
    fields = {"role", "content"}
    if isinstance(message, dict) and fields <= message.keys() <= fields | READ_BY_SOME:
        if isinstance(message["role"], str) and isinstance(message["content"], str):
            return
    raise UserError(
        f"message {n} is {brief(message)}; it must hold a role and a content, both text, and "
        "nothing else"
    )
