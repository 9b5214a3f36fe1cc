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
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

import regex  # it matches texts that break off amid a pattern; `re` does not

from app.fields import FUNCTION_NAME, Function

# The head of a call, up to its arguments. ␣ is white space (see `pattern`).
HEAD = (
    r'\{␣(?:"type"␣:␣"function"␣,␣)?'
    rf'"name"␣:␣"(?P<name>{FUNCTION_NAME})"␣,␣"(?:arguments|parameters)"␣:␣(?=\{{)'
)
LEXEME = regex.compile(r'(?s)[^"{}\\]+|\\.|["{}]')  # of JSON, as far as its end depends on it
# Spaces as in the templates. If white space were free, a small model might write nothing else.
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class CallFormat(NamedTuple):
    """How a model writes a call."""

    opening: regex.Pattern  # the tag, if there is one, and the head
    closing: regex.Pattern  # what follows the arguments
    arguments: str  # the name of the arguments
    is_tagged: bool
    call: str  # a rule in Lark: a call
    text: str  # a terminal in Lark: a text that calls nothing


def pattern(text: str) -> regex.Pattern:
    """The pattern, in which ␣ is white space of up to 9 characters. It is bounded, because a reader
    holds back what may become a call, and a small model may write new lines without an end."""
    return regex.compile(text.replace("␣", r"\s{0,9}"))


TAGGED = CallFormat(
    pattern(f"␣<tool_call>␣{HEAD}"),
    pattern(r"␣\}␣</tool_call>"),
    arguments="arguments",
    is_tagged=True,
    call='opening "\\n" function "\\n</tool_call>"',
    text="/(?s:.+)/ & ~/(?s:.*)<tool_call>(?s:.*)/",
)
BARE = CallFormat(
    pattern(rf"^␣(?:<\|python_tag\|>␣)?{HEAD}"),
    pattern(r"␣\}"),
    arguments="parameters",
    is_tagged=False,
    call="function",
    text=r"/\s*[^{\s](?s:.*)/",
)


def call_format(template: str) -> CallFormat | None:
    """How a model with this chat template writes calls; None: in none of these forms."""
    if "<tool_call>" in template:
        return TAGGED
    if regex.search(r'"parameters\\?": ', template):
        return BARE
    return None


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
        self._read_next = self._read_content  # the state: the method for what comes next
        self._is_first = True  # no content since the beginning, or since the last call
        self._depth = 0  # braces that are open in the arguments
        self._in_string = False

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
        """Read the content before the next call, and the head of that call."""
        match = None
        if self._is_first or self.form.is_tagged:
            match = self.form.opening.search(self._rest, partial=not is_last)
        content = self._take(len(self._rest) if match is None else match.start())
        is_between_calls = content.isspace() and self._is_first and self.num_calls > 0
        if content and not is_between_calls:
            self._add_content(delta, content)
        if match is None or match.partial:
            return False
        head = self._take(len(match[0]))
        is_one_too_many = self.num_calls > 0 and not self.form.is_tagged
        if match["name"] not in self.names or is_one_too_many:
            self._add_content(delta, head)
            return True
        delta.calls[self.num_calls] = {
            "index": self.num_calls,
            "id": f"call_{uuid4().hex}",
            "type": "function",
            "function": {"name": match["name"], "arguments": ""},
        }
        self.num_calls += 1
        self._read_next = self._read_arguments
        return True

    def _add_content(self, delta: Delta, content: str) -> None:
        delta.content += content
        self._is_first = False

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

    def _read_closing(self, delta: Delta, is_last: bool) -> bool:
        """Read what ends a call, if it is there: a spoilt call is over without it."""
        match = self.form.closing.match(self._rest, partial=True)
        if match is not None and match.partial and not is_last:
            return False
        self._take(0 if match is None else match.end())
        self._is_first = True
        self._read_next = self._read_content
        return True


# ---- Writing -----------------------------------------------------------------------------------


def call_grammar(tools: Tools) -> str | None:
    """A grammar, in Lark, of texts that call none but these functions; None if a text is free.

    Arguments follow their schema if a text must call, or if the function is strict. Where a text
    need not call, its content has no `<tool_call>` or, in the form without tags, no { at its start.
    """
    is_strict = any(function.strict for function in tools.functions)
    if not (tools.must_call or is_strict) and tools.is_parallel:
        return None
    form = tools.form
    has_several = tools.is_parallel and form.is_tagged
    if tools.must_call:
        start = 'call ("\\n" call)*' if has_several else "call"
        opening = ': "<tool_call>"'
    else:
        start = "call* TEXT?" if has_several else "call | TEXT?"
        opening = "[lazy]: /(?s:.*)<tool_call>/"  # after any text
    names = [f"function_{n}" for n in range(len(tools.functions))]
    rules = [
        f"start: {start}",
        f"call: {form.call}",
        f"opening{opening}",
        f"TEXT: {form.text}",
        f"function: {' | '.join(names)}",
    ]
    for name, function in zip(names, tools.functions):
        head = json.dumps(f'{{"name": "{function.name}", "{form.arguments}": ')
        schema = {"x-guidance": SPACES, "type": "object"}
        if tools.must_call or function.strict:
            schema |= function.parameters
        rules.append(f'{name}: {head} %json {json.dumps(schema)} "}}"')
    return "\n".join(rules)
