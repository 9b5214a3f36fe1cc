"""Random conversations with thoughts, tools and response_format: what reaches the client parses,
and what the server has sent it takes back.

A script stands in for the model: it writes a text with thoughts, drafts of calls in them, calls and
answers; where a grammar forbids its next token, it takes one that is allowed. TEST_TIMES
(conftest.py) makes more conversations.
"""

import json
import random
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("app.server", reason="requirements-extra.txt is not installed")
pytest.importorskip("llguidance", reason="requirements-extra.txt is not installed")
from app import tools
from app.openai import Asked, Offer, Reply
from conftest import TIMES
from loading import Model
from request import Result
from serve import Update
from settings import Settings
from testing.folders import write_model
from testing.http import read
from testing.tools import REASONING, TOOLS

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
SCHEMA |= {"additionalProperties": False}
FORMATS = [
    None,
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
]
DRAFT = 10_003  # an argument of calls that are only drafted
MOST = 120  # tokens of an answer


@cache
def offer(name: str, folder: Path) -> Offer:
    model = Model.load(write_model(folder / name, REASONING[name]), "cpu")
    return Offer(model, "tiny", 100_000, settings=Settings())


def call(draw: random.Random, name: str, number: int) -> str:
    if name == "Llama 3.1":
        return f'{{"name": "add", "parameters": {{"a": {number}}}}}'
    arguments = f'"arguments": {{"a": {number}}}'
    inner = draw.choice([f'{{"name": "add", {arguments}}}', f'{{{arguments}, "name": "add"}}'])
    return f"<tool_call>\n{draw.choice([inner, inner, f'[{inner}]'])}\n</tool_call>"


def script(draw: random.Random, name: str) -> str:
    """What a model might write, and sometimes a part of it."""
    thought = f"hm {call(draw, name, DRAFT)} or"
    text = draw.choice(["", f"<think>\n{thought}\n</think>\n\n"])
    if name == "R1":
        text = draw.choice([text, f"{thought}</think>"])
    if name == "Llama 3.1":
        text = ""
    parts = ["Hi.", '{"n":1}', call(draw, name, 1), call(draw, name, 2), '{"name": "add"', "\n"]
    text += draw.choice(["", "\n"]).join(draw.choices(parts, k=draw.randrange(4)))
    return text[: draw.randrange(len(text) + 1)] if draw.random() < 0.2 else text


def write(draw: random.Random, asked: Asked, model: Model, text: str) -> tuple[str, str]:
    """The text that follows the grammar, and why it ended."""
    if asked.follows is None:
        return text, draw.choice(["stop", "stop", "length"])
    state = model.grammars.compile(asked.follows).deep_copy()
    wanted = model.tokenizer.encode(text, is_first=False)
    tokens: list[int] = []
    while len(tokens) < MOST and not state.is_stopped():
        if not wanted and state.is_accepting():
            break
        token = wanted.pop(0) if wanted else -1
        if token < 0 or not state.validate_tokens([token]):
            mask = int.from_bytes(state.compute_bitmask(), "little")
            allowed = [id for id in range(model.tokenizer.vocab_size) if mask >> id & 1]
            allowed = [id for id in allowed if model.tokenizer.token_bytes(id)]
            if not allowed:
                break
            token = draw.choice(allowed)
        assert state.try_consume_tokens([token])
        tokens.append(token)
    reason = "stop" if state.is_accepting() else "length"
    return model.tokenizer.decode(tokens, continues=True), reason


def answer(draw: random.Random, asked: Asked, here: Offer, text: str, reason: str) -> dict:
    """The choice, at once and in pieces, which are the same."""
    result = Result("", [], 0, text=text, finish_reason=reason)
    update = Update(0, [(text, "")], result=result)
    (whole,) = Reply(asked, here).completion([update])["choices"]
    asked.body.stream = True
    reply = Reply(asked, here)
    told: dict = {"content": "", "reasoning_content": "", "calls": {}}
    pieces = []
    while text:
        size = draw.randint(1, 9)
        pieces.append(text[:size])
        text = text[size:]
    updates = [Update(0, [(piece, "plain")]) for piece in pieces]
    for update in [*updates, Update(0, result=result)]:
        (choice,) = reply.chunk(update)["choices"]
        for name in ("content", "reasoning_content"):
            told[name] += choice["delta"].get(name) or ""
        for part in choice["delta"].get("tool_calls", []):
            function = told["calls"].setdefault(part["index"], {"name": "", "arguments": ""})
            for name, piece in part["function"].items():
                function[name] += piece
    message = whole["message"]
    assert told["content"] == (message["content"] or "")
    assert told["reasoning_content"] == message.get("reasoning_content", "")
    assert [*told["calls"].values()] == [one["function"] for one in message.get("tool_calls", [])]
    assert choice["finish_reason"] == whole["finish_reason"]
    return whole


def check(asked: Asked, choice: dict, body: dict) -> None:
    """What reaches the client parses."""
    message = choice["message"]
    calls = [one["function"] for one in message.get("tool_calls", [])]
    is_whole = choice["finish_reason"] != "length"
    assert f'{{"a": {DRAFT}}}' not in [function["arguments"] for function in calls], message
    if choice["finish_reason"] == "tool_calls":
        for function in calls:
            assert isinstance(json.loads(function["arguments"]), dict)
    if body["tool_choice"] == "required" and is_whole:
        assert calls and not message["content"]
        assert all(json.loads(function["arguments"]).keys() for function in calls)
    form = body["response_format"]
    if form and is_whole and not calls:
        value = json.loads(message["content"])
        assert form["type"] == "json_object" or value in ({"n": 1}, {"n": 2})
    assert body["parallel_tool_calls"] or len(calls) < 2 or body["tool_choice"] == "none"


def converse(seed: int, folder: Path) -> None:
    draw = random.Random(seed)
    name = draw.choice([*REASONING])
    here = offer(name, folder)
    messages = [{"role": "user", "content": "Tom saw"}]
    for _ in range(draw.randint(1, 3)):
        tools = draw.choice([[], TOOLS, TOOLS])
        choices = ["auto", "auto", "none", "required"] if tools else ["auto"]
        body = {
            "messages": messages,
            "tools": tools,
            "tool_choice": draw.choice(choices),
            "parallel_tool_calls": draw.random() < 0.7,
            "response_format": draw.choice(FORMATS),
            "enable_thinking": draw.choice([None, True, False]),
        }
        asked = read(True, here, **body)
        text, reason = write(draw, asked, here.model, script(draw, name))
        choice = answer(draw, asked, here, text, reason)
        check(asked, choice, body)
        results = []
        for n, one in enumerate(choice["message"].get("tool_calls", [])):
            told = {"role": "tool", "tool_call_id": one["id"], "content": f"Result {n}."}
            results.append(told)
        shuffled = draw.sample(results, len(results))
        messages = [*messages, choice["message"], *shuffled]
        prompt = here.model.tokenizer.decode(
            read(True, here, messages=messages).streams[0].request.tokens
        )
        places = [prompt.rindex(told["content"]) for told in results]
        assert places == sorted(places)
        if not results:
            messages = [*messages, {"role": "user", "content": "And?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("first", range(0, 60 * TIMES, 20))
def test_what_reaches_the_client_parses_and_is_taken_back(first, folder):
    for seed in range(first, first + 20):
        converse(seed, folder)


def test_a_reader_that_ignores_thoughts_is_found_out(folder, monkeypatch):
    reader = tools.AnswerForm.reader
    monkeypatch.setattr(tools.AnswerForm, "reader", lambda form: reader(form._replace(tags=None)))
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(60):
            converse(seed, folder)
