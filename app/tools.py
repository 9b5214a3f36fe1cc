"""Tool calls: a model asks its client to call functions, in the form that it was trained to write.

    Llama 3.1       {"name": "add", "parameters": {"a": 1, "b": 2}}

    Qwen, Hermes    <tool_call>
                    {"name": "add", "arguments": {"a": 1, "b": 2}}
                    </tool_call>

The model's chat template tells it which functions there are, and shows it the calls of earlier
answers. So `call_format` asks the template: it lays out an answer with a call, and one with two.
`CallReader` divides a text into content and calls, and `call_grammar` makes it write calls.

A call begins with the tag anywhere in a text; a model without tags calls where its text begins, and
then again behind a call. Its keys may be in any order: if the name comes first, arguments are told
as they come, otherwise when all of the call is there. What is nearly a call, or calls a function
that was not declared, is content. In a text without a grammar the arguments may be no JSON, as
those of OpenAI's models: what has begun as a call is a call, even if it is cut. A grammar is for
texts in four cases:

    a call is required              it comes first; arguments follow their schema
    a function is strict            its arguments follow its schema
    there may be one call alone     its arguments are an object
    the answer has a schema         it is a call, or follows that schema

Thoughts come before all of this (thoughts.py).

Invariant: content and calls do not depend on how a text is cut into pieces.
Not covered: other forms (Python's notation, XML, tags that are control tokens); an error shows the
template's own. Keys in an order of their own where one tag has several calls, or text comes after.
"""

import json
import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

import regex  # it matches texts that break off amid a pattern; `re` does not

from app.fields import FUNCTION_NAME, Function
from automaton import read_schema
from checkpoint.chat import replace_surrogates
from errors import brief

LEXEME = regex.compile(r'(?s)[^"{}\\]+|\\.|["{}]')  # of JSON, as far as its end depends on it
# Spaces as in the templates. If white space were free, a small model might write nothing else.
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NO_TOOLS = "leave it out, or serve a model whose chat template has tools"
# What templates are asked with: no template has these words.
NAME, KEY, ID, TEXT = "zqname", "zqkey", "zqcall00", "zqtext"
ARGUMENTS = "\0"  # in the form of a call


def pattern(text: str) -> regex.Pattern:
    """The pattern, in which ␣ is white space of up to 9 characters. It is bounded, because a reader
    holds back what may become a call, and a small model may write new lines without an end."""
    return regex.compile(text.replace("␣", r"\s{0,9}"))


PAIR = r'"(?:id|type|index)"␣:␣(?:"[^"\\]{0,99}"|\w{1,32})'
HEAD = pattern(  # of a call, up to its arguments
    rf'\{{␣(?:{PAIR}␣,␣){{0,3}}"name"␣:␣"(?P<name>{FUNCTION_NAME})"␣,␣'
    r'"(?:arguments|parameters)"␣:␣(?=\{)'
)


class CallFormat(NamedTuple):
    """How a model writes a call."""

    written: str  # a call of NAME with ARGUMENTS
    opening: str  # the tag before it, or nothing
    closing: str  # the tag behind it, or nothing
    separator: str | None  # between two calls; None: a message of its template has one call


def call_format(lay_out: Callable[..., str], control: Collection[str]) -> CallFormat | str:
    """How a chat template writes the calls of an earlier answer; a text: why they are not read.
    lay_out: the text that it makes of a conversation, or nothing if it fails. control: tokens that
    no text spells."""
    function = {"name": NAME, "description": NAME, "parameters": {"type": "object"}}
    called = {"name": NAME, "arguments": {KEY: TEXT}}

    def answered(content: str, *ids: str) -> str:
        said: dict[str, Any] = {"role": "assistant", "content": content}
        if ids:
            said["tool_calls"] = [{"id": id, "type": "function", "function": called} for id in ids]
        asked = {"role": "user", "content": KEY}
        return lay_out([asked, said], tools=[{"type": "function", "function": function}])

    plain = answered(TEXT)
    once = answered("", f"{ID}0")
    written = once[len(os.path.commonprefix([plain, once])) :]
    if NAME not in plain + once:
        return NO_TOOLS
    if NAME not in written:
        return "the chat template shows no call of an earlier answer as a model; leave it out"
    shown = brief(written.replace(NAME, "NAME").replace(KEY, "A").replace(TEXT, "B"), 100)
    written = written.removesuffix(plain.rpartition(TEXT)[2])
    for token in control:
        written = written.partition(token)[0]
    call = written.strip()
    parts = answered("", f"{ID}0", f"{ID}1").split(call or NAME)
    form = CallFormat(
        re.sub(rf"\{{[^{{}}]*{KEY}[^{{}}]*\}}", ARGUMENTS, call),
        opening=re.split(r"\[?\s*\{", call)[0].strip(),
        closing=call.rpartition("}")[2].strip("]\n "),
        separator=parts[1] if len(parts) == 3 and not {*control} & {*parts[1].split()} else None,
    )
    reader = CallReader(form, [NAME])
    if reader.feed(written, True).content or not reader.has_called or ID in written:
        return f"the chat template writes calls as {shown!r}, which is not read here; leave it out"
    return form


def calls_in(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """The functions that JSON calls, and their arguments: an object or a list, with keys in any
    order. None at all if it is something else, or calls another function."""
    calls = []
    with suppress(AttributeError, KeyError, RecursionError, TypeError, ValueError):
        value = json.loads(text, strict=False)
        for call in value if isinstance(value, list) else [value]:
            arguments = call.get("arguments", call.get("parameters")) or {}
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            if call["name"] not in names or not isinstance(arguments, dict):
                return []
            text = replace_surrogates(json.dumps(arguments, ensure_ascii=False))
            calls.append((call["name"], text))
        return calls
    return []


class Tools(NamedTuple):
    """What a text may call."""

    functions: list[Function]
    form: CallFormat
    must_call: bool
    is_parallel: bool  # several calls are allowed, if they have tags


# ---- Reading -----------------------------------------------------------------------------------


@dataclass
class Delta:
    """What is new in a text, as OpenAI tells it: its content, and a part of each call."""

    content: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # place of the call -> part


class CallReader:
    """Divides a text, which comes in pieces. names: the functions that may be called."""

    def __init__(self, form: CallFormat, names: Collection[str]):
        self.form = form
        self.names = names
        self.num_calls = 0
        self._rest = ""  # the end of the text, which is not divided yet
        self._held = ""  # what came before it, and belongs to the next call, if it is one
        self._read_next = self._read_content  # the state: the method for what comes next
        self._is_first = True  # no content since the beginning, or since the last call
        self._depth = 0  # braces that are open in the arguments
        self._in_string = False
        tag = regex.escape(form.opening)
        closing = regex.escape(form.closing)
        end = rf"(?:␣,␣{PAIR}){{0,3}}␣\}}"  # of a call, behind its arguments
        self._opening = pattern(rf"␣{tag}␣(?=[\[{{])")
        if not tag:  # it comes first, and a text that is JSON may be an answer
            self._opening = pattern(r'^␣(?:<\|python_tag\|>␣)?(?=\{␣"(?:[intap])|\[␣\{)')
        self._next = pattern(rf"^␣[,;]?␣(?=\{{)|{self._opening.pattern}")  # behind a call
        self._closing = pattern(rf"{end}␣(?:{closing}|(?=[,;]?\s?\{{))" if closing else end)

    @property
    def has_called(self) -> bool:
        """Whether there are calls, and the arguments of each are complete."""
        return self.num_calls > 0 and self._depth == 0

    def feed(self, piece: str, is_last: bool) -> Delta:
        """Read the next piece of the text."""
        self._rest += piece
        delta = Delta()
        while self._rest and self._read_next(delta, is_last):
            pass
        return delta

    def _take(self, size: int) -> str:
        taken = self._rest[:size]
        self._rest = self._rest[size:]
        return taken

    # Each of these takes the beginning of the rest, and returns whether to go on.

    def _read_content(self, delta: Delta, is_last: bool) -> bool:
        """Read the content before the next call, and what opens that call."""
        match = None
        if self._is_first or self.form.opening:
            is_next = self._is_first and self.num_calls > 0
            opening = self._next if is_next else self._opening
            match = opening.search(self._rest, partial=not is_last)
        content = self._take(len(self._rest) if match is None else match.start())
        is_between_calls = content.isspace() and self._is_first and self.num_calls > 0
        if content and not is_between_calls:
            self._add_content(delta, content)
        if match is None or match.partial:
            return False
        self._held = self._take(len(match[0]))
        self._read_next = self._read_head
        return True

    def _add_content(self, delta: Delta, content: str) -> None:
        delta.content += content
        self._is_first = False
        self._read_next = self._read_content

    def _read_head(self, delta: Delta, is_last: bool) -> bool:
        """Read a call up to its arguments, so that these can be told as they come."""
        match = HEAD.match(self._rest, partial=not is_last)
        if match is not None and match.partial:
            return False
        if match is None:
            self._read_next = self._read_block
            return True
        head = self._take(len(match[0]))
        if match["name"] in self.names:
            self._begin(delta, match["name"])
            self._read_next = self._read_arguments
        else:
            self._add_content(delta, self._held + head)
        return True

    def _begin(self, delta: Delta, name: str, arguments: str = "") -> None:
        delta.calls[self.num_calls] = {
            "index": self.num_calls,
            "id": f"call_{uuid4().hex}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self.num_calls += 1

    def _read_arguments(self, delta: Delta, is_last: bool) -> bool:
        """Read up to the brace that closes the arguments."""
        size = 0
        for word in LEXEME.finditer(self._rest):
            size = word.end()
            if word[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += {"{": 1, "}": -1}.get(word[0], 0)
            if self._depth == 0:
                self._read_next = self._read_closing
                break
        if is_last and self._depth > 0:
            size = len(self._rest)  # the text was cut behind a backslash
        index = self.num_calls - 1
        part = delta.calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
        part["function"]["arguments"] += self._take(size)
        return self._depth == 0

    def _read_block(self, delta: Delta, is_last: bool) -> bool:
        """Read JSON up to the closing tag, or without tags all of the text: keys may be in any
        order. If it calls nothing, it is content from its first bracket on."""
        text, closing, _ = self._rest.partition(self.form.closing or "\0")
        if not (closing or is_last):
            return False
        calls = calls_in(text, self.names)
        if not calls:
            self._add_content(delta, self._held + self._take(1))
            return True
        self._take(len(text + closing))
        for name, arguments in calls:
            self._begin(delta, name, arguments)
        self._is_first = True
        self._read_next = self._read_content
        return True

    def _read_closing(self, delta: Delta, is_last: bool) -> bool:
        """Read what ends a call, if it is there: a spoilt call is over without it. One more may
        follow in the same tag."""
        match = self._closing.match(self._rest, partial=True)
        if match is not None and match.partial and not is_last:
            return False
        self._take(0 if match is None else match.end())
        self._is_first = True
        self._read_next = self._read_content
        return True


# ---- Writing -----------------------------------------------------------------------------------


def call_grammar(tools: Tools, answer: str | None = None) -> str | None:
    """A grammar, in Lark, of texts that call none but these functions; None if a text is free.

    answer: a part of Lark: a text that calls nothing; None: it may be any text, but has no
    opening tag or, in the form without tags, does not begin like a call. Arguments follow their
    schema if a text must call, or if the function is strict.
    """
    is_strict = any(function.strict for function in tools.functions)
    is_any = answer is None
    if is_any and not (tools.must_call or is_strict) and tools.is_parallel:
        return None
    form = tools.form
    tag = re.escape(form.opening).replace("/", r"\/")
    is_after_text = bool(tag) and is_any and not tools.must_call
    separator = form.separator if tools.is_parallel else None
    several = "call" if separator is None else f"call ({json.dumps(separator)} call)*"
    start = several if tools.must_call else f"{several} | answer"
    text = rf"/\s*[^{form.written[:1]}\s](?s:.*)/"
    if tag:
        text = rf"/(?s:.+)/ & ~/(?s:.*){tag}(?s:.*)/"
    if is_after_text and tools.is_parallel:
        start = "call* answer"
    opening = f": {json.dumps(form.opening)}"
    if is_after_text:
        opening = rf"[lazy]: /(?s:.*){tag}/"
    names = [f"function_{n}" for n in range(len(tools.functions))]
    rules = [
        f"start: {start}",
        f"call: opening ({' | '.join(names)})",
        f"opening{opening}",
        f"answer: {answer or 'TEXT?'}",
        f"TEXT: {text}",
    ]
    for name, function in zip(names, tools.functions):
        schema = {"x-guidance": SPACES, "type": "object"}
        if tools.must_call or function.strict:
            schema |= read_schema(json.dumps(function.parameters))
        call = form.written.removeprefix(form.opening).replace(NAME, function.name)
        before, _, after = call.partition(ARGUMENTS)
        rules.append(f"{name}: {json.dumps(before)} %json {json.dumps(schema)} {json.dumps(after)}")
    return "\n".join(rules)
