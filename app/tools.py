"""Tools: a model asks its client to call functions, in the form that it was trained to write.

    Llama 3.1       {"name": "add", "parameters": {"a": 1, "b": 2}}

    Qwen, Hermes    <tool_call>
                    {"name": "add", "arguments": {"a": 1, "b": 2}}
                    </tool_call>

The model's chat template tells it which functions there are, and shows it the calls of earlier
answers. So `call_format` asks the template: it lays out an answer with a call, and one with two.
answers.py reads calls, and `call_grammar` makes a model write them, in four cases:

    a call is required              it comes first; arguments follow their schema
    a function is strict            its arguments follow its schema
    there may be one call alone     its arguments are an object
    the answer has a schema         it is a call, or follows that schema

Otherwise an answer is free. Thoughts come before all of this (`after_thoughts`).

Not covered: other forms (Python's notation, XML, tags that are control tokens); an error shows the
template's own.
"""

import json
import os
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from app.answers import AnswerReader, CallFormat, Thoughts
from app.fields import Function
from automaton import read_schema
from errors import brief

# Spaces as in the templates. If white space were free, a small model might write nothing else.
SPACE = r"\s{0,9}"
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NO_TOOLS = "leave it out, or serve a model whose chat template has tools"
# What templates are asked with: no template has these words.
NAME, KEY, ID, TEXT = "zqname", "zqkey", "zqcall00", "zqtext"
ARGUMENTS = "\0"  # in the form of a call


def call_format(lay_out: Callable[..., str], control: Collection[str]) -> CallFormat:
    """How a chat template writes the calls of an earlier answer. lay_out: the text that it makes of
    a conversation, or nothing if it fails. control: tokens that no text spells."""
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
    common = os.path.commonprefix([plain, once])
    written = once.removeprefix(re.sub(r"[<\[][^]<>\s]*\Z", "", common))  # a tag begins with both
    if NAME not in plain + once:
        return CallFormat(problem=NO_TOOLS)
    if NAME not in written:
        return CallFormat(
            problem="the chat template shows no call of an earlier answer; leave it out"
        )
    shown = brief(written.replace(NAME, "NAME").replace(KEY, "A").replace(TEXT, "B"), 100)
    written = written.removesuffix(plain.rpartition(TEXT)[2])
    for token in control:
        written = written.partition(token)[0]
    call = written.strip()
    twice = answered("", f"{ID}0", f"{ID}1")
    parts = twice.split(call or NAME)
    separator = None
    if len(parts) == 3 and not {*control} & {*parts[1].split()}:
        separator = parts[1]
    form = CallFormat(
        re.sub(rf"\{{[^{{}}]*{KEY}[^{{}}]*\}}", ARGUMENTS, call),
        opening=re.split(r"\[?\s*\{", call)[0].strip(),
        closing=call.rpartition("}")[2].strip("]\n "),
        separator=separator,
        one_call=twice.count(NAME) <= once.count(NAME),  # the template fails, or leaves one out
    )
    reader = AnswerReader(None, False, form, [NAME])
    if reader.feed(written, True)["content"] or not reader.has_called or ID in written:
        problem = f"the chat template writes calls as {shown!r}, which is not read here"
        return form._replace(problem=f"{problem}; leave it out")
    return form


class Tools(NamedTuple):
    """What a text may call."""

    functions: list[Function]
    form: CallFormat
    must_call: bool
    is_parallel: bool  # several calls are allowed, if they have tags


class AnswerForm(NamedTuple):
    """What an answer consists of."""

    tags: Thoughts | None  # None: it has no thoughts
    before: str  # the end of the prompt, which may have begun the thoughts, or ended them
    tools: Tools | None  # None: it has no calls

    @property
    def is_inside(self) -> bool:
        """Whether an answer begins amid its thoughts."""
        return self.tags is not None and self.before.endswith(self.tags.opening)

    def reader(self) -> AnswerReader:
        """Makes messages of an answer, as it comes."""
        if self.tools is None:
            return AnswerReader(self.tags, self.is_inside)
        names = [function.name for function in self.tools.functions]
        return AnswerReader(self.tags, self.is_inside, self.tools.form, names)

    def grammar(self, answer: str | None) -> str | None:
        """A grammar, in Lark; None: an answer is free. answer: in Lark, of what calls nothing;
        None: that may be any text."""
        lark = answer
        if self.tools is not None:
            lark = call_grammar(self.tools, answer)
        if lark is None or self.tags is None or self.before.endswith(self.tags.closing):
            return lark
        return after_thoughts(self.tags, self.is_inside, lark)


def nested(lark: str) -> str:
    """A grammar in Lark, as a part of another one."""
    return f"%lark {{\n{lark}\n}}"


def call_grammar(tools: Tools, answer: str | None = None) -> str | None:
    """A grammar, in Lark, of texts that call none but these functions; None if a text is free.

    answer: a grammar, in Lark, of what calls nothing; None: that may be any text, but has no
    opening tag or, in the form without tags, does not begin like a call. Arguments follow their
    schema if a text must call, or if the function is strict.
    """
    is_strict = any(function.strict for function in tools.functions)
    is_any = answer is None
    if is_any and not (tools.must_call or is_strict) and tools.is_parallel:
        return None
    form = tools.form
    separator = form.separator if tools.is_parallel else None
    several = "call" if separator is None else f"call ({json.dumps(separator)} call)*"
    start = f"{several} | answer"
    opening = f": {json.dumps(form.opening)}"
    text = rf"/\s*[^{form.written[:1]}\s](?s:.*)/"
    if tools.must_call:
        start = several
    elif is_any and form.opening:  # text may come before each call
        tag = re.escape(form.opening).replace("/", r"\/")
        start = "call* answer" if tools.is_parallel else "call | answer"
        opening = rf"[lazy]: /(?s:.*){tag}/"
        text = rf"/(?s:.+)/ & ~/(?s:.*){tag}(?s:.*)/"
    names = [f"function_{n}" for n in range(len(tools.functions))]
    rules = [
        f"start: {start}",
        f"call: opening ({' | '.join(names)})",
        f"opening{opening}",
        f"answer: {'TEXT?' if is_any else nested(answer)}",
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


def after_thoughts(tags: Thoughts, is_inside: bool, answer: str) -> str:
    """A grammar, in Lark, of thoughts and then of an answer with a grammar in Lark. Where the
    prompt does not begin the thoughts, there need not be any."""
    opening, closing = (re.escape(tag).replace("/", r"\/") for tag in tags)
    thoughts = "thoughts SPACE" if is_inside else "(OPENING thoughts SPACE)?"
    return rf"""start: {thoughts} answer
OPENING: /{SPACE}{opening}/
thoughts[lazy]: /(?s:.*){closing}/
SPACE: /{SPACE}/
answer: {nested(answer)}"""
