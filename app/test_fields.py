"""The fields of OpenAI's, vLLM's, llama.cpp's and SillyTavern's requests: each is honoured, refused
by name, or harmless; alone, and at random beside others.

test_fields.txt tells what each is, and this is seen in what is read of a body, or in its answer.
TEST_TIMES (conftest.py) makes more bodies.
"""

import json
import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("app.server", reason="the extra 'server' is not installed")
from app import fields
from app.openai import Offer
from conftest import TIMES
from errors import UserError
from generate import generate
from loading import Model
from request import Settings
from settings import PENALTIES, SETTINGS
from testing.http import CHAT, COMPLETE, PROMPT, ask, read, run
from testing.programs import told as table

HAS_GRAMMARS = bool(find_spec("llguidance"))
# The names that clients send, and then, of each name (in one path, or in both), its
# kind, a value that asks for something, and those that do not.
LISTS: dict[str, str] = {}
for part in Path(__file__).with_suffix(".txt").read_text().split("# ")[1:]:
    title, _, names = part.partition("\n")
    LISTS[title] = names


class Kind(NamedTuple):
    kind: str
    asks: Any
    neutral: list[Any]


@cache
def kinds(is_chat: bool) -> dict[str, Kind]:
    """Of the names that clients send there."""
    path = "chat" if is_chat else "completions"
    known = {}
    for line in LISTS["kinds"].strip().split("\n"):
        name, kind, *values = line.split(" ")
        asks, *neutral = map(json.loads, values)
        if name.partition("@")[2] in ("", path):
            null = [] if name in ("messages", "prompt") else [None]
            known[name.partition("@")[0]] = Kind(kind, asks, null + neutral)
    sent = [names.split() for title, names in LISTS.items() if title.startswith(path)]
    return {name: known[name] for name in sorted({*chain(*sent)})}


@cache
def quick() -> Model:
    return Model.load("tiny", "cpu", torch.float32)


@cache
def offer() -> Offer:
    return Offer(quick(), "tiny", 300, settings=Settings())


def told(is_chat: bool, **body) -> tuple:
    """All that is read of a body, but for seeds that are drawn."""
    asked = read(is_chat, offer(), **body)
    streams = []
    for request in (stream.request for stream in asked.streams):
        settings = request.settings
        seed = settings.seed if settings.seed in (-1, 5, 6) else None
        streams.append((request.tokens, request.eos_token_ids, replace(settings, seed=seed)))
    names = ("stream", "stream_options", "origins", "echo")
    return streams, asked.form.tools, asked.param, [getattr(asked.body, name) for name in names]


# ---- Each field alone


@pytest.mark.filterwarnings("ignore:a prompt spells")
@pytest.mark.parametrize("is_chat", [True, False])
def test_a_field_is_honoured_refused_by_name_or_harmless(is_chat):
    for name, (kind, asks, neutral) in kinds(is_chat).items():
        needs = {"top_logprobs": {"logprobs": True}, "origins": {"stream": True}}
        beside = needs.get(name, {})
        if name == "special" and not is_chat:
            beside = {"prompt": "<|endoftext|>"}
        plain = told(is_chat, **beside)
        for value in neutral:
            assert told(is_chat, **beside, **{name: value}) == plain, name
        if kind == "refused":
            zero = [0] if -1 in neutral and 0 not in neutral else []  # no budget at all, say
            for value in (asks, *zero):
                says = f"^{name} is (not supported: leave it out|.* it must be 'none', 'auto')"
                with pytest.raises(UserError, match=says) as error:
                    told(is_chat, **{name: value})
                assert error.value.param == name
        elif name != "model":
            changes = told(is_chat, **beside, **{name: asks}) != plain
            assert changes == (kind == "honoured"), name


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_client_may_send_all_that_it_knows(is_chat):
    """As SillyTavern does, with everything switched off."""
    known = kinds(is_chat).items()
    body = {name: field.neutral[-1] for name, field in known if field.neutral}
    body |= {name: field.asks for name, field in known if field.kind == "harmless"}
    assert len(body) > 100 and told(is_chat, **body) == told(is_chat)


def test_the_lists_hold_nothing_else():
    """Nor in two of them, but for a field of one path; what is left is of objects in a body."""
    sent = kinds(True).keys() | kinds(False).keys()
    honoured = {*fields.ChatBody.model_fields, *fields.TextBody.model_fields, *fields.Body.others}
    honoured |= fields.ALIASES.keys()
    neutral, harmless = fields.NEUTRAL.keys(), fields.HARMLESS
    assert honoured <= sent and neutral | harmless <= sent | set(
        LISTS["inside: objects of a body"].split()
    )
    of_one_path = {"top_logprobs", "add_special_tokens", "special", "echo", "chat_template_kwargs"}
    of_one_path |= {"tools", "tool_choice", "reasoning_effort", "reasoning_format"}
    assert honoured & neutral == of_one_path
    assert not harmless & (honoured | neutral)


SCHEMA = {"type": "array", "items": {"type": "boolean"}}
INNER = {"name": "it", "description": "x", "strict": False, "schema": SCHEMA}


def test_a_schema_is_read_wherever_clients_put_it():
    wrapped = {"type": "json_schema", "json_schema": INNER}
    for body in (
        {"response_format": wrapped},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": wrapped | {"schema": None}},
        {"response_format": {"type": "text"}, "json_schema": SCHEMA},
        {"response_format": {"type": "json_object"}, "json_schema": INNER},
        {"json_schema": json.dumps(SCHEMA)},
        {"json_schema": INNER},
        {"structured_outputs": {"json": SCHEMA, "regex": None, "disable_any_whitespace": True}},
    ):
        for is_chat in (True, False):
            (stream,) = read(is_chat, offer(), **body).streams
            assert json.loads(stream.request.settings.schema) == SCHEMA, body


OBJECTS = table(
    """
    response_format {"type": "json_object", "strict": true} → response_format.strict is not
    response_format {"schema": {}} → response_format.schema is not supported
    response_format {"type": "text", "json_schema": {"schema": {}}} → response_format.json_schema is
    response_format {"type": "json_schema"} → response_format must have a schema
    response_format {"type": "json_schema", "json_schema": {"type": "object"}} → json_schema.type
    response_format {"type": "json_schema", "json_schema": {"name": "x"}} → must have a schema
    response_format {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}} → are given
    response_format {"type": "structural_tag"} → response_format.type is 'structural_tag'
    response_format {"type": "json_object", "schema": [1]} → response_format.schema: schema is [1]
    json_schema 3 → json_schema: schema is 3: it must be a JSON object
    json_schema {"schema": {}, "value": {}} → json_schema.value is not supported
    structured_outputs {"json": {}, "choice": ["a"]} → structured_outputs.choice are given
    structured_outputs {"json_object": true, "json": {}} → structured_outputs.json are given
    structured_outputs {"whitespace_pattern": " "} → structured_outputs.whitespace_pattern
    stream_options {"include_usages": true} → leave it out (did you mean include_usage?)
    max_tokens 6000.5 → max_tokens is 6000.5
    max_tokens -2 → max_tokens is -2
    max_completion_tokens "3" → max_completion_tokens is '3'
    prompt "a" → prompt is not supported: leave it out
    asked {"json_schema": {}, "structured_outputs": {"regex": "a"}} → json_schema and structured
    asked {"stopping_strings": ["a"], "stop": ["b"]} → stopping_strings and stop are one field
    asked {"max_tokens": 3, "max_new_tokens": 3, "n_predict": 4} → n_predict and max_tokens are one
    message {"name": 3} → messages[0].name is 3
    message {"prefix": true} → messages[0].prefix is not supported
    message {"role": "assistant", "reasoning_content": ["b"]} → messages[0].reasoning_content is
    message {"role": "tool", "tool_call_id": "c1"} → messages[0].tool_call_id is 'c1': no call
    asked {"thinking": {"type": "enabled", "budget_tokens": 9}} → thinking.budget_tokens is not
    asked {"chat_template_kwargs": {"tools": 1}} → chat_template_kwargs.tools is not supported
    asked {"chat_template_kwargs": {"level": "<a>"}} → chat_template_kwargs.level is not supported
    message {"content": [{"type": "text", "text": "a", "detail": 1}]} → content[0].detail
    message {"content": null} → messages[0].content is missing
    """
)


def test_an_object_in_a_body_has_a_closed_list():
    for given, says in OBJECTS:
        name, text = given.split(" ", 1)
        match name, json.loads(text):
            case "asked", body:
                pass
            case "message", message:
                body = {"messages": [{"role": "user", "content": "a"} | message]}
            case _, value:
                body = {name: value}
        with pytest.raises(UserError, match=re.escape(says)):
            read(True, offer(), **body)
    with pytest.raises(UserError, match="^messages is not supported"):
        read(False, offer(), messages=[])
    with pytest.raises(UserError, match=r"^.{,200}$"):
        read(True, offer(), chat_template_kwargs={"x" * 9999: "<"})


def test_what_other_clients_add_to_a_message_is_read_as_the_message():
    labels = {"id": 7, "opts": {"visible": False}, "tool_calls": [], "refusal": None, "name": "A"}
    labels |= {"type": "text", "metadata": {"_db_id": "7c"}, "extra_fields": {}}
    part = {"text": PROMPT, "cache_control": {"type": "ephemeral"}}
    reply = {"role": "assistant", "content": None, "reasoning_content": "So.", "reasoning": "So."}
    plain = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": ""}]
    for kind in ("text", "input_text", "output_text"):
        said = {"role": "user", "content": [part | {"type": kind}]} | labels
        assert told(True, messages=[said, reply]) == told(True, messages=plain)


# ---- Many at random

LIMIT = 12  # tokens of a text
ODD = [True, -1, 0, 1, 3.0, 2.5, 10**30, 1e300, "", "x", "\ud800", [], ["a"], [[1]], {}, {"a": 1}]
CONSTRAINTS = {"response_format", "json_schema", "structured_outputs"}
SAMPLING = SETTINGS.keys() | PENALTIES.keys()


class Case(NamedTuple):
    """A body at random."""

    is_chat: bool
    body: dict[str, Any]
    refused: set[str]  # fields that must be refused: one of them is named
    suspect: set[str]  # fields that may be


def is_refused(value: Any, known: Kind) -> bool:
    """Where false, 0, or an empty list asks for nothing, the others of these do, too."""
    may_be_off = any(not value for value in known.neutral[1:]) and -1 not in known.neutral
    return known.kind == "refused" and value not in known.neutral and bool(value or not may_be_off)


def draw_case(draw: random.Random) -> Case:
    is_chat = draw.random() < 0.5
    known = kinds(is_chat)
    honoured = [name for name, field in known.items() if field.kind == "honoured"]
    if not HAS_GRAMMARS:
        honoured = [name for name in honoured if name not in CONSTRAINTS]
    chosen = draw.sample(honoured, draw.randrange(5))
    chosen += draw.sample(sorted(known.keys() - CONSTRAINTS), draw.choice([0, 0, 1, 2]))
    body: dict[str, Any] = {}
    suspect = set()
    for name in chosen:
        values = draw.choice([[known[name].asks], known[name].neutral or ODD, ODD])
        body[name] = draw.choice(values)
        if values is ODD or name in fields.ALIASES or name == "top_logprobs":
            suspect |= {name, fields.ALIASES.get(name, name)}
    if len(CONSTRAINTS & body.keys()) > 1:
        suspect |= CONSTRAINTS
    if body.get("stream") is not True:
        suspect.add("origins")
    refused = {name for name, value in body.items() if is_refused(value, known[name])}
    plain: dict[str, Any] = {"temperature": 0}
    if is_chat:
        plain["messages"] = [{"role": "user", "content": PROMPT}]
    else:
        plain["prompt"] = PROMPT
    return Case(is_chat, plain | body, refused=refused, suspect=suspect)


@cache
def text_of(prompt: str, settings: str) -> str:
    """What `generate` makes of JSON settings."""
    return generate(prompt, quick(), max_len=LIMIT, chat=False, **json.loads(settings)).text


def wanted(case: Case, i: int) -> str | None:
    """The text of choice i. None: it is not known."""
    body = fields.without_aliases(case.body)
    prompt = body["messages"][0]["content"] if case.is_chat else body["prompt"]
    seed = body.get("seed", -1)
    is_free = body.get("temperature", 1) > 0 and seed == -1
    if is_free or not isinstance(prompt, str) or body.keys() & {"stop_token_ids", "ignore_eos"}:
        return None
    settings = {name: body[name] for name in SAMPLING & body.keys()}
    settings["top_k"] = max(0, body.get("top_k", 0))
    settings["seed"] = int(seed) + i
    settings["stop"] = body.get("stop", [])
    most = LIMIT - len(quick().encode(prompt))
    asked = body.get("max_completion_tokens", body.get("max_tokens", most))
    settings["max_tokens"] = most if asked == -1 else min(int(asked), most)
    for name, setting, value in (
        ("response_format", "schema", {"enum": [12]}),
        ("json_schema", "schema", {"const": 7}),
        ("structured_outputs", "choice", ["ab", "cd"]),
    ):
        if body.get(name) == kinds(case.is_chat)[name].asks:
            settings[setting] = value
        elif name in case.suspect and name in body:
            return None
    echoed = prompt if body.get("echo") and not case.is_chat else ""
    return echoed + text_of(prompt, json.dumps(settings, sort_keys=True))


def whole(text: str) -> dict[str, Any]:
    """The answer; of a stream, its chunks as one."""
    if not text.startswith("data: "):
        return json.loads(text)
    answer: dict[str, Any] = {"choices": {}}
    for event in text.split("\n\n")[:-2]:
        chunk = json.loads(event[6:])
        answer |= {"usage": chunk["usage"]} if "usage" in chunk else {}
        for choice in chunk["choices"]:
            told = answer["choices"].setdefault(choice["index"], {"text": "", "logprobs": []})
            told["text"] += choice.get("text", choice.get("delta", {}).get("content", ""))
            told["logprobs"].append(choice["logprobs"])
            told["finish_reason"] = choice["finish_reason"]
    answer["choices"] = [*answer["choices"].values()]
    return answer


def fault(case: Case, status: int, text: str) -> str:
    """What is wrong with an answer; empty: it is what was asked for, or names a field."""
    if status != 200:
        error = json.loads(text)["error"]
        words = {error["param"] or "", *re.findall(r"\w+", error["message"])}
        is_named = not words.isdisjoint(case.refused | case.suspect)
        return "" if status in (400, 404) and is_named else f"{status} {error}"
    if case.refused:
        return f"{case.refused} are accepted"
    body = fields.without_aliases(case.body)
    answer = whole(text)
    choices = answer["choices"]
    n = int(body.get("n", 1))
    if len(choices) != n:
        return f"{len(choices)} choices"
    asks_usage = body.get("stream_options", {}).get("include_usage", False)
    if body.get("stream") and asks_usage != ("usage" in answer):
        return "usage in a stream"
    for i, choice in enumerate(choices):
        said = choice.get("text", choice.get("message", {}).get("content"))
        if wanted(case, i) not in (None, said):
            return f"{said!r} and not {wanted(case, i)!r}"
        has_logprobs = choice["logprobs"] not in (None, [None] * len(choice["logprobs"] or []))
        if said and has_logprobs != (body.get("logprobs", False) is not False):
            return f"logprobs {choice['logprobs']}"
    return ""


def test_requests_at_random_are_answered_as_asked_or_name_a_field():
    draw = random.Random(1)
    counts = Counter()

    async def scenario(app):
        for _ in range(100):
            case = draw_case(draw)
            status, text, _ = await ask(app, "POST", CHAT if case.is_chat else COMPLETE, case.body)
            assert not fault(case, status, text), (fault(case, status, text), case)
            counts[status] += 1

    for _ in range(TIMES):
        run(scenario, model=quick(), limit=LIMIT)
    assert counts[200] > 20 * TIMES and counts[400] > 20 * TIMES, counts
