"""Calls read from texts, however these are cut; and texts that a grammar makes call."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import grammar
from app.tools import BARE, TAGGED, CallFormat, CallReader, Function, call_grammar
from conftest import TIMES
from generate import Model
from settings import Grammar

ADD = '{"name": "add", "arguments": {"a": 1}}'
SAY = '{"name": "say", "parameters": {"text": "}\\"{\\\\", "to": {"x": [{}]}}}'
SAID = '{"text": "}\\"{\\\\", "to": {"x": [{}]}}'
OTHER = '{"name": "sub", "arguments": {}}'
TEXT = '{"name": "add", "arguments": "{}"}'
SPOILT = '{"name": "add", "arguments": {"a": one [}}}'
Calls = list[tuple[str, str]]  # names, arguments


def tag(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


READ: list[tuple[str, str, Calls]] = [  # a text, its content, its calls
    ("", "", []),
    ("Hi <there>. ", "Hi <there>. ", []),
    (tag(ADD), "", [("add", '{"a": 1}')]),
    (f"I add.\n\n{tag(ADD)}\n{tag(SAY)}\n", "I add.", [("add", '{"a": 1}'), ("say", SAID)]),
    (f"<think>{ADD}</think>\n{tag(SAY)}", f"<think>{ADD}</think>", [("say", SAID)]),
    (f"{tag(ADD)}\n\nDone. ", "\n\nDone. ", [("add", '{"a": 1}')]),
    (SAY, "", [("say", SAID)]),
    (f" <|python_tag|>{SAY}; {ADD}", "", [("say", SAID), ("add", '{"a": 1}')]),
    (f"{SAY}\n{SAY} Done {SAY}", f" Done {SAY}", [("say", SAID)] * 2),
    ('{"type": "function", ' + SAY[1:], "", [("say", SAID)]),
    (f"<tool_call>{ADD}</tool_call>{tag(ADD)}", "", [("add", '{"a": 1}')] * 2),
    (tag('{"name":"add","arguments":{}}'), "", [("add", "{}")]),
    # Nearly calls.
    (f"I say {SAY}", f"I say {SAY}", []),
    (OTHER, OTHER, []),
    (f"{tag(OTHER)} {tag(ADD)}", tag(OTHER), [("add", '{"a": 1}')]),
    (f"{ADD}\n{tag(ADD)}", ADD, [("add", '{"a": 1}')]),
    ('{"name": "add"}', '{"name": "add"}', []),
    ('{"arguments": {}, "name": "add"}', '{"arguments": {}, "name": "add"}', []),
    (tag(TEXT), tag(TEXT), []),
    (f"<tool_call>{tag(ADD)}", "<tool_call>", [("add", '{"a": 1}')]),
    # Cut, or spoilt.
    (tag(ADD)[:20], tag(ADD)[:20], []),
    (tag(ADD)[:47], "", [("add", '{"a": ')]),
    (tag(ADD)[:-14], "", [("add", '{"a": 1}')]),
    (tag(ADD)[:-3], "", [("add", '{"a": 1}')]),
    (tag(SPOILT), "}}\n</tool_call>", [("add", '{"a": one [}')]),
]


def divided(form: CallFormat, pieces: list[str]) -> tuple[str, Calls, bool]:
    """Content, calls, and whether these are complete. The deltas are checked, too."""
    reader = CallReader(form, {"add", "say"})
    content = ""
    calls: dict[int, dict] = {}
    for n, piece in enumerate(pieces, 1):
        delta = reader.feed(piece, n == len(pieces))
        content += delta.content
        for index, part in delta.calls.items():
            assert part["index"] == index
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


PARTS = [*READ[3][0].split(), tag(ADD), SAY, OTHER, "; ", "\n", " ", '{"name": ', "\\", "}", "Hi"]


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


# ---- Grammars


POINT = {  # as pydantic writes it
    "$defs": {"Number": {"type": "integer"}},
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/Number"}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTIONS = [Function("add", POINT), Function("say", {"type": "object"})]
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
    pytest.importorskip("llguidance", reason="requirements-extra.txt is not installed")
    model = Model.load("tiny", "cpu")
    lark = call_grammar(FUNCTIONS, form, must_call=kind in "Mm", is_parallel=kind in "MP")
    compiled = model.grammars.compile(Grammar("grammar", lark))
    taken = set()
    for row in TAKEN:
        matcher = compiled.deep_copy()
        tokens = model.tokenizer.encode(row[0], is_first=False)
        if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
            taken.add(row[0])
    assert taken == {row[0] for row in TAKEN if kind in row[column]}


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
            functions.append(Function(name, {"type": "object"} | rules))
        cases.append(((TAGGED, BARE)[n % 2], functions))

    def num_whole(drafts: list, cases: list) -> int:
        """Texts that ended by themselves."""
        larks = [call_grammar(functions, form, True, True) for form, functions in cases]
        results = generate_in_turns(model, drafts, [dict(grammar=lark) for lark in larks])
        for (form, functions), result in zip(cases, results, strict=True):
            schemas = {function.name: function.schema for function in functions}
            reader = CallReader(form, schemas)
            delta = reader.feed(result.text, True)
            functions = [call["function"] for call in delta.calls.values()]
            assert functions and result.finish_reason in ("stop", "length"), result.text
            if result.finish_reason == "stop":
                assert reader.has_called and not delta.content, result.text
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
