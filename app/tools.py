"""Tool calls: a model asks its client to call functions, in the form that it was trained to write.

    Llama 3.1       {"name": "add", "parameters": {"a": 1, "b": 2}}

    Qwen, Hermes    <tool_call>
                    {"name": "add", "arguments": {"a": 1, "b": 2}}
                    </tool_call>

The model's chat template tells it which functions there are. `CallReader` divides its text into
content and calls, and `call_grammar` makes it write calls.

A call begins with `<tool_call>` anywhere in a text; a model without tags writes one call, where its
text begins. The name comes before the arguments. What is nearly a call, or calls a function that
was not declared, is content. In a text without a grammar the arguments may be no JSON, as those of
OpenAI's models: what has begun as a call is a call, even if it is cut. A text has a grammar if

    a call is required              it comes first, without reasoning; arguments follow their schema
    a function is strict            its arguments follow its schema
    there may be one call alone     its arguments are an object

Invariant: content and calls do not depend on how a text is cut into pieces.
Not covered: other forms ([TOOL_CALLS], Python's notation, arguments before the name).
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
from errors import brief

# Parts of a call. ␣ is white space (see `pattern`).
PAIR = r'"(?:id|type|index)"␣:␣(?:"[^"\\]{0,99}"|\w{1,32})'
LEXEME = regex.compile(r'(?s)[^"{}\\]+|\\.|["{}]')  # of JSON, as far as its end depends on it
DECODER = json.JSONDecoder(strict=False)
# Spaces as in the templates. If white space were free, a small model might write nothing else.
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NO_TOOLS = "leave it out, or serve a model whose chat template has tools"
MOST_SPACE = regex.compile(r"\s{100}")  # in a call that is held back

# A conversation to ask templates with: texts that none of them has.
NAME, KEY, VALUE, ID, TEXT = "zqname", "zqkey", "zqvalue", "zqcall00", "zqtext"
PARAMETERS = {"type": "object", "properties": {KEY: {"type": "string", "description": KEY}}}
DECLARED = {"name": NAME, "description": NAME, "parameters": PARAMETERS}
CALLED = {"name": NAME, "arguments": {KEY: VALUE}}


def pattern(text: str) -> regex.Pattern:
    """The pattern, in which ␣ is white space of up to 9 characters. It is bounded, because a reader
    holds back what may become a call, and a small model may write new lines without an end."""
    return regex.compile(text.replace("␣", r"\s{0,9}"))


HEAD = pattern(  # of a call, up to its arguments
    rf'\{{␣(?:{PAIR}␣,␣){{0,3}}"name"␣:␣"(?P<name>{FUNCTION_NAME})"␣,␣'
    r'"(?:arguments|parameters)"␣:␣(?=\{)'
)
END = pattern(rf"(?:␣,␣{PAIR}){{0,3}}␣\}}")  # of a call, behind its arguments


class CallFormat(NamedTuple):
    """How a model writes a call: text around the name of the function and its arguments."""

    before: str
    between: str
    after: str
    is_name_first: bool
    opening: str  # the tag in `before`, or nothing
    closing: str  # the tag in `after`, or nothing
    separator: str | None  # between two calls; None: a message of its template has one call

    def call(self, name: str, arguments: str, before: str) -> str:
        """A rule in Lark. arguments: in Lark."""
        if self.is_name_first:
            texts = before + name + self.between, self.after
        else:
            texts = before, self.between + name + self.after
        return f"{json.dumps(texts[0])} {arguments} {json.dumps(texts[1])}"


def call_format(lay_out: Callable[..., str], control: Collection[str]) -> CallFormat | str:
    """How a chat template writes the calls of an earlier answer; a text: why they are not read.
    lay_out: the text that it makes of a conversation, or nothing if it fails. control: tokens that
    no text spells."""

    def answered(content: str, num_calls: int = 0) -> str:
        calls = [
            {"id": f"{ID}{n}", "type": "function", "function": CALLED} for n in range(num_calls)
        ]
        said = {"role": "assistant", "content": content}
        said |= {"tool_calls": calls} if calls else {}
        tools = [{"type": "function", "function": DECLARED}]
        return lay_out([{"role": "user", "content": "zqasked"}, said], tools=tools)

    plain = answered(TEXT)
    once = answered("", 1)
    head = os.path.commonprefix([plain, once])
    written = once[len(head) :]
    if NAME not in plain + once:
        return NO_TOOLS
    shown = brief(written.replace(NAME, "NAME").replace(KEY, "A").replace(VALUE, "B"), 100)
    unread = f"the chat template writes calls as {shown!r}, which is not read here; leave it out"
    if NAME not in written:
        return "the chat template shows no call of an earlier answer as a model; leave it out"
    foot = os.path.commonprefix([plain[::-1], written[::-1]])
    written = written[: len(written) - len(foot)]
    for token in control:
        written = written.partition(token)[0]
    span = find_call(written)
    if span is None or ID in written:
        return unread
    call = written.strip()
    start = call.rindex("{", 0, call.index(KEY))
    _, end = DECODER.raw_decode(call, start)
    arguments = call[start:end]
    is_name_first = call.index(NAME) < start
    marks = (NAME, arguments) if is_name_first else (arguments, NAME)
    before, _, rest = call.partition(marks[0])
    between, _, after = rest.partition(marks[1])
    parts = answered("", 2).split(call)
    separator = parts[1] if len(parts) == 3 else None
    if separator is not None and any(token in separator for token in control):
        separator = None
    tags = written[: span[0]].strip(), written[span[1] :].strip()
    return CallFormat(before, between, after, is_name_first, *tags, separator)


def find_call(text: str) -> tuple[int, int] | None:
    """Where the JSON of the marked call begins and ends; None: it is written in another way."""
    for match in re.finditer(r"[\[{]", text):
        with suppress(ValueError):
            _, end = DECODER.raw_decode(text, match.start())
            if calls_in(text[match.start() : end], {NAME}) == [(NAME, json.dumps({KEY: VALUE}))]:
                return match.start(), end
    return None


def calls_in(text: str, names: Collection[str]) -> list[tuple[str, str]] | None:
    """The functions that JSON calls, and their arguments: objects, or lists of them, with keys in
    any order. None: it is something else, or calls another function."""
    found = []
    place = 0
    try:
        while place < len(text.rstrip()):
            place = regex.compile(r"[\s,;]*").match(text, place).end()
            value, place = DECODER.raw_decode(text, place)
            found += value if isinstance(value, list) else [value]
        return [as_call(value, names) for value in found]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None


def as_call(value: dict[str, Any], names: Collection[str]) -> tuple[str, str]:
    """The name and the arguments of a call. AttributeError, KeyError, TypeError or ValueError if it
    is none."""
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if value["name"] not in names or not isinstance(arguments, dict | None):
        raise ValueError("no call of a declared function")
    return value["name"], json.dumps(arguments or {}, ensure_ascii=False)


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
        opening = pattern(rf"␣{regex.escape(form.opening)}␣(?=[\[{{])")
        bare = pattern(r"^␣(?:<\|python_tag\|>␣)?(?=[\[{])")
        self._opening = opening if form.opening else bare
        then = rf"|{opening.pattern}" if form.opening else ""
        self._next = pattern(r"^␣[,;]?␣(?=\{)" + then)  # behind a call
        self._closing = pattern(rf"␣{regex.escape(form.closing)}" if form.closing else "")
        # A call that is not written as `HEAD` has it; a text that is JSON may be an answer, though.
        self._block = pattern(r"[\[{]" if form.opening else r'\[␣\{␣"name"|\{␣"(?:arg|param)')

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
                self._read_next = self._read_end
                break
        if is_last and self._depth > 0:
            size = len(self._rest)  # the text was cut behind a backslash
        index = self.num_calls - 1
        part = delta.calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
        part["function"]["arguments"] += self._take(size)
        return self._depth == 0

    def _read_block(self, delta: Delta, is_last: bool) -> bool:
        """Read the JSON of calls as a whole: their keys may be in any order. What is none is
        content from its first bracket on."""
        match = self._block.match(self._rest, partial=not is_last)
        if match is not None and match.partial:
            return False
        size, is_whole = self._block_size()
        calls = None
        if match is not None and not MOST_SPACE.search(self._rest, 0, size):
            if not (is_whole or is_last):
                return False
            calls = calls_in(self._rest[:size], self.names)
        if calls is None:
            self._add_content(delta, self._held + self._take(1))
            return True
        self._take(size)
        for name, arguments in calls:
            self._begin(delta, name, arguments)
        self._read_next = self._read_closing
        return True

    def _block_size(self) -> tuple[int, bool]:
        """Of the JSON before a closing tag or, without tags, of the first value; and whether it has
        come."""
        size = len(self._rest)
        if self.form.closing:
            end = self._rest.find(self.form.closing)
            return (size, False) if end < 0 else (end, True)
        try:
            return DECODER.raw_decode(self._rest)[1], True
        except (RecursionError, ValueError):
            return size, False

    def _read_end(self, delta: Delta, is_last: bool) -> bool:
        """Read what follows the arguments in their call. A spoilt call is over without it."""
        return self._skip(END, self._read_closing, is_last)

    def _read_closing(self, delta: Delta, is_last: bool) -> bool:
        """Read the tag that ends a call, if it is there: one more may follow in the same tag."""
        self._is_first = True
        return self._skip(self._closing, self._read_content, is_last)

    def _skip(self, what: regex.Pattern, then: Callable[..., bool], is_last: bool) -> bool:
        """Read over what may come next, and what comes after that."""
        match = what.match(self._rest, partial=True)
        if match is not None and match.partial and not is_last:
            return False
        self._take(0 if match is None else match.end())
        self._read_next = then
        return True


# ---- Writing -----------------------------------------------------------------------------------


def call_grammar(tools: Tools, answer: str | None = None) -> str | None:
    """A grammar, in Lark, of texts that call none but these functions; None if a text is free.

    answer: a grammar, in Lark, of a text that calls nothing; None: it may be any text, but has no
    opening tag or, in the form without tags, does not begin like a call. Arguments follow their
    schema if a text must call, or if the function is strict.
    """
    is_strict = any(function.strict for function in tools.functions)
    is_any = answer is None
    if is_any and not (tools.must_call or is_strict) and tools.is_parallel:
        return None
    form = tools.form
    tag = re.escape(form.opening).replace("/", r"\/")
    several = "call"
    if tools.is_parallel and form.separator is not None:
        several = f"call ({json.dumps(form.separator)} call)*"
    start = several if tools.must_call else f"{several} | answer?"
    before = form.before
    rules = []
    if form.opening and is_any and not tools.must_call:  # a call comes after any text
        before = before.removeprefix(form.opening)
        rules.append(rf"opening[lazy]: /(?s:.*){tag}/")
        start = "call* answer?" if tools.is_parallel else start
    text = rf"/\s*[^{form.before[:1]}\s](?s:.*)/"
    if form.opening:
        text = rf"/(?s:.+)/ & ~/(?s:.*){tag}(?s:.*)/"
    names = [f"function_{n}" for n in range(len(tools.functions))]
    rules += [
        f"start: {start}",
        f"call: {'opening ' if rules else ''}({' | '.join(names)})",
        "answer: TEXT" if is_any else f"answer: %lark {{\n{answer}\n}}",
        f"TEXT: {text}",
    ]
    for name, function in zip(names, tools.functions):
        schema = {"x-guidance": SPACES, "type": "object"}
        if tools.must_call or function.strict:
            schema |= function.parameters
        rules.append(f"{name}: {form.call(function.name, f'%json {json.dumps(schema)}', before)}")
    return "\n".join(rules)
