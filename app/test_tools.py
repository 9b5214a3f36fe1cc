"""Calls read from texts, however these are cut; and texts that a grammar makes call."""

import json
import re
from itertools import permutations
from time import process_time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("app.server", reason="the extra 'server' is not installed")
import grammar
from app.answers import AnswerReader, CallFormat
from app.conversation import read_conversation
from app.fields import ChatBody, Function
from app.openai import Offer, Reply
from app.requests import Line, read_requests
from app.server import http_error
from app.tools import Tools, call_format, call_grammar
from checkpoint.sandbox import render
from conftest import TIMES
from errors import UserError
from loading import Model
from request import Result
from serve import Update
from settings import Grammar, Options, Settings
from testing.http import (
    CHAT,
    events,
    needs_llguidance,
    post,
    read,
    refused,
    run,
)
from testing.tools import BARE, POINT, TAGGED, TEMPLATES, TOOLS, with_tools

ADD = '{"name": "add", "arguments": {"a": 1}}'
SAY = '{"name": "say", "parameters": {"text": "}\\"{\\\\", "to": {"x": [{}]}}}'
SAID = '{"text": "}\\"{\\\\", "to": {"x": [{}]}}'
OTHER = '{"name": "sub", "arguments": {}}'
TEXT = '{"name": "add", "arguments": "no"}'
SPOILT = '{"name": "add", "arguments": {"a": one [}}}'
QUOTED = '{"text": "a\\"</tool_call> <tool_call>{"}'
SWAPPED = '{"arguments": {"a": 1}, "name": "add"}'
Calls = list[tuple[str, str]]  # names, arguments


def tag(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


READ_ADD = [("add", '{"a": 1}')]
READ: list[tuple[str, str, Calls]] = [  # a text, its content, its calls
    ("", "", []),
    ("Hi <there>. ", "Hi <there>. ", []),
    (tag(ADD), "", [("add", '{"a": 1}')]),
    (f"I add.\n\n{tag(ADD)}\n{tag(SAY)}\n", "I add.", [("add", '{"a": 1}'), ("say", SAID)]),
    (f"<think>{ADD}</think>\n{tag(SAY)}", f"<think>{ADD}</think>", [("say", SAID)]),
    (f"{tag(ADD)}\n\nDone. ", "Done. ", [("add", '{"a": 1}')]),
    (SAY, "", [("say", SAID)]),
    (f" <|python_tag|>{SAY}\n", "", [("say", SAID)]),
    (f"{SAY}\n{SAY} Done", "Done", [("say", SAID)] * 2),
    (f"{SAY}; {SAY}; {OTHER}", f"; {OTHER}", [("say", SAID)] * 2),
    (tag(f"{SAY}\n{ADD}") + tag(ADD), "", [("say", SAID), *[("add", '{"a": 1}')] * 2]),
    ('{"type": "function", ' + SAY[1:], "", [("say", SAID)]),
    (f"<tool_call>{ADD}</tool_call>{tag(ADD)}", "", [("add", '{"a": 1}')] * 2),
    (tag('{"name":"add","arguments":{}}'), "", [("add", "{}")]),
    # Keys in another order, more of them, fewer of them; lists.
    (tag(SWAPPED) + "So", "So", READ_ADD),
    (tag('{"id": "x1", "name": "add", "arguments": {"a": 1}, "type": "function"}'), "", READ_ADD),
    (tag('{"name": "add", "arguments": "{\\"a\\": 1}"}'), "", READ_ADD),
    (tag('{"arguments": {"a": "\\ud800é"}, "name": "add"}'), "", [("add", '{"a": "\ufffdé"}')]),
    (tag('{"name": "add", "arguments": null}'), "", [("add", "{}")]),
    (tag('{"name": "add"}'), "", [("add", "{}")]),
    (tag(f"[{ADD}, {ADD}]") + tag(ADD), "", READ_ADD * 3),
    (tag(f'{{"arguments": {QUOTED}, "name": "say"}}') + "So", "So", [("say", QUOTED)]),
    (tag(ADD + "}") + "So", "So", READ_ADD),
    (SWAPPED, "", READ_ADD),
    (f"[{ADD}]", "", READ_ADD),
    (f"[{ADD}] So", "So", READ_ADD),
    # Nearly calls.
    (f"I say {SAY}", f"I say {SAY}", []),
    (OTHER, OTHER, []),
    (f"{tag(OTHER)} {tag(ADD)}", tag(OTHER), [("add", '{"a": 1}')]),
    (f"{ADD}\n{tag(ADD)}", ADD, [("add", '{"a": 1}')]),
    ('{"name": "sub"}', '{"name": "sub"}', []),
    ('{"arguments": {}, "name": "sub"}', '{"arguments": {}, "name": "sub"}', []),
    (tag(f"[{ADD}, {OTHER}]"), tag(f"[{ADD}, {OTHER}]"), []),
    (tag(SWAPPED[:-1]), tag(SWAPPED[:-1]), []),
    ('["a", "b"] or {"a": 1}', '["a", "b"] or {"a": 1}', []),
    (tag(TEXT), tag(TEXT), []),
    (f"<tool_call>{tag(ADD)}", "<tool_call>", [("add", '{"a": 1}')]),
    ("<tool_call>[{" + tag(ADD), "<tool_call>[{", READ_ADD),
    # Cut, or spoilt.
    (tag(ADD)[:20], tag(ADD)[:20], []),
    (tag(ADD)[:47], "", [("add", '{"a": ')]),
    (SAY[: SAY.index("\\") + 1], "", [("say", SAID[: SAID.index("\\") + 1])]),
    (tag(ADD)[:-14], "", [("add", '{"a": 1}')]),
    (tag(ADD)[:-3], "", [("add", '{"a": 1}')]),
    (tag(SPOILT), "", [("add", '{"a": one [}}')]),
    (tag(ADD[:-2]) + "So", "So", [("add", '{"a": 1\n')]),
]


def divided(form: CallFormat, pieces: list[str]) -> tuple[str, Calls, bool]:
    """Content, calls, and whether these are complete. The deltas are checked, too."""
    reader = AnswerReader(None, False, form, {"add", "say"})
    content = ""
    calls: dict[int, dict] = {}
    for n, piece in enumerate(pieces, 1):
        delta = reader.feed(piece, n == len(pieces))
        content += delta["content"]
        for part in delta.get("tool_calls", []):
            index = part["index"]
            if index in calls:
                assert part.keys() == {"index", "function"}
                assert part["function"].keys() == {"arguments"}
                calls[index]["function"]["arguments"] += part["function"]["arguments"]
            else:
                assert index == len(calls) and part["type"] == "function"
                calls[index] = part
    assert len({call["id"] for call in calls.values()}) == len(calls)
    functions = [call["function"] for call in calls.values()]
    told = [(function["name"], function["arguments"]) for function in functions]
    return content, told, reader.has_called


@pytest.mark.parametrize("text, content, calls", READ, ids=range(len(READ)))
def test_a_text_is_divided_into_content_and_calls(text, content, calls):
    """At once, letter by letter, and with an end that comes alone."""
    form = TAGGED if "<tool_call>" in text else BARE
    is_whole = bool(calls) and all(arguments.endswith("}") for _, arguments in calls)
    for pieces in ([text], [*text, ""], [*text] or [""]):
        assert divided(form, pieces) == (content, calls, is_whole)


PARTS = [
    SWAPPED,
    tag(SWAPPED),
    tag(f"[{ADD}]"),
    "<tool_call>[{",
    *READ[3][0].split(),
    tag(ADD),
    SAY,
    OTHER,
    "; ",
    "\n",
    " ",
    '{"name": ',
    "\\",
    '"',
    "}",
    "Hi",
]


@given(
    st.sampled_from([TAGGED, BARE]),
    st.lists(st.sampled_from(PARTS), max_size=12),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_it_does_not_matter_how_a_text_is_cut(form, parts, sizes):
    text = "".join(parts)
    whole = divided(form, [text])
    pieces = []
    while text:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[:size])
        text = text[size:]
    assert divided(form, [*pieces, ""]) == whole


@pytest.mark.parametrize("begun", ["", "<tool_call>"])
def test_white_space_without_an_end_is_not_held_back(begun):
    reader = AnswerReader(None, False, TAGGED, {"add"})
    shown = reader.feed(begun, False)["content"]
    for num_lines in (10, 1000):
        shown += reader.feed(num_lines * "\n", False)["content"]
    assert len(begun) + 1000 < len(shown) < len(begun) + 1011


@pytest.mark.parametrize(
    "text",
    [
        20_000 * "<tool_call>[",
        20_000 * "<tool_call>[" + "</tool_call>",
        tag(SWAPPED[:-1] + 5000 * ', "b": {}'),
        tag(ADD[:-2] + 20_000 * ', "b": {}'),
        20_000 * tag(OTHER),
        "<tool_call>[" + 99_999 * '"',
    ],
    ids=range(6),
)
def test_reading_takes_time_in_proportion_to_the_text(text):
    """All at once, and in two pieces."""
    start = process_time()
    whole = divided(TAGGED, [text])
    assert divided(TAGGED, [text[:99_999], text[99_999:]]) == whole
    assert process_time() - start < 3


# ---- Forms

# How a template lays out a call; what is read of it, or what the refusal shows.
FORMS = {
    '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>': ("<tool_call>", "\n"),
    '<call>[{"arguments": ARGS, "name": "NAME"}]</call>': ("<call>", "\n"),
    '{"type": "function", "name": "NAME", "parameters": ARGS}': ("", "\n"),
    '<|im_end|><tool_call>{"name": "NAME", "arguments": ARGS}': "writes calls as '<|im_end|><tool_",
    '<tool_call>{"id": "ID", "name": "NAME", "arguments": ARGS}': """as '<tool_call>{"id": "zq""",
    '<tool_call>{"function": {"name": "NAME", "arguments": ARGS}}': """as '<tool_call>{"func""",
    "<tool_call><function=NAME>{{ a.zqkey }}</function>": "as '<tool_call><function=NAME>B<",
    "[NAME(zqkey={{ a.zqkey | tojson }})]": "writes calls as ",
    "": "shows no call of an earlier answer",
}


@pytest.mark.parametrize("written", FORMS)
def test_the_form_of_calls_is_asked_of_the_template(written):
    call = written.replace("NAME", "{{ f.name }}").replace("ID", "{{ c.id }}")
    call = call.replace("ARGS", "{{ a | tojson }}")
    call = f"{{% set f = c.function %}}{{% set a = f.arguments %}}{call}\n"
    source = (
        "{{ tools[0].function.name }}"
        "{% for m in messages %}<|im_start|>{{ m.role }} "
        "{{ '<think></think>' if m.content }}{{ m.content }}"
        f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}<|im_end|>{{% endfor %}}"
    )

    def lay_out(messages, tools):
        return render(source, {"messages": messages, "tools": tools})[0]

    form = call_format(lay_out, ["<|im_start|>", "<|im_end|>"])
    expected = FORMS[written]
    if isinstance(expected, str):
        assert expected in form.problem
        return
    assert (form.opening, form.separator, form.problem) == (*expected, "")
    assert call_format(lambda *asked, **how: "", []).problem.startswith("leave it out")


CALLS = {  # how a template lays calls out; whether a message has one of them at most
    "{% for c in m.tool_calls %}CALL{% endfor %}": False,
    "<c>[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}CALL{% endfor %}]</c>": False,
    "{% set c = m.tool_calls[0] %}CALL": True,
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('') }}{% endif %}"
    "{% set c = m.tool_calls[0] %}CALL": True,
}


@pytest.mark.parametrize("calls, one_call", CALLS.items())
def test_a_template_says_whether_a_message_may_have_several_calls(calls, one_call):
    call = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    calls = calls.replace("CALL", call)
    source = "{{ tools }}{% for m in messages %}{{ m.content }}{% if m.tool_calls %}"
    source += f"{calls}{{% endif %}}\n{{% endfor %}}"

    def lay_out(messages, tools):
        return render(source, {"messages": messages, "tools": tools})[0]

    assert call_format(lay_out, []).one_call == one_call


# ---- Grammars


ANY = Function(name="say", parameters={})
FUNCTIONS = [Function(name="add", parameters=POINT, strict=True), ANY]
BARE_ADD = ADD.replace("arguments", "parameters")
TAGGED_SAY = SAY.replace("parameters", "arguments")
# A text; then, of models with tags and without, the kinds of grammars that take it: a text must
# call (M, or m: once), or it may (P, or p: once).
TAKEN = [
    (tag(ADD), "MmPp", "Pp"),
    (tag(TAGGED_SAY), "MmPp", "Pp"),
    (f"{tag(ADD)}\n{tag(TAGGED_SAY)}", "MP", "Pp"),
    (f"Hi <{tag(ADD)} and {tag(ADD)}.", "P", "Pp"),
    (f"Hi {tag(ADD)}", "Pp", "Pp"),
    (BARE_ADD, "Pp", "MmPp"),
    (SAY, "Pp", "MmPp"),
    (f"{SAY}; {SAY}", "Pp", ""),
    (" Hi {", "Pp", "Pp"),
    ("", "Pp", "Pp"),
    # Nearly.
    (tag(BARE_ADD), "", "Pp"),
    (tag(ADD.replace("1", '"1"')), "", "Pp"),
    (tag(ADD.replace(" 1", "1")), "", "Pp"),
    (tag(OTHER), "", "Pp"),
    (tag(ADD)[:-1], "", "Pp"),
    ("<tool_call>", "", "Pp"),
    (ADD, "Pp", ""),
    (BARE_ADD.replace("add", "sub"), "Pp", ""),
    (BARE_ADD[:-1], "Pp", ""),
    ("Hi <tool_call", "Pp", "Pp"),
]


@pytest.mark.parametrize("form, column", [(TAGGED, 1), (BARE, 2)], ids=["tagged", "bare"])
@pytest.mark.parametrize("kind", "MmPp")
def test_a_grammar_takes_what_it_should(form, column, kind):
    pytest.importorskip("llguidance", reason="the extra 'server' is not installed")
    model = Model.load("tiny", "cpu")
    how = dict(form=form, must_call=kind in "Mm", is_parallel=kind in "MP")
    lark = call_grammar(Tools(FUNCTIONS, **how))
    compiled = model.grammars.compile(Grammar("grammar", lark))
    taken = set()
    for row in TAKEN:
        matcher = compiled.deep_copy()
        tokens = model.tokenizer.encode(row[0], is_first=False)
        if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
            taken.add(row[0])
    assert taken == {row[0] for row in TAKEN if kind in row[column]}
    loose = [Function(name="add", parameters=POINT)]
    lark = call_grammar(Tools(loose, **how))
    assert (lark is None) == (kind == "P")  # else a text may call twice, or nothing


def test_calls_of_random_functions_parse_and_validate(monkeypatch):
    """Each text must call one of two functions, or both, again and again; with every draft. And
    texts without masks are found out."""
    from test_schemas import (
        BATCH,
        CHECKED,
        Draft202012Validator,
        every_draft,
        generate_in_turns,
        random_schemas,
    )

    model = Model.load("tiny", "cpu")
    cases = []  # forms, and the schemas of two functions
    inner = iter(random_schemas(2 * BATCH * TIMES))
    for n, (one, other) in enumerate(zip(inner, inner)):
        functions = []
        for name, schema in (("one", one), ("other", other)):
            rules = dict(properties={"x": schema}, required=["x"], additionalProperties=False)
            functions.append(Function(name=name, parameters=rules))
        cases.append(((TAGGED, BARE)[n % 2], functions))

    def num_whole(drafts: list, cases: list) -> int:
        """Texts that ended by themselves."""
        larks = [
            call_grammar(Tools(each, form, must_call=True, is_parallel=True))
            for form, each in cases
        ]
        results = generate_in_turns(model, drafts, [dict(grammar=lark) for lark in larks])
        for (form, functions), result in zip(cases, results, strict=True):
            schemas = {function.name: function.parameters for function in functions}
            reader = AnswerReader(None, False, form, schemas)
            delta = reader.feed(result.text, True)
            functions = [call["function"] for call in delta.get("tool_calls", [])]
            assert functions and result.finish_reason in ("stop", "length"), result.text
            if result.finish_reason == "stop":
                assert reader.has_called and not delta["content"], result.text
            if not reader.has_called:
                functions.pop()  # it is cut
            for function in functions:
                validator = Draft202012Validator(schemas[function["name"]], format_checker=CHECKED)
                validator.validate(json.loads(function["arguments"]))
        return sum(result.finish_reason == "stop" for result in results)

    assert num_whole(every_draft(model)[::-1], cases) > len(cases) / 2
    monkeypatch.setattr(grammar, "forbid", lambda logits, rows, masks: logits)
    with pytest.raises(AssertionError):
        num_whole([None], cases[:BATCH])


# ---- The server


@pytest.fixture(params=[True, False], ids=["tagged", "bare"], scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = with_tools(tmp_path_factory.mktemp("models") / "tiny", request.param)
    return Model.load(folder, "cpu", torch.float64)


def test_a_reasoning_effort_of_none_is_for_the_template_that_is_used(tmp_path):
    """That of tools may not know enable_thinking, which the other one knows."""
    folder = with_tools(tmp_path / "tiny", is_tagged=True)
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_template.jinja").rename(folder / "additional_chat_templates" / "tool_use.jinja")
    (folder / "chat_template.jinja").write_text(TEMPLATES[True] + "{{ enable_thinking }}")
    offer = Offer(Model.load(folder, "cpu"), "tiny", 500, settings=Settings())

    def prompt(**fields) -> str:
        return offer.model.tokenizer.decode(read(True, offer, **fields).streams[0].request.tokens)

    assert prompt(reasoning_effort="none") == prompt(reasoning_effort="auto") + "False"
    assert prompt(reasoning_effort="none", tools=TOOLS) == prompt(tools=TOOLS)


def joined(chunks: list[dict]) -> dict:
    """The choice that a stream's chunks add up to."""
    message: dict = {"content": "", "tool_calls": []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["role"] = delta.get("role") or message["role"]
        for part in delta.get("tool_calls", []):
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(part)
            else:
                called = message["tool_calls"][part["index"]]["function"]
                called["arguments"] += part["function"]["arguments"]
    return choice | {"message": message}


def said(choice: dict) -> tuple:
    """A choice without ids, which are drawn."""
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message["role"], message["content"] or "", calls, choice["finish_reason"]


@needs_llguidance
@pytest.mark.slow
def test_calls_in_a_loop(model):
    """Required, of a name, and free; streamed, with a draft, the same ones as at once, without."""
    add = {"type": "function", "function": {"name": "add"}}
    told = []

    async def scenario(app):
        has_draft = app.batch.engine.runner.drafter is not None
        messages = [dict(role="user", content="Tom saw a dog.")]
        for choice, max_tokens in (("required", 70), (add, 70), ("auto", 9), ("none", 9)):
            body = dict(messages=messages, tools=TOOLS, tool_choice=choice, temperature=0)
            body |= dict(max_tokens=max_tokens, parallel_tool_calls=choice != "required")
            if has_draft:
                answer = joined(await events(app, CHAT, **body))
            else:
                (answer,) = (await post(app, CHAT, **body))["choices"]
            message = answer["message"]
            messages = [*messages, message]
            for call in message.get("tool_calls", []):
                messages.append(dict(role="tool", tool_call_id=call["id"], content="yes"))
            told.append(said(answer))

    run(scenario, model=model, limit=900)
    run(scenario, model=model, limit=900, draft="tiny-eagle")
    assert told[:4] == told[4:]
    for _, content, (call,), reason in told[:2]:
        assert not content and reason == "tool_calls"
        assert json.loads(call["arguments"]).keys() == {{"say": "word", "add": "a"}[call["name"]]}
    assert call["name"] == "add"
    for _, content, calls, reason in told[2:4]:
        assert content and not calls and reason == "length"


def test_an_answer_is_divided_into_content_and_calls(model):
    """At once and streamed; and why it ended."""
    offer = Offer(model, "tiny", 900, settings=Settings())
    call = tag(ADD) if offer.call_format.opening else BARE_ADD
    add_alone = {"type": "function", "function": {"name": "add"}}
    assert not read(True, offer, tools=TOOLS, tool_choice=add_alone).form.tools.is_parallel
    for text, reason, tells in (
        (call, "stop", "tool_calls"),
        (call, "length", "length"),
        (call[: call.index("1")], "stop", "stop"),  # by a stop string
        ("Hi", "stop", "stop"),
    ):
        asked = read(True, offer, tools=TOOLS)
        result = Result("", [], 0, text=text, finish_reason=reason)
        update = Update(0, [(text, "")], result=result)
        (whole,) = Reply(asked, offer).completion([update])["choices"]
        assert whole["finish_reason"] == tells
        asked.body.stream = True
        reply = Reply(asked, offer)
        pieces = [Update(0, [(letter, "plain")]) for letter in text]
        chunks = [reply.chunk(update) for update in [*pieces, Update(0, result=result)]]
        assert said(joined(chunks)) == said(whole)
        assert ("tool_calls" in whole["message"]) == ("add" in text)
        parts = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks]
        for call in whole["message"].get("tool_calls", []):
            assert call.keys() == {"id", "type", "function"}
            assert whole["message"]["content"] is None
            assert sum(map(bool, parts)) > 3  # the arguments come in pieces
            assert chunks[-2]["choices"][0]["delta"].keys() <= {"tool_calls"}


def test_past_calls_are_laid_out_as_objects(model):
    """Beside a content that is null; and what a tool told."""
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    messages = [
        dict(role="user", content="Hi"),
        dict(role="assistant", content=None, tool_calls=[call | {"index": 0}]),
        dict(role="tool", tool_call_id="x", content=[dict(type="text", text="2")]),
        dict(role="assistant", content="So.", tool_calls=[]),
    ]
    offer = Offer(model, "tiny", 900, settings=Settings())
    (stream,) = read(True, offer, messages=messages).streams
    laid_out = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    if not offer.call_format.opening:
        laid_out = BARE_ADD
    lines = ["user: Hi", "assistant: ", laid_out, "tool: 2", "assistant: So."]
    text = model.tokenizer.decode(stream.request.tokens)
    assert [line for line in text.split("\n") if line] == "\n".join(lines).split("\n")
    call["function"]["arguments"] = ""  # from a stream without pieces
    (stream,) = read(True, offer, messages=messages).streams
    assert 's": {}' in model.tokenizer.decode(stream.request.tokens)


def called(*names: str) -> dict:
    """An answer that calls these functions, with their names as ids, too."""
    each = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": each}


def result(id: str, **fields) -> dict:
    return {"role": "tool", "tool_call_id": id, "content": f"of {id}"} | fields


@pytest.mark.parametrize("one_call", [True, False])
def test_results_are_bound_to_calls_by_their_ids(one_call):
    """In every order, in every round; ids may come again, and may lack."""

    def told(*messages: dict) -> list[str]:
        """Of each message: its calls; or of a result the name of its function, and its text."""
        body = ChatBody(messages=[*messages])
        lines = []
        for turn in read_conversation(body.messages, one_call):
            names = [call["function"]["name"] for call in turn.get("tool_calls", [])]
            is_result = turn["role"] == "tool"
            lines.append(turn["name"] + " " + turn["content"] if is_result else " ".join(names))
        return lines

    for ids in permutations("abc"):
        lines = told(called(*"abc"), *map(result, ids), called("b"), result("b"))
        results = ["a of a", "b of b", "c of c"]
        first = ["a", results[0], "b", results[1], "c", results[2]] if one_call else ["a b c"]
        assert lines == first + results[len(first) // 2 :] + ["b", "b of b"]
    late = [called(*"ab"), result("b"), {"role": "user", "content": "?"}, result("a")]
    assert told(*late)[-2:] == ["", "a of a"]
    doubled = called(*"xy")
    doubled["tool_calls"][1]["id"] = "x"
    assert told(doubled, result("x"), result("x"))[1 :: 1 + one_call] == ["x of x", "y of x"]
    lacking = called("x", "y")
    for call in lacking["tool_calls"]:
        del call["id"]
    assert told(lacking, result("1"), result("2"))[1 :: 1 + one_call] == ["x of 1", "y of 2"]
    assert told(called("x"), result("", name="z"))[1:] == ["z of "]
    assert told(called(*"xy"), result(""), result(""))[1 :: 1 + one_call] == ["x of ", "y of "]
    with pytest.raises(UserError, match="no call before"):  # those without ids are over
        told(lacking, result("1"), called("x"), result("b"))
    for ids in ("ab", "b"):
        with pytest.raises(UserError, match=r"^messages\[\d\].tool_call_id is 'b': no call before"):
            told(called("a"), *map(result, ids))


def test_calls_in_a_line_of_a_file_are_read_as_by_a_server(model):
    offer = Offer(model, "tiny", 900, settings=Settings())
    messages = [{"role": "user", "content": "Hi"}, called(*"ab") | {"content": None}]

    def read_line(*results: dict) -> Line:
        lines = [json.dumps({"messages": [*messages, *results]})]
        how = (Settings(max_tokens=1), Options(), None, None, lambda request: None)
        return next(read_requests(lines, model, *how))

    results = [result("b"), result("a")]
    (stream,) = read(True, offer, messages=[*messages, *results]).streams
    assert read_line(*results).request.tokens == stream.request.tokens
    assert "is 'c': no call before it" in str(read_line(result("c")).error)


def test_functions_reach_the_template_as_they_were_sent():
    sent = {"name": "f", "description": "", "parameters": {"properties": {}, "type": "object"}}
    strict = {"type": "function", "function": sent | {"strict": True}}
    bare = {"function": {"name": "g"}, "type": "function"}
    first, second = (tool.as_sent() for tool in ChatBody(tools=[strict, bare]).tools)
    assert json.dumps(first) == json.dumps({"type": "function", "function": sent})
    assert second["function"].keys() == {"name", "parameters"}


def function(**fields) -> dict:
    return {"tools": [{"type": "function", "function": {"name": "f"} | fields}]}


def past(arguments: object) -> dict:
    called = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [dict(role="assistant", tool_calls=[called])]}


WRONG = [
    (dict(tools={}), "tools is {}: it must be a valid list"),
    (dict(tools=[{}]), "tools[0].type is missing"),
    (dict(tools=[{"type": "custom"}]), "tools[0].type is 'custom': it must be"),
    (dict(tools=[{"type": "function"}]), "tools[0].function is missing"),
    (function(name="a b"), "tools[0].function.name is 'a b': "),
    (function(returns={}), "tools[0].function.returns is not supported"),
    (function(strict="yes"), "tools[0].function.strict is 'yes': it must"),
    (
        function(parameters={"type": "array"}),
        "tools[0].function.parameters is {'type': 'array'}: it must",
    ),
    (
        dict(tool_choice="must"),
        "tool_choice.type is 'must': it must be 'none', 'auto', ",
    ),
    (dict(tool_choice="required"), "tool_choice is not supported: leave it out, or give"),
    (dict(tool_choice={"type": "allowed_tools"}), "tool_choice.type is 'allowed_tools'"),
    (function() | dict(tool_choice=TOOLS[0]), "tool_choice.function.parameters is not supported"),
    (
        function() | dict(tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice is not supported: leave it out, or give",
    ),
    (function() | dict(parallel_tool_calls=1), "parallel_tool_calls is 1"),
    (past([1]), "messages[0].tool_calls[0].function.arguments is [1]: it must"),
    (
        dict(messages=[dict(role="assistant", tool_calls=[1])]),
        "messages[0].tool_calls[0] is 1: it must",
    ),
    (
        dict(messages=[dict(role="user", content="a", tool_calls=[{}])]),
        "messages[0].tool_calls[0].function is missing",
    ),
    (dict(messages=[dict(role="tool")]), "messages[0].content is missing"),
]


def test_what_is_wrong_with_tools_is_refused_by_name(model):
    offer = Offer(model, "tiny", 900, settings=Settings())
    for body, says in WRONG:
        with pytest.raises(UserError, match=f"^{re.escape(says)}") as error:
            read(True, offer, **body)
        told = http_error(error.value)
        assert told.status == 400 and told.param, body


def test_a_model_without_tools_refuses_them_by_name(instruct):
    """Its template would leave them out."""
    for model in (Model.load(instruct, "cpu"), Model.load("tiny", "cpu")):
        offer = Offer(model, "tiny", 90, settings=Settings())
        for body, says in ((function(), "tools is not supported: leave it out, or serve a model"),):
            with pytest.raises(UserError, match=f"^{re.escape(says)}"):
                read(True, offer, **body)
        assert read(True, offer, **function(), tool_choice="none").form.tools is None
        assert read(True, offer, tools=[], parallel_tool_calls=False).form.tools is None


@needs_llguidance
def test_a_schema_that_is_not_followed_here_is_refused_if_it_must_be(model):
    odd = function(parameters={"not": {}}) | dict(messages=[dict(role="user", content="a")])

    async def scenario(app):
        status, error = await refused(app, CHAT, odd | dict(tool_choice="required"))
        assert (status, error["param"]) == (400, "tools")
        assert re.match('tools cannot be met: .*"not"[^|]*$', error["message"])
        assert (await post(app, CHAT, **odd, max_tokens=2))["choices"]
        for depth in range(970, 990, 2):  # of which Python reads some, and cannot write them
            deep = json.dumps(odd).replace("{}", '{"a":' * depth + "1" + "}" * depth)
            status, error = await refused(app, CHAT, deep.encode())
            assert status == 400, error

    run(scenario, model=model, limit=900)
