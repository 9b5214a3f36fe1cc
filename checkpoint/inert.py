"""A text in which no control token begins, though a chat template reads it as it was written.

A control token of a rendered template is the same characters as in a message that mentions it. So,
while the template runs, a lone surrogate stands in a message for every letter that begins a control
token (chat.py):

    "say <|eot_id|>"  ->  "say □|eot_id|>"

But a template may look for such a token: `content.split('</think>')` takes the reasoning out of an
earlier answer. An `Inert` text is asked with the same stand-ins: `split('□/think>')`. What it gives
is inert again. Other methods (upper) and filters (tojson) take it for a plain text.

Not covered: questions about a text that a template has put together from messages and from control
tokens of its own. Where their answers change the prompt, sandbox.py refuses it.
"""

from collections.abc import Callable
from typing import Any

# Of 1,024. (The 1,024 before them may not stand before these: in JSON such a pair is a character.)
FIRST_STAND_IN = 0xDC00

StandIns = dict[int, str]  # code of a letter -> its stand-in, as str.translate takes them


def stand_ins(letters: str) -> StandIns:
    return {ord(letter): chr(FIRST_STAND_IN + n) for n, letter in enumerate(letters)}


def inert(value: Any, marks: StandIns) -> Any:
    """The value, with every text in it `Inert`."""
    if isinstance(value, str):
        return Inert(value.translate(marks), marks)
    if isinstance(value, list):
        return [inert(each, marks) for each in value]
    if isinstance(value, dict):
        return {inert(name, marks): inert(each, marks) for name, each in value.items()}
    return value


def asked(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a text, asked about texts with its stand-ins."""

    def ask(text: "Inert", *about: Any, **named: Any) -> Any:
        marks = text._marks
        return text._like(method(text, *inert([*about], marks), **inert(named, marks)))

    return ask


class Inert(str):
    """A text with stand-ins. (jinja2's sandbox keeps templates from names that begin with _.)"""

    def __new__(cls, text: str, marks: StandIns) -> "Inert":
        self = super().__new__(cls, text)
        self._marks = marks
        return self

    def _like(self, answer: Any) -> Any:
        """An answer, with every text in it `Inert`: its stand-ins are in it already."""
        if isinstance(answer, str):
            return Inert(answer, self._marks)
        if isinstance(answer, list):
            return [self._like(part) for part in answer]
        return answer

    __contains__ = asked(str.__contains__)
    __eq__ = asked(str.__eq__)
    __ne__ = asked(str.__ne__)
    __getitem__ = asked(str.__getitem__)
    startswith = asked(str.startswith)
    endswith = asked(str.endswith)
    find = asked(str.find)
    rfind = asked(str.rfind)
    split = asked(str.split)
    rsplit = asked(str.rsplit)
    strip = asked(str.strip)
    lstrip = asked(str.lstrip)
    rstrip = asked(str.rstrip)

    def __hash__(self) -> int:
        """That of the text as it was written: names of fields may be inert, and are looked up."""
        letters = {ord(mark): letter for letter, mark in self._marks.items()}
        return hash(self.translate(letters))

    def __str__(self) -> "Inert":
        return self

    def __add__(self, other: str) -> "Inert":
        return self._like("".join([self, other]))

    def __radd__(self, other: str) -> "Inert":
        return self._like("".join([other, self]))

    def replace(self, old: str, new: str, count: int = -1) -> "Inert":
        return self._like(super().replace(old.translate(self._marks), new, count))
