"""A text in which no control token begins, though a chat template reads it as it was written.

A control token of a rendered template is the same characters as in a message that mentions it. So,
while the template runs, a lone surrogate stands in a message for every letter that begins a control
token (chat.py):

    "say <|eot_id|>"  ->  "say □|eot_id|>"

But a template may look for such a token: `content.split('</think>')` takes the reasoning out of an
earlier answer. An `Inert` text puts the same stand-ins into the arguments of such a method,
`split('□/think>')`, and the results are inert again. Other methods (upper) and filters (tojson)
take it for a plain text.

Not covered: questions about a text that a template has put together from messages and from control
tokens of its own. Where their answers change the prompt, sandbox.py refuses it.
"""

from collections.abc import Callable
from typing import Any

# The first of 1,024 low surrogates. (High surrogates are no stand-ins: in JSON a high one before a
# low one makes one character with it.)
FIRST_STAND_IN = 0xDC00

StandIns = dict[int, str]  # code of a letter -> its stand-in, as str.translate takes them


def stand_ins(letters: str) -> StandIns:
    """A stand-in for each of these letters."""
    return {ord(letter): chr(FIRST_STAND_IN + n) for n, letter in enumerate(letters)}


def swap(text: str, letters: StandIns) -> str:
    """What str.translate returns: for a few letters and a long text in less time."""
    for code, other in letters.items():
        text = text.replace(chr(code), other)
    return text


def inert(value: Any, marks: StandIns) -> Any:
    """The value, with every text in it `Inert` that has a letter with a stand-in: of others, no
    answer would differ."""
    if isinstance(value, Inert):
        return value
    if isinstance(value, str):
        text = swap(value, marks)
        return value if text == value else Inert(text, marks)
    if isinstance(value, list):
        return [inert(each, marks) for each in value]
    if isinstance(value, dict):
        return {inert(name, marks): inert(each, marks) for name, each in value.items()}
    return value


def with_stand_ins(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of str for `Inert`: its arguments get the text's stand-ins, its result is inert."""

    def call(text: "Inert", *args: Any, **kwargs: Any) -> Any:
        args = inert([*args], text._marks)
        kwargs = inert(kwargs, text._marks)
        return text._like(method(text, *args, **kwargs))

    return call


class Inert(str):
    """A text with stand-ins. (jinja2's sandbox keeps templates from names that begin with _.)"""

    def __new__(cls, text: str, marks: StandIns) -> "Inert":
        self = super().__new__(cls, text)
        self._marks = marks
        return self

    def _like(self, result: Any) -> Any:
        """The result of a method, with every text in it `Inert`: it has its stand-ins already."""
        if isinstance(result, str):
            return Inert(result, self._marks)
        if isinstance(result, list):
            return [self._like(part) for part in result]
        return result

    __contains__ = with_stand_ins(str.__contains__)
    __eq__ = with_stand_ins(str.__eq__)
    __ne__ = with_stand_ins(str.__ne__)
    __getitem__ = with_stand_ins(str.__getitem__)
    startswith = with_stand_ins(str.startswith)
    endswith = with_stand_ins(str.endswith)
    find = with_stand_ins(str.find)
    rfind = with_stand_ins(str.rfind)
    split = with_stand_ins(str.split)
    rsplit = with_stand_ins(str.rsplit)
    strip = with_stand_ins(str.strip)
    lstrip = with_stand_ins(str.lstrip)
    rstrip = with_stand_ins(str.rstrip)

    def __hash__(self) -> int:
        """The hash of the text as it was written: a template looks up names of fields, which may be
        inert."""
        letters = {ord(mark): letter for letter, mark in self._marks.items()}
        return hash(self.translate(letters))

    def __str__(self) -> "Inert":
        return self

    def __add__(self, other: str) -> "Inert":
        return self._like("".join([self, other]))

    def __radd__(self, other: str) -> "Inert":
        return self._like("".join([other, self]))  # `other + self` would call this again

    def replace(self, old: str, new: str, count: int = -1) -> "Inert":
        return self._like(super().replace(old.translate(self._marks), new, count))
