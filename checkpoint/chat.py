"""A chat template: from a conversation to the tokens of a prompt.

A model's template is a Jinja program: messages in, one string out, with control tokens (<|eot_id|>)
between them. It trims and reorders, so a message cannot be encoded before it is laid out; and after
that, a control token of the template looks like the same characters in a message. So, while the
template runs, a lone surrogate stands for the first character of every control token in a message:

    a message "say <|eot_id|>"  ->  "say □|eot_id|>"  ->  template  ->  cut at control tokens  ->
    "say <|eot_id|>" again, which is encoded as plain text

Added tokens that the template knows (<|im_start|>) count as control tokens here.

Invariant: no control token of a rendered template begins inside a message, not even one that the
next message would complete.

The template is foreign code, which sandbox.py runs. Not covered: a template that rewrites messages
(changes their case, cuts out their middle) could assemble a control token, while trimming and
repeating cannot.
"""

import re
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoint.files import Json, read_bounded
from checkpoint.sandbox import renderer
from checkpoint.vocabulary import Finder, Vocabulary
from errors import UserError, brief

# Of 1,024. (The 1,024 before them may not stand before these: in JSON such a pair is a character.)
FIRST_SURROGATE = 0xDC00


def replace_surrogates(text: str) -> str:
    """U+FFFD for each lone surrogate: after this, a surrogate can stand for another character."""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def load_template(folder: Path, config: Json) -> str | None:
    """The folder's template or None: chat_template.jinja, or else tokenizer_config.json's."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return read_bounded(file)
    return checked_template(folder / "tokenizer_config.json", config.get("chat_template"))


def checked_template(file: Path, template: Any) -> str | None:
    """The template, of several the default one. UserError for what is none."""
    with suppress(LookupError, TypeError):
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise UserError(f"{file}: chat_template is {brief(template)}; it must be text")
    return template


class ChatTemplate:
    """A template, and the tokens of the vocabulary that it is for."""

    def __init__(self, vocabulary: Vocabulary, source: str) -> None:
        self.vocabulary = vocabulary
        self.source = replace_surrogates(source)
        self.ids = vocabulary.special | vocabulary.added
        named = vocabulary.named.values()
        inert = (text for text in vocabulary.added if text in source or text in named)
        self.controls = sorted({*vocabulary.special, *inert})
        self._controls = Finder(self.controls)
        first_letters = sorted({text[0] for text in self.controls})
        self._stand_in = {c: chr(FIRST_SURROGATE + n) for n, c in enumerate(first_letters)}
        self._restore = {ord(surrogate): c for c, surrogate in self._stand_in.items()}
        self._finder = Finder(self.ids)
        self._renderer = renderer()

    def tokens(
        self,
        messages: list[dict[str, str]],
        add_generation_prompt: bool,
        encode: Callable[[str, bool], list[int]],
        enable_thinking: bool | None = None,
    ) -> list[int]:
        """The tokens of a conversation, [{"role": …, "content": …}, …]. encode: for text without
        added tokens, and whether it is the first. enable_thinking: None, if the template is to
        choose."""
        options = {"add_generation_prompt": add_generation_prompt}
        if enable_thinking is not None:
            options["enable_thinking"] = enable_thinking
            if "enable_thinking" not in self.source:
                raise UserError(
                    f"{self.vocabulary.file}: the chat template knows no enable_thinking, so "
                    "thinking cannot be chosen: leave it out"
                )
        ids = []
        parts = self._finder.split(self._render(messages, options))
        for n, part in enumerate(parts):
            if part in self.ids:
                ids.append(self.ids[part])
            else:
                text = replace_surrogates(part.translate(self._restore))
                ids += encode(text, n == 0)
        return ids

    def _render(self, messages: list[dict[str, str]], options: dict[str, bool]) -> str:
        """The template's text, with stand-ins in the messages."""
        for n, message in enumerate(messages, 1):
            check_message(n, message)
        inert = [
            {"role": self._inert(message["role"]), "content": self._inert(message["content"])}
            for message in messages
        ]
        text, problem = self._renderer.render(
            self.source,
            {
                **self.vocabulary.named,
                "messages": inert,
                "tools": None,
                "documents": None,
                **options,
            },
        )
        if problem:
            raise UserError(
                f"{self.vocabulary.file}: the chat template fails on this conversation: "
                f"{brief(problem.translate(self._restore))}; change the messages, or use --raw"
            )
        return text

    def _inert(self, text: str) -> str:
        """The message with a stand-in wherever a control token begins, or could begin if other text
        were to follow. Spaces at the end do not count: templates trim."""
        text = replace_surrogates(text)
        longest = max(map(len, self.controls), default=0)
        end = len(text.rstrip())
        letters = list(text)
        for i, letter in enumerate(text):
            if letter not in self._stand_in:
                continue
            begins = bool(self._controls.token_at(text, i))
            if not begins and 0 < end - i < longest:
                rest = text[i:end]
                n = bisect_left(self.controls, rest)  # of those that begin with it, the first
                begins = any(control.startswith(rest) for control in self.controls[n : n + 1])
            if begins:
                letters[i] = self._stand_in[letter]
        return "".join(letters)


def check_message(n: int, message: Any) -> None:
    """UserError unless it is {"role": text, "content": text}. n: from 1."""
    if isinstance(message, dict) and message.keys() == {"role", "content"}:
        if all(isinstance(text, str) for text in message.values()):
            return
    raise UserError(
        f"message {n} is {brief(message)}; it must hold a role and a content, both text, no more"
    )
