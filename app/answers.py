"""An answer, read as it comes: the thoughts before it, its content, and the calls in it.

    <think>                                         thoughts
    17 and 25 …
    </think>
    I will add them.                                content
    <tool_call>                                     a call of the function add …
    {"name": "add", "arguments": {"a": 17,          … whose arguments are told as they come
     "b": 25}}
    </tool_call>

Thoughts come first, or not at all; where the prompt ends with their tag, an answer begins amid
them. A call that is only drafted in thoughts is none. A call begins with its tag anywhere in the
content; a model without such tags calls where its content begins, and then again behind a call. The
keys of a call may be in any order: if the name comes first, arguments are told as they come,
otherwise when all of the call is there. A tag ends it, but not within a string. What has begun as a
call is a call, even if it is cut, and its arguments may be no JSON, as those of OpenAI's models.
What is nearly a call, or calls a function that was not declared, is content. White space around
tags and behind calls is dropped.

`AnswerReader` is a generator, written as if all of the text were there: where a pattern might still
match more of it, it waits (`yield`) for the next piece.

Cost: linear in the text, whatever is in it.
Invariant: what is told does not depend on how a text is cut into pieces.
Not covered: thoughts or calls between control tokens, which no text spells (Magistral, gpt-oss).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import regex  # it matches texts that break off amid a pattern; `re` does not

from app.fields import FUNCTION_NAME
from checkpoint.chat import replace_surrogates


class Thoughts(NamedTuple):
    """What thoughts stand between."""

    opening: str
    closing: str

    @classmethod
    def of(cls, template: str) -> Thoughts | None:
        """The tags that a chat template names: <think>, [THINK], <thought>, <seed:think>, …; of
        several the shortest, which is not <reasoning_effort>. Where a model does not write them,
        they have no effect."""
        found = regex.findall(r"(?i)[<\[]/[\w:]*(?:think|thought|reason)\w*[>\]]", template)
        closing = min(found, key=len, default=None)
        return closing and cls(closing.replace("/", ""), closing)


class CallFormat(NamedTuple):
    """How a model writes a call."""

    written: str = ""  # a call of tools.NAME with tools.ARGUMENTS
    opening: str = ""  # the tag before it, or nothing
    closing: str = ""  # the tag behind it, or nothing
    separator: str | None = None  # between two calls; None: none stand side by side (in no list)
    one_call: bool = False  # a message of its template has one call at most
    problem: str = ""  # why calls are not read


def pattern(text: str) -> regex.Pattern:
    """The pattern, in which ␣ is white space of up to 9 characters. It is bounded, because a reader
    holds back what may become a tag, and a small model may write new lines without an end."""
    return regex.compile(text.replace("␣", r"\s{0,9}"))


Steps = Generator[None, None, Any]  # a part of reading, and what it finds
VISIBLE = pattern(r"(?=\S)")
NEVER = "(?!)"
PAIR = r'"(?:id|type|index)"␣:␣(?:"[^"\\]{0,99}"|\w{1,32})'
HEAD = pattern(  # of a call, up to its arguments
    rf'\{{␣(?:{PAIR}␣,␣){{0,3}}"name"␣:␣"(?P<name>{FUNCTION_NAME})"␣,␣'
    r'"(?:arguments|parameters)"␣:␣\{'
)
FOOT = pattern(rf"(?:␣,␣{PAIR}){{0,3}}␣\}}")  # of a call, behind its arguments
BRACE = pattern(r"␣\}")
MARK_IN_STRING = pattern(r'(?s)\\.|"')
# A text without tags that is JSON may be an answer, so only what may be a call is held back.
BARE = r'(?:<\|python_tag\|>␣)?(?=\{␣"(?:[intap])|\[␣\{)'


class AnswerReader:
    """Reads an answer, which comes in pieces.

    is_inside: it begins amid its thoughts; form: how it writes calls; None: it cannot call;
    functions: those that it may call.
    """

    def __init__(
        self,
        tags: Thoughts | None,
        is_inside: bool,
        form: CallFormat | None = None,
        functions: Collection[str] = (),
    ):
        self.functions = functions
        self.num_calls = 0
        self.has_called = False  # there are calls, and the arguments of each are complete
        self._text = ""  # the end of what has come
        self._at = 0  # it has been read up to here
        self._is_last = False
        self._steps = self._read(tags, is_inside, form)

    def feed(self, piece: str, is_last: bool) -> dict[str, Any]:
        """Read the next piece: what is new of the message, in OpenAI's form."""
        self._text = self._text[self._at :] + piece
        self._at = 0
        self._is_last = is_last
        self._told: dict[str | int, list[str]] = defaultdict(list)  # n: arguments of call n
        self._begun: dict[int, dict[str, Any]] = {}  # calls that begin in this piece
        next(self._steps, None)
        message: dict[str, Any] = {"content": ""}
        for name, parts in self._told.items():
            text = "".join(parts)
            if isinstance(name, str):
                message[name] = text
                continue
            call = self._begun.get(name, {"index": name, "function": {}})
            call["function"]["arguments"] = text
            message.setdefault("tool_calls", []).append(call)
        return message

    def _tell(self, name: str | int, text: str) -> None:
        self._told[name].append(text)

    # ---- Steps

    def _until(self, pattern: regex.Pattern, tell: Callable[[str], None]) -> Steps:
        """Tell the text before the next match as it comes -> the match, or None at the end."""
        while True:
            match = pattern.search(self._text, self._at, partial=not self._is_last)
            end = len(self._text) if match is None else match.start()
            if end > self._at:
                tell(self._text[self._at : end])
            self._at = end
            if match is not None and not match.partial:
                self._at = match.end()
                return match
            if self._is_last:
                return None
            yield

    def _match(self, pattern: regex.Pattern, may_be_cut: bool = False) -> Steps:
        """The match right here, or None. may_be_cut: the answer may end amid it."""
        while True:
            match = pattern.match(self._text, self._at, partial=may_be_cut or not self._is_last)
            if match is None:
                return None
            if self._is_last or not match.partial:
                self._at = match.end()
                return match
            yield

    def _skip_space(self) -> Steps:
        yield from self._until(VISIBLE, lambda space: None)

    # ---- The parts of an answer

    def _read(self, tags: Thoughts | None, is_inside: bool, form: CallFormat | None) -> Steps:
        if tags is not None:
            opening, closing = (pattern("␣" + regex.escape(tag)) for tag in tags)
            has_begun = yield from self._match(opening)
            if has_begun or is_inside:
                yield from self._skip_space()
                yield from self._until(closing, partial(self._tell, "reasoning_content"))
                yield from self._skip_space()
        if form is not None:
            yield from self._read_calls(form)
        yield from self._until(pattern(NEVER), partial(self._tell, "content"))

    def _read_calls(self, form: CallFormat) -> Steps:
        """Read calls, and the content before and between them."""
        tag = regex.escape(form.opening)
        end = regex.escape(form.closing) or NEVER
        opening = rf"{tag}␣(?=[\[{{])" if tag else BARE
        first = pattern(f"␣{opening}")
        another = pattern(rf"[,;]?␣(?=\{{)|{opening}")  # behind a call, with the same tag or not
        closing = pattern(end)
        mark = pattern(rf'["{{}}\[\]]|(?={end}|{opening if tag else NEVER})')
        begun = yield from self._match(first)
        while begun or tag:
            if not begun:
                begun = yield from self._until(first, partial(self._tell, "content"))
            if not begun:
                return
            is_call = yield from self._read_call(begun[0], mark, closing)
            begun = None
            if is_call:
                yield from self._skip_space()
                begun = yield from self._match(another)

    def _read_call(self, begun: str, mark: regex.Pattern, closing: regex.Pattern) -> Steps:
        """Read a call, or a list of calls -> whether it is one; otherwise it is content. begun:
        what opens it."""
        head = yield from self._match(HEAD)
        if head is None:
            parts: list[str] = []
            yield from self._read_value(mark, 0, parts.append)
            read = "".join(parts)
            calls = calls_in(read, self.functions)
        else:
            read = head[0]
            calls = [(head["name"], "{")] if head["name"] in self.functions else []
        if not calls:
            self._tell("content", begun + read)
            return False
        for function, arguments in calls:
            self._begin(function, arguments)
        self.has_called = True
        if head is not None:
            tell = partial(self._tell, self.num_calls - 1)
            self.has_called = yield from self._read_value(mark, 1, tell)
            yield from self._match(FOOT, may_be_cut=True)
        while (yield from self._match(BRACE)):  # one too many
            pass
        yield from self._skip_space()
        yield from self._match(closing, may_be_cut=True)
        return True

    def _begin(self, function: str, arguments: str) -> None:
        self._begun[self.num_calls] = {
            "index": self.num_calls,
            "id": f"call_{uuid4().hex}",
            "type": "function",
            "function": {"name": function},
        }
        self._tell(self.num_calls, arguments)
        self.num_calls += 1

    def _read_value(self, mark: regex.Pattern, depth: int, tell: Callable[[str], None]) -> Steps:
        """Read JSON up to its end -> whether it has one. depth: its brackets that are open. A tag
        ends it, too, but not within a string."""
        is_quoted = False
        while True:
            match = yield from self._until(MARK_IN_STRING if is_quoted else mark, tell)
            if match is None or not match[0]:
                return False
            tell(match[0])
            if match[0] == '"':
                is_quoted = not is_quoted
            elif not is_quoted:
                depth += 1 if match[0] in "{[" else -1
            if depth == 0:
                return True


def calls_in(text: str, functions: Collection[str]) -> list[tuple[str, str]]:
    """The functions that JSON calls, and their arguments: an object or a list, with keys in any
    order. None at all if it is something else, or calls another function."""
    calls = []
    with suppress(AttributeError, KeyError, RecursionError, TypeError, ValueError):
        value = json.loads(text, strict=False)
        for call in value if isinstance(value, list) else [value]:
            arguments = call.get("arguments", call.get("parameters")) or {}
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            if call["name"] not in functions or not isinstance(arguments, dict):
                return []
            text = replace_surrogates(json.dumps(arguments, ensure_ascii=False))
            calls.append((call["name"], text))
        return calls
    return []
