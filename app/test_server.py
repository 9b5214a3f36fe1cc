"""OpenAI's protocol, field by field; who is refused, and how; the program with its signals.

Most of it calls the application as uvicorn would (ASGI), without a network in between.
"""

import asyncio
import http.client
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("app.server", reason="the extra 'server' is not installed")
import grammar as grammar_page
from app import asgi, openai, server
from app import metrics as metrics_page
from app.fields import MAX_BRACKETS, ChatBody
from app.metrics import Metrics
from app.openai import Offer
from automaton import Grammars
from errors import UserError
from generate import Engine, generate
from loading import Model
from request import OutputStream, Request, Result, RoundStats, Settings
from serve import Answer, BatchServer, Unavailable
from settings import Grammar, Options
from testing.folders import CHATML, write_model
from testing.http import (
    CHAT,
    COMPLETE,
    PROMPT,
    Client,
    ask,
    events,
    needs_llguidance,
    post,
    read,
    refused,
    run,
    tiny,
)
from testing.pages import ROOT
from testing.programs import check_refusals, heard, told

GREEDY = dict(prompt=PROMPT, temperature=0, max_tokens=8)


def alone(prompt: str = PROMPT, **settings):
    return generate(
        prompt, tiny(), max_len=300, chat=False, **{**dict(temperature=0, max_tokens=8), **settings}
    )


# ---- Fields


def test_the_fields_of_settings_make_the_texts_of_generate():
    """test_fields.py has more, at random."""
    asked = [
        (dict(temperature=0.9, top_p=0.8, seed=3), dict(temperature=0.9, top_p=0.8, seed=3)),
        (dict(stop=["x", " there"]), dict(stop=["x", " there"])),
        (dict(max_completion_tokens=2, max_tokens=7), dict(max_tokens=2)),
        (dict(stop=None, n=None, logprobs=None, seed=None, user="x", colour=None), dict()),
    ]

    async def scenario(app):
        for fields, settings in asked:
            answer = await post(app, COMPLETE, **{**GREEDY, **fields})
            result = alone(**{"seed": fields.get("seed"), **settings})
            (choice,) = answer["choices"]
            assert choice["text"] == result.text, fields
            assert choice["finish_reason"] == result.finish_reason
            assert answer["usage"]["completion_tokens"] == len(result.tokens)
            assert answer["object"] == "text_completion" and answer["model"] == "tiny"

    run(scenario)


def test_ends_of_text_can_be_ignored_and_added():
    comma = tiny().encode(PROMPT + ", x")[len(tiny().encode(PROMPT))]

    async def scenario(app):
        body = {**GREEDY, "prompt": "The end.", "max_tokens": 60}
        short = await post(app, COMPLETE, **body)
        assert short["choices"][0]["finish_reason"] == "stop"
        long = await post(app, COMPLETE, **body, ignore_eos=True)
        assert long["usage"]["completion_tokens"] == 60
        assert long["choices"][0]["finish_reason"] == "length"
        for ignore_eos in (False, True):  # the client's own ends count in any case
            how = dict(stop_token_ids=[comma], ignore_eos=ignore_eos)
            told = await post(app, COMPLETE, **GREEDY, **how)
            assert told["choices"][0]["finish_reason"] == "stop"
            assert told["usage"]["completion_tokens"] == alone().tokens.index(comma) + 1

    run(scenario)


@pytest.mark.filterwarnings("ignore:a prompt spells")
def test_prompts_may_be_texts_or_tokens_one_or_several():
    async def scenario(app):
        tokens = tiny().encode(PROMPT)
        wanted = alone().text
        for prompt in (PROMPT, [PROMPT], tokens, [tokens], [tokens, tokens], [PROMPT, tokens]):
            answer = await post(app, COMPLETE, **{**GREEDY, "prompt": prompt})
            assert {choice["text"] for choice in answer["choices"]} == {wanted}
            count = len(answer["choices"])
            assert answer["usage"]["prompt_tokens"] == count * len(tokens)
        end = "<|endoftext|>"
        for special, number in ((None, len(tiny().encode(end))), (True, 1)):
            answer = await post(app, COMPLETE, **{**GREEDY, "prompt": [end], "special": special})
            assert answer["usage"]["prompt_tokens"] == number
        asked = dict(prompt=[PROMPT, "Lily"], n=2, temperature=1, seed=5, max_tokens=6)
        answer = await post(app, COMPLETE, **asked)
        assert answer["usage"]["prompt_tokens"] == len(tokens) + len(tiny().encode("Lily"))
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in answer["choices"]]
        seeds = [(PROMPT, 5), (PROMPT, 6), ("Lily", 5), ("Lily", 6)]
        for text, (prompt, seed) in zip(texts, seeds):
            assert text == alone(prompt, temperature=1, seed=seed, max_tokens=6).text
        streamed = {i: "" for i in range(4)}
        for chunk in await events(app, COMPLETE, **asked):
            (choice,) = chunk["choices"]
            streamed[choice["index"]] += choice["text"]
        assert list(streamed.values()) == texts

    run(scenario)


def test_a_chat_follows_the_template(instruct):
    """Parts of text are lines; a developer is the system; a model without template goes on."""
    model = Model.load(instruct, "cpu", torch.float64)
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    messages = [dict(role="developer", content="Be"), dict(role="user", content=parts)]
    plain = [dict(role="system", content="Be"), dict(role="user", content="He\nllo")]
    result = generate(messages=plain, target=model, temperature=0, max_tokens=6)

    async def scenario(app):
        answer = await post(app, CHAT, messages=messages, temperature=0, max_tokens=6)
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": result.text}
        assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
        whole = await post(app, CHAT, messages=messages, temperature=0, ignore_eos=True)
        assert whole["usage"]["total_tokens"] == 96  # all of the context
        asks = dict(enable_thinking=True)  # without effect: the template does not read it
        same = await post(app, CHAT, messages=messages, temperature=0, max_tokens=6, **asks)
        assert same["choices"][0]["message"] == choice["message"]

    run(scenario, model=model)

    async def without(app):
        message = dict(role="user", content=PROMPT)
        answer = await post(app, CHAT, messages=[message], temperature=0, max_tokens=8)
        assert answer["choices"][0]["message"]["content"] == alone().text

    run(without)
    for target, is_chat in ((model, True), (model, False), (tiny(), True)):
        asked = read(is_chat, Offer(target, "tiny", 90, settings=Settings()), n=2)
        is_reply = [stream.request.is_reply for stream in asked.streams]
        assert is_reply == 2 * [is_chat and target is model]


def test_a_reasoning_effort_of_none_asks_not_to_think(tmp_path):
    """As in vLLM. What chat_template_kwargs says counts more; some models never think."""
    for template, asked in ((CHATML + "{{ enable_thinking }}", "False"), (CHATML, "")):
        model = Model.load(write_model(tmp_path / asked, template), "cpu")
        offer = Offer(model, "tiny", 90, settings=Settings())

        def prompt(**fields: Any) -> list[int]:
            return read(True, offer, **fields).streams[0].request.tokens

        plain = prompt(reasoning_effort="auto")
        assert prompt(reasoning_effort="none") == plain + model.tokenizer.encode(asked)
        for asks in (dict(think=False), dict(thinking={"type": "disabled"})):
            assert prompt(**asks) == prompt(reasoning_effort="none")
        both = dict(thinking={"type": "disabled"}, enable_thinking=True)
        assert prompt(**both) == prompt(enable_thinking=True)
        if asked:
            thinks = dict(chat_template_kwargs={"enable_thinking": True})
            assert prompt(reasoning_effort="none", **thinks) == prompt(**thinks) != plain


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_stream_has_the_role_first_and_the_reason_last(path):
    is_chat = path == CHAT
    body = GREEDY | dict(max_tokens=12)
    if is_chat:
        body["messages"] = [dict(role="user", content=body.pop("prompt"))]

    def text_of(chunk) -> str:
        choice = chunk["choices"][0]
        return choice["delta"].get("content", "") if is_chat else choice["text"]

    async def scenario(app):
        chunks = await events(app, path, **body, origins=True)
        wanted = alone(max_tokens=12)
        assert "".join(map(text_of, chunks)) == wanted.text
        assert len({chunk["id"] for chunk in chunks}) == 1 and len(chunks) > 2
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["length"]
        if is_chat:
            roles = [chunk["choices"][0]["delta"].get("role") for chunk in chunks]
            assert roles == ["assistant"] + [None] * (len(chunks) - 1)
        begun = {}  # each text's first chunk
        for chunk in await events(app, path, **body, n=2):
            (choice,) = chunk["choices"]
            begun.setdefault(choice["index"], choice)
        assert begun.keys() == {0, 1}
        if is_chat:
            assert all(choice["delta"]["role"] == "assistant" for choice in begun.values())
        pieces = [piece for chunk in chunks for piece in chunk["origins"]]
        assert "".join(text for text, _ in pieces) == wanted.text
        assert {origin for _, origin in pieces} == {"plain"}
        assert not any("usage" in chunk for chunk in chunks)

        *chunks, last = await events(app, path, **body, stream_options=dict(include_usage=True))
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
        both = dict(include_usage=True, continuous_usage_stats=True)
        chunks = await events(app, path, **body, stream_options=both)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 12

    run(scenario)


def test_logprobs_are_those_of_the_command_line():
    wanted = alone(logprobs=2).logprobs

    def texts(entries) -> list[str]:
        return [tiny().tokenizer.decode([entry.token], continues=True) for entry in entries]

    async def scenario(app):
        answer = await post(app, COMPLETE, **GREEDY, logprobs=2)
        columns = answer["choices"][0]["logprobs"]
        assert columns["tokens"] == texts(wanted)
        assert columns["token_logprobs"] == pytest.approx([e.logprob for e in wanted], abs=1e-9)
        assert [len(top) for top in columns["top_logprobs"]] == [2] * 8
        assert columns["text_offset"] == [
            len("".join(columns["tokens"][:i])) for i in range(len(wanted))
        ]
        answer = await post(app, COMPLETE, **GREEDY, logprobs=2, n=2)
        offsets = [choice["logprobs"]["text_offset"] for choice in answer["choices"]]
        assert offsets == 2 * [columns["text_offset"]]  # of each text by itself
        chunks = await events(app, COMPLETE, **GREEDY, logprobs=2)
        streamed = {name: [] for name in columns}
        for chunk in chunks:
            for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
                streamed[name] += values
        assert streamed["tokens"] == columns["tokens"]
        assert streamed["text_offset"] == columns["text_offset"]

        chat = dict(messages=[dict(role="user", content=PROMPT)], temperature=0, max_tokens=8)
        answer = await post(app, CHAT, **chat, logprobs=True, top_logprobs=3)
        content = answer["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == columns["tokens"]
        assert [bytes(entry["bytes"]).decode() for entry in content] == columns["tokens"]
        assert [len(entry["top_logprobs"]) for entry in content] == [3] * 8
        assert content[0]["top_logprobs"][0].keys() == {"token", "logprob", "bytes"}
        answer = await post(app, CHAT, **chat)
        assert answer["choices"][0]["logprobs"] is None

    run(scenario)
    json.dumps(openai.finite(-math.inf), allow_nan=False)


def test_an_echo_is_the_prompt_with_its_logprobs():
    """Whole or streamed, of a text or of tokens, with new tokens or without any."""
    prompt = "Größe 😀, once"
    tokens = tiny().encode(prompt)
    wanted = alone(prompt, prompt_logprobs=2, logprobs=2)
    ids = [*tokens, *wanted.tokens]
    logprobs = [entry.logprob for entry in (*wanted.prompt_logprobs, *wanted.logprobs)]
    before = [tiny().tokenizer.decode(ids[:i]).rstrip("\ufffd") for i in range(len(ids))]

    async def scenario(app):
        for given, count in ((prompt, 0), (tokens, 8), ([tokens] * 2, 8)):
            text = prompt + (wanted.text if count else "")
            body = dict(prompt=given, temperature=0, max_tokens=count, echo=True)
            answer = await post(app, COMPLETE, **body, logprobs=2)
            size = len(tokens) + count
            for choice in answer["choices"]:
                assert (choice["text"], choice["finish_reason"]) == (text, "length")
                columns = choice["logprobs"]
                assert columns["tokens"] == [piece_of(token) for token in ids[:size]]
                assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
                told = pytest.approx(logprobs[: size - 1], abs=1e-9)
                assert columns["token_logprobs"][1:] == told
                assert columns["text_offset"] == [len(piece) for piece in before[:size]]
            assert answer["usage"]["completion_tokens"] == count * len(answer["choices"])
            chunks = [
                chunk["choices"][0] for chunk in await events(app, COMPLETE, **body, logprobs=2)
            ]
            for i, choice in enumerate(answer["choices"]):
                own = [chunk for chunk in chunks if chunk["index"] == i]
                assert "".join(chunk["text"] for chunk in own) == text
                for name, values in choice["logprobs"].items():
                    parts = [chunk["logprobs"][name] for chunk in own if chunk["logprobs"]]
                    assert [*chain(*parts)] == values
            (first, *_) = (await post(app, COMPLETE, **body))["choices"]
            assert (first["text"], first["logprobs"]) == (text, None)

    run(scenario)


def test_an_echo_is_bounded():
    """Other texts of a prompt cost nothing to make, and each repeats it."""
    offer = Offer(tiny(), "tiny", 600, settings=Settings())
    body = dict(prompt=[5] * 500, echo=True)
    for beside in (dict(n=128), dict(n=64, logprobs=20)):
        assert read(False, offer, **body, **beside).body.echo
    with pytest.raises(UserError, match="^echo would return 1,408,000 numbers") as error:
        read(False, offer, **body, n=128, logprobs=20)
    assert error.value.param == "echo"


def piece_of(token: int) -> str:
    return tiny().tokenizer.decode([token], continues=True)


def test_a_constraint_becomes_settings_or_is_refused_by_name():
    """response_format and structured_outputs -> schema, regex, choice, grammar."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = [
        (dict(response_format={"type": "text"}), {}),
        (dict(response_format={"type": "json_object"}), {"schema": {"type": "object"}}),
        (dict(structured_outputs={"json": schema}), {"schema": schema}),
        (dict(structured_outputs={"regex": "a+", "json": None}), {"regex": "a+"}),
        (dict(structured_outputs={"choice": ["a", "b"]}), {"choice": ["a", "b"]}),
        (dict(structured_outputs={"grammar": 'start: "a"'}), {"grammar": 'start: "a"'}),
    ]
    for body, settings in asked:
        assert openai.read_constraint(ChatBody.model_validate(body))[1] == settings


@needs_llguidance
def test_an_answer_follows_its_schema():
    fields = {"a": {"type": "boolean"}}
    schema = dict(type="object", properties=fields, required=["a"], additionalProperties=False)
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}

    async def scenario(app):
        answer = await post(app, COMPLETE, **{**GREEDY, "max_tokens": 30}, response_format=form)
        assert isinstance(json.loads(answer["choices"][0]["text"])["a"], bool)
        (colon,) = tiny().tokenizer.encode(":", is_first=False)
        ends = dict(stop_token_ids=[colon, *tiny().tokenizer.encode('":', is_first=False)])
        answer = await post(
            app, COMPLETE, **{**GREEDY, "max_tokens": 30}, response_format=form, **ends
        )
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] < 30
        for name, asked in (
            ("response_format.json_schema", dict(response_format=form)),
            ("json_schema", dict(json_schema=schema)),
            ("structured_outputs.json", dict(structured_outputs={"json": schema})),
        ):
            schema["type"] = "strange"
            status, error = await refused(app, COMPLETE, GREEDY | asked)
            assert (status, error["param"]) == (400, name)

    run(scenario)


# ---- Errors


def user(content="a", role="user", **more) -> dict:
    return dict(messages=[dict(role=role, content=content, **more)])


BAD = told(
    """
    completions { → the body is not a JSON object
    completions {"prompt": NaN} → NaN is not a finite number
    completions [1] → the body is not a JSON object
    completions {} → prompt must be a text
    completions {"prompt": []} → the prompt has 0 tokens: it must have from 1 to 299
    completions {"prompt": [["a"]]} → prompt must be a text
    completions {"prompt": [1, 4096]} → there is no token
    completions {"prompt": [-1]} → there is no token
    completions {"prompt": [true]} → prompt must be a text
    completions {"prompt": "a", "n": 17} → 17 outputs are asked for, and the server accepts 16
    completions {"prompt": "a", "n": 0} → n is 0
    completions {"prompt": "a", "temperature": "hot"} → temperature is 'hot'
    completions {"prompt": "a", "seed": 9223372036854775808} → seed is 9223372036854775808
    completions {"prompt": "a", "stop": 5} → stop is 5: it must be a text, or a list of texts
    completions {"prompt": "a", "stream": "yes"} → stream is 'yes': it must be a valid boolean
    completions {"prompt": "a", "stream_options": []} → stream_options is []
    completions {"prompt": "a", "logprobs": true} → logprobs is True
    completions {"prompt": "a", "response_format": {"type": []}} → response_format.type is []
    completions {"prompt": "a", "response_format": {"type": "json"}} → type is 'json': it must
    completions {"prompt": "a", "structured_outputs": {"x": 1}} → structured_outputs.x is not
    chat/completions {"messages": "a"} → messages is 'a'
    chat/completions {} → messages must be a list of at least one message
    chat/completions {"messages": []} → messages must be a list of at least one message
    chat/completions {"messages": ["a"]} → messages[0] is 'a': it must be an object
    completions {"prompt": "a", "stop_token_ids": ["a"]} → stop_token_ids[0] is 'a': it must
    asked {"special": true} → special is not supported
    completions {"prompt": "a", "special": "no"} → special is 'no': it must be a valid boolean
    user {"role": "tool", "tool_call_id": "x"} → messages[0].tool_call_id is 'x': no call before it
    user {"role": ["user"]} → messages[0].role is ['user']: it must be
    user {"content": null} → messages[0].content is missing
    user {"content": [{"type": "image_url"}]} → messages[0].content[0].type is 'image_url'
    user {"content": 5} → messages[0].content is 5: it must be a valid list
    user {"content": [{"type": "text"}]} → messages[0].content[0].text is missing
    asked {"chat_template_kwargs": {"x": [1]}} → chat_template_kwargs.x is not supported
    asked {"enable_thinking": 1} → enable_thinking is 1: it must be
    user {"tool_calls": [{}]} → messages[0].tool_calls[0].function is missing
    asked {"logprobs": 2} → logprobs is 2: it must be a valid boolean
    asked {"echo": true} → echo is not supported: leave it out
    completions {"prompt": "a", "echo": 1} → echo is 1: it must be a valid boolean
    asked {"top_logprobs": 2} → top_logprobs needs logprobs
    asked {"origins": true} → origins are sent in chunks: set stream to true
    asked {"logprobs": true, "top_logprobs": "3"} → top_logprobs is '3'
    """
)
LONG = [
    (b"\xff", "the body is not a JSON object"),
    (b"[" * 100_000, "the body is not a JSON object"),
    (b"[" * 300_000, "the body has more than 131,072 lists and objects"),
    (dict(prompt=[1] * 300), "the prompt has 300 tokens: it must have from 1 to 299"),
    (dict(prompt=[9999, *[1] * 30]), "token 9999, and the model has tokens 0 to 4095"),
    (dict(prompt=["a"] * 200), "200 prompts: at most 128"),
    (dict(prompt=["a"] * 100, n=2), "n is 2: it must be a whole number from 1 to 1"),
    (dict(prompt="a " * 500), "at least 300 tokens, and at most 299 fit: shorten the text"),
    (dict(prompt="a", stop=["a"] * 65), "stop may be at most 64 texts"),
    (dict(prompt="a", stop="a" * 9999), "stop may be at most 64 texts"),
]


def bad_bodies() -> Iterator[tuple[str, Any, str]]:
    """path, body, what is said. user: the fields of a message; asked: those beside one."""
    for given, says in BAD:
        path, text = given.split(" ", 1)
        match path:
            case "user":
                yield CHAT, user(**json.loads(text)), says
            case "asked":
                yield CHAT, user() | json.loads(text), says
            case _:
                yield f"/v1/{path}", text.encode(), says
    for body, says in LONG:
        yield COMPLETE, body, says


def test_what_is_wrong_is_told_and_serving_goes_on(capsys):
    async def scenario(app):
        for path, body, says in bad_bodies():
            status, error = await refused(app, path, body)
            assert (status, error["type"]) == (400, "invalid_request_error"), (body, error)
            assert says in error["message"], (says, error)
            assert error.keys() == {"message", "type", "param", "code"}
            named = re.match(r"(\w+) is .*: it must be", error["message"])
            assert not named or error["param"] == named[1], error
        for path, body in ((CHAT, user("a " * 500)), (COMPLETE, dict(prompt=[1] * 300))):
            status, error = await refused(app, path, body)
            assert (status, error["code"]) == (400, "context_length_exceeded"), error
        status, error = await refused(app, CHAT, user() | dict(model="gpt"))
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        await post(app, COMPLETE, **GREEDY, model="tiny", repetition_penalty=1.0, best_of=1)

    run(scenario)
    assert "Traceback" not in capsys.readouterr().err


def test_penalties_are_those_of_python():
    """By OpenAI's names and vLLM's, with siblings: the text of `generate`."""
    asked = dict(presence_penalty=0.5, frequency_penalty=1.5, repetition_penalty=1.3, min_tokens=8)
    wanted = generate(PROMPT, "tiny", max_tokens=8, temperature=0, logit_bias={44: -100}, **asked)
    plain = generate(PROMPT, "tiny", max_tokens=8, temperature=0)
    asked |= dict(logit_bias={"44": -100}, max_tokens=8, temperature=0, n=2)

    async def scenario(app):
        answer = await post(app, COMPLETE, prompt=PROMPT, **asked)
        assert [choice["text"] for choice in answer["choices"]] == 2 * [wanted.text]
        assert wanted.text != plain.text and 44 in plain.tokens and 44 not in wanted.tokens
        for wrong in ({"5": 101}, {"x": 1}, {"-1": 1}, {"99999": 1}, {"5.5": 1}, [1]):
            status, error = await refused(app, COMPLETE, dict(prompt=PROMPT, logit_bias=wrong))
            assert status == 400 and "logit_bias" in error["message"], wrong
        ranged = dict(prompt=PROMPT, repetition_penalty=1.1, repetition_penalty_range=64)
        status, error = await refused(app, COMPLETE, ranged)
        assert (status, error["param"]) == (400, "repetition_penalty_range")

    run(scenario)


def test_other_paths_and_methods():
    async def scenario(app):
        for path in ("/v2", "/v1/other", "/v1/models/gpt", "/../app/page.html"):
            status, text, _ = await ask(app, "GET", path)
            assert status == 404 and "there is no" in json.loads(text)["error"]["message"]
        status, _, headers = await ask(app, "GET", COMPLETE)
        assert status == 405 and headers["allow"] == "POST"
        status, _, headers = await ask(app, "OPTIONS", COMPLETE)
        assert status == 405 and not any("access-control" in name for name in headers)
        status, _, headers = await ask(app, "HEAD", COMPLETE, GREEDY)
        assert status == 405 and headers["allow"] == "POST"
        assert (await ask(app, "HEAD", "/state"))[0] == 200  # and it ends
        offer = [("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c")]
        for half in offer:  # as proxies send it: that is no offer, and the body is there
            assert (await ask(app, "POST", COMPLETE, GREEDY, [half]))[0] == 200
        status, error = await refused(app, COMPLETE, b"", offer)
        assert status == 400 and error["message"].startswith("Upgrade: 'h2c' is not supported")
        status, text, headers = await ask(app, "GET", "/")
        assert status == 200 and text.startswith("<!doctype html>")
        status, text, _ = await ask(app, "GET", "/health")
        assert (status, json.loads(text)) == (200, {"status": "ok"})
        status, text, _ = await ask(app, "GET", "/v1/models")
        (card,) = json.loads(text)["data"]
        assert card["id"] == card["root"] == "tiny" and card["object"] == "model"
        status, text, _ = await ask(app, "GET", "/v1/models/tiny")
        assert json.loads(text) == card

    run(scenario)


def test_bodies_are_bounded(monkeypatch):
    monkeypatch.setattr(asgi, "MAX_BODY", 1000)

    async def scenario(app):
        status, error = await refused(app, COMPLETE, b" " * 1001)
        assert status == 413 and "at most 1,000 bytes" in error["message"]
        client = Client(app, "POST", COMPLETE, body=b"x")
        monkeypatch.setattr(asgi, "PATIENCE", 0.05)
        async with client:
            client.to_send = [(b"{", True)]
            await client.task
        assert client.status == 408
        async with Client(app, "POST", COMPLETE, body=b"x") as client:
            client.to_send = [(b"{", True)]  # and goes
        assert client.status == 0

    run(scenario)


def test_bodies_that_come_are_bounded_together(monkeypatch):
    """The one that has been silent for longest goes; small ones count for nothing."""
    monkeypatch.setattr(server, "SMALL_BODY", 1000)
    monkeypatch.setattr(server, "MAX_HELD", 10_000)

    async def scenario(app):
        async with AsyncExitStack() as stack:
            clients = []
            for size in (1000, 4000, 4000, 4000, 1000):
                client = Client(app, "POST", COMPLETE, body=b" " * 2 * size)
                clients.append(await stack.enter_async_context(client))
                client.to_send.pop()  # the second half
                await asyncio.sleep(0.01)
            await asyncio.wait({clients[1].task}, timeout=10)
            assert [client.status for client in clients] == [0, 408, 0, 0, 0]
            assert "other bodies needed the memory" in clients[1].text
            await post(app, COMPLETE, **GREEDY, user=1500 * "x")
        assert not app.uploads

    run(scenario)


@pytest.mark.parametrize("is_local", [True, False])
def test_names_and_origins(is_local):
    """DNS rebinding: a page's own name that leads here; cross-origin: another page."""
    names = {"localhost": 200, "LOCALHOST:1": 200, "127.0.0.1:8000": 200, "[::1]:80": 200}
    names |= dict.fromkeys(
        ("evil.com", "127.0.0.1.evil.com:80", "localhost.evil.com", "", "::"), 403
    )

    async def scenario(app):
        for host, wanted in names.items():
            status, text, _ = await ask(app, "GET", "/health", headers={"host": host})
            assert status == (wanted if is_local else 200), host
            assert (status == 403) == ("unless it is told localhost" in text)
        for origin, wanted in {
            "http://localhost:80": 200,
            "http://localhost:81": 403,
            "http://evil.com": 403,
            "null": 403,
        }.items():
            headers = {"host": "localhost:80", "origin": origin}
            status, _, answered = await ask(app, "GET", "/health", headers=headers)
            assert status == wanted, origin
            assert not any("access-control" in name for name in answered)

    run(scenario, is_local=is_local)


def test_pages_of_an_allowed_origin():
    """CORS: a preflight has no key; an answer, an error and a stream all name the origin."""
    page = {"origin": "app://obsidian.md"}
    asks = {"access-control-request-headers": "authorization, x-stainless-os"}

    async def scenario(app):
        status, text, headers = await ask(app, "OPTIONS", CHAT, headers=page | asks)
        assert (status, text) == (204, "") and "content-length" not in headers
        assert headers["access-control-allow-origin"] == "app://obsidian.md"
        assert headers["access-control-allow-methods"] == "GET, POST"
        assert headers["access-control-allow-headers"] == "authorization, x-stainless-os"
        key = {"authorization": "Bearer sesame"}
        for path, body, given, wanted in (
            (COMPLETE, GREEDY, key, 200),
            (COMPLETE, GREEDY | {"stream": True}, key, 200),
            (COMPLETE, {"colour": 1}, key, 400),
            (COMPLETE, GREEDY, {}, 401),
        ):
            status, _, headers = await ask(app, "POST", path, body, page | given)
            assert status == wanted, body
            assert headers["access-control-allow-origin"] == "app://obsidian.md"
            assert headers["vary"] == "origin"
        for method in ("OPTIONS", "GET"):
            other = {"origin": "http://obsidian.md"} | key
            status, text, headers = await ask(app, method, "/v1/models", headers=other)
            assert status == 403 and "--allow-origin http://obsidian.md lets them" in text
            assert not any("access-control" in name for name in headers)
        status, _, headers = await ask(app, "GET", "/v1/models", headers=key)
        assert status == 200 and "access-control-allow-origin" not in headers

    run(scenario, api_key="sesame", origins=["http://localhost:3000", "app://obsidian.md"])

    async def all_pages(app):
        for origin in ("null", "https://evil.com"):
            _, _, headers = await ask(app, "GET", "/v1/models", headers={"origin": origin})
            assert headers["access-control-allow-origin"] == origin

    run(all_pages, origins=["*"])


def test_the_key():
    async def scenario(app):
        for path in ("/v1/models", "/v1/other", "/state"):
            for key in (None, "", "Bearer", "Bearer wrong", "Bearer sesameß", "Bearer ses\u00e9"):
                status, text, headers = await ask(app, "GET", path, headers={"authorization": key})
                assert status == 401 and headers["www-authenticate"] == "Bearer"
                assert json.loads(text)["error"]["code"] == "invalid_api_key"
        for path in ("/", "/health", "/metrics"):
            assert (await ask(app, "GET", path))[0] == 200
        for scheme in ("Bearer ", "bearer ", "BEARER  "):
            given = {"authorization": f"{scheme}sesame"}
            assert (await ask(app, "GET", "/v1/models", headers=given))[0] == 200

    run(scenario, api_key="sesame")


@pytest.mark.parametrize("key", ["voilà", "Å", os.fsdecode(b"voil\xe0")])
def test_a_key_may_have_any_bytes(key):
    """Those of à end with one that is a space in Latin-1, in which headers come."""

    async def scenario(app):
        for given, status in ((key, 200), (key[:-1], 401)):
            client = Client(app, "GET", "/v1/models")
            client.scope["headers"].append((b"authorization", b"Bearer " + os.fsencode(given)))
            async with client:
                await client.task
            assert client.status == status

    run(scenario, api_key=key)


@pytest.mark.parametrize("flag, variable", [("a", "b"), (None, "a"), (None, ""), (None, None)])
def test_the_key_and_the_host_are_those_that_the_program_is_given(flag, variable, monkeypatch):
    made = []

    async def serve_once(http_server, listener, batch, grace):
        made.append(http_server.config.app)
        return 0

    monkeypatch.setattr(server, "serve_until_signal", serve_once)
    model = tiny()
    engine = SimpleNamespace(max_len=300, batcher=None)
    monkeypatch.setattr(server, "load_engine", lambda args: (model, engine))
    monkeypatch.delenv("LLAMA_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("LLAMA_API_KEY", variable)
    key_flags = ["--api-key", flag] if flag else []
    pages = ["http://localhost:3000", "vscode-file://app", "file://", "null", "*"]
    origin_flags = [f"--allow-origin={origin}" for origin in pages]
    for host, is_local in (("127.0.0.1", True), ("0.0.0.0", False)):
        assert server.main(["--port", "0", "--host", host, *key_flags, *origin_flags]) == 0
        assert made[-1].origins == pages
        assert made[-1].is_local == is_local
        assert made[-1].api_key == (flag or variable or None)
        assert model.history.is_shared == bool(flag or variable)  # never between strangers


# ---- Clients that go, wait, or come too many


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_is_cancelled(stream):
    """`run` sees that its blocks are free."""

    async def scenario(app):
        body = {**GREEDY, "max_tokens": 250, "stream": stream, "ignore_eos": True, "n": 3}
        async with Client(app, "POST", COMPLETE, body=body) as client:
            while stream and len(client.parts) < 3:
                await asyncio.sleep(0.001)
            while not app.batch.num_texts:
                await asyncio.sleep(0.001)
        assert app.batch.num_texts == 0
        steps = await app.batch.ask(lambda: app.batch.engine.batcher.num_steps)
        assert steps < 200

    run(scenario)


def test_a_client_that_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(asgi, "PATIENCE", 0.2)

    async def scenario(app):
        body = {**GREEDY, "max_tokens": 250, "stream": True, "ignore_eos": True}
        client = Client(app, "POST", COMPLETE, body=body, reads=2)
        async with client:
            other = await post(app, COMPLETE, **GREEDY)  # is not held up
            assert other["choices"][0]["text"] == alone().text
            await asyncio.wait_for(asyncio.shield(client.task), 10)
        assert len(client.parts) == 2

    run(scenario)


def test_a_full_queue_is_429():
    async def scenario(app):
        body = {**GREEDY, "max_tokens": 250, "ignore_eos": True, "n": 2}
        async with Client(app, "POST", COMPLETE, body=body):
            while not app.batch.num_texts:
                await asyncio.sleep(0.001)
            status, text, headers = await ask(app, "POST", COMPLETE, GREEDY | dict(n=2))
            assert status == 429 and headers["retry-after"] == "1"
            assert json.loads(text)["error"]["type"] == "rate_limit_error"
            await post(app, COMPLETE, **GREEDY)  # one is left
            with pytest.MonkeyPatch.context() as patch:  # not "try again": it never could be
                patch.setattr(app.batch.engine.batcher, "check", cannot)
                status, _ = await refused(app, COMPLETE, GREEDY | dict(n=2))
                assert status == 400
        await post(app, COMPLETE, **GREEDY, n=3)

    run(scenario, capacity=3)


@needs_llguidance
def test_grammars_are_compiled_apart(monkeypatch):
    """As many at a time as MAX_COMPILING; plain requests pass; who waits too long hears it, and a
    compile that nobody waits for any more keeps its place until it ends."""
    grammars = tiny().grammars
    compiles: list[Future] = []

    def submit(grammar):
        compiles.append(Future())
        compiles[-1].set_running_or_notify_cancel()
        return compiles[-1]

    monkeypatch.setattr(grammars, "submit", submit)
    monkeypatch.setattr(server, "COMPILE_SECONDS", 0.3)

    async def scenario(app):
        asked = GREEDY | dict(structured_outputs={"choice": ["yes"]})
        both = [asyncio.ensure_future(refused(app, COMPLETE, asked)) for _ in range(2)]
        while len(compiles) < server.MAX_COMPILING:
            await asyncio.sleep(0.001)
        await post(app, COMPLETE, **GREEDY)
        for status, error in await asyncio.gather(*both):
            assert status == 503 and "not compiled within" in error["message"]
        waits = asyncio.ensure_future(refused(app, COMPLETE, asked))
        assert (await waits)[0] == 503 and len(compiles) == 2  # nobody has begun with it
        monkeypatch.setattr(server, "COMPILE_SECONDS", 10)
        waits = asyncio.ensure_future(post(app, COMPLETE, **asked))
        await asyncio.sleep(0.05)
        compiles[0].set_exception(UserError("not any more"))
        while len(compiles) < 3:
            await asyncio.sleep(0.001)
        compiles[2].set_result(Grammars.submit(grammars, Grammar("choice", ("yes",))).result())
        assert (await waits)["choices"][0]["text"] == "yes"

    run(scenario)


@needs_llguidance
def test_a_thread_that_cannot_start_keeps_no_place_of_a_compile(monkeypatch):
    async def scenario(app):
        asked = GREEDY | dict(structured_outputs={"choice": ["yes"]})
        with monkeypatch.context() as patch:
            patch.setattr(tiny().grammars, "submit", no_thread)
            for _ in range(server.MAX_COMPILING):
                assert (await refused(app, COMPLETE, asked))[0] == 500
        assert (await post(app, COMPLETE, **asked))["choices"][0]["text"] == "yes"

    def no_thread(grammar):
        raise RuntimeError("can't start new thread")

    run(scenario)


@needs_llguidance
def test_a_grammar_that_fails_is_that_requests_mistake(monkeypatch, capsys):
    monkeypatch.setattr(grammar_page, "SLOW_STEP", -1.0)
    monkeypatch.setattr(grammar_page, "SLOW_MASK", -1.0)

    async def scenario(app):
        asked = GREEDY | dict(max_tokens=40, structured_outputs={"regex": "[a-z ]{30}"})
        status, error = await refused(app, COMPLETE, asked)
        assert status == 400 and "simplify it" in error["message"]
        assert error["param"] == "structured_outputs.regex"
        streamed = await refused(app, COMPLETE, asked | dict(stream=True))  # before its first chunk
        assert streamed == (status, error)

    run(scenario)
    assert capsys.readouterr().err == ""


def test_small_bodies_pass_large_ones(monkeypatch):
    """Large ones wait for each other, once they have come: one that comes slowly delays nobody. A
    client that goes waits no more."""
    may_read = threading.Event()
    num_read = 0

    def slow_if_large(data: bytes, is_chat: bool, offer: Offer) -> openai.Asked:
        nonlocal num_read
        if len(data) > server.SMALL_BODY:
            may_read.wait(10)
            num_read += 1
        return openai.read_request(data, is_chat, offer)

    monkeypatch.setattr(server, "read_request", slow_if_large)

    async def scenario(app):
        def asks(size: int) -> Client:
            body = json.dumps(GREEDY | dict(max_tokens=1)).encode()
            return Client(app, "POST", COMPLETE, body=body + b" " * (size - len(body)))

        async with AsyncExitStack() as stack:
            slow = await stack.enter_async_context(asks(server.SMALL_BODY + 1))
            rest = slow.to_send.pop()
            large = [asks(server.SMALL_BODY + 1) for _ in range(40)]
            for client in large:
                await stack.enter_async_context(client)
            async with asks(server.SMALL_BODY + 1), asks(server.SMALL_BODY) as small:
                await asyncio.wait({small.task}, timeout=10)
            assert small.status == 200
            assert not any(client.status for client in large)
            may_read.set()
            await asyncio.wait([client.task for client in large], timeout=60)
            assert all(client.status == 200 for client in large)
            assert slow.status == 0 and num_read == 40
            slow.to_send.append(rest)

    run(scenario, capacity=50)


def test_an_exception_is_that_requests_500(monkeypatch, capsys):
    feed = OutputStream.feed

    def fails(self, tokens):
        if self.request.settings.seed == 7 and len(self.result.tokens) > 3:
            raise ZeroDivisionError("secret")
        feed(self, tokens)

    monkeypatch.setattr(OutputStream, "feed", fails)

    async def scenario(app):
        good = asyncio.ensure_future(post(app, COMPLETE, **GREEDY))
        status, error = await refused(app, COMPLETE, GREEDY | dict(seed=7))
        assert status == 500 and error["type"] == "server_error" and "secret" not in str(error)
        status, text, _ = await ask(app, "POST", COMPLETE, GREEDY | dict(seed=7, stream=True))
        assert status == 200 and '"error"' in text and text.endswith("data: [DONE]\n\n")
        assert (await good)["choices"][0]["text"] == alone().text

    run(scenario)
    assert "ZeroDivisionError: secret" in capsys.readouterr().err


def test_an_engine_that_fails_ends_all(monkeypatch):
    async def scenario(app):
        body = {**GREEDY, "max_tokens": 250, "ignore_eos": True}
        async with Client(app, "POST", COMPLETE, body=body | dict(stream=True)) as one:
            async with Client(app, "POST", COMPLETE, body=body) as other:
                while not one.parts:
                    await asyncio.sleep(0.001)
                app.batch.engine.batcher.step = lambda: 1 / 0
                await asyncio.wait({one.task, other.task}, timeout=10)
        assert "the engine has failed" in one.text and one.text.endswith("data: [DONE]\n\n")
        assert other.status == 503
        for path in ("/health", "/metrics"):
            assert (await ask(app, "GET", path))[0] == 503
        assert isinstance(app.batch.error, ZeroDivisionError)

    run(scenario)


def test_the_engines_failure_is_the_programs(capsys):
    """Status 1, after all streams have their error, with the traceback."""
    engine = Engine(tiny(), None, Options(max_len=300, max_batch=4), tokens=300)
    batch = BatchServer(engine, 4)

    class HTTPServer:
        should_exit = False
        server_state = SimpleNamespace(connections=set())

        async def serve(self, listeners):
            request = tiny().request(PROMPT, Settings(max_tokens=200), Options(max_len=300))
            answer = Answer([OutputStream(tiny().tokenizer, request, PROMPT)])
            batch.submit(answer)
            engine.batcher.step = lambda: 1 / 0
            with pytest.raises(Unavailable, match="the engine has failed"):
                await answer.whole()
            batch.close(answer)
            while not self.should_exit:
                await asyncio.sleep(0.01)

    with server.listen("127.0.0.1", 0) as listener:
        status = asyncio.run(server.serve_until_signal(HTTPServer(), listener, batch, 1.0))
    err = capsys.readouterr().err
    assert status == 1 and "ZeroDivisionError" in err
    assert err.endswith("error: the engine has failed, so the server ends\n")


# ---- What is watched


def test_metrics_have_the_names_of_vllm():
    async def scenario(app):
        await post(app, COMPLETE, **GREEDY, n=2)
        await post(app, COMPLETE, **{**GREEDY, "prompt": "The end.", "max_tokens": 60})
        status, text, headers = await ask(app, "GET", "/metrics")
        assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
        numbers = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                numbers[name.replace('{model_name="tiny"}', "")] = float(value)
        prompt_tokens = len(tiny().encode(PROMPT)) * 2 + len(tiny().encode("The end."))
        assert numbers["vllm:prompt_tokens_total"] == prompt_tokens
        assert numbers["vllm:num_requests_running"] == numbers["vllm:num_requests_waiting"] == 0
        assert numbers["vllm:kv_cache_usage_perc"] == 0
        finished = 'vllm:request_success_total{model_name="tiny",finished_reason='
        assert numbers[finished + '"length"}'] == 2 and numbers[finished + '"stop"}'] == 1
        types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
        assert types["vllm:num_preemptions_total"] == "counter"

    run(scenario)


def test_metrics_are_those_of_the_rounds_and_results(monkeypatch):
    """A text of four rounds, at 1, 2, 4 and 8 seconds."""
    clock = iter((1.0, 2.0, 4.0, 8.0, 8.0))
    monkeypatch.setattr(metrics_page, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    batcher = Engine(tiny(), None, Options(max_len=100, max_batch=1), tokens=100).batcher
    metrics = Metrics('a "b"\\\udce8', batcher)  # a byte that is no UTF-8
    request = Request([1] * 7, Settings(seed=0), num_cached_tokens=2, num_preemptions=3)
    for drafts, accepted in [(0, 0), (3, 2), (3, 3), (2, 0)]:
        request.rounds.append(RoundStats(drafts, accepted))
        metrics.observe({request: [1] * (accepted + 1)}, {})
    times = dict(seconds_queued=0.25, seconds_to_first_token=0.75, seconds=2.0)
    metrics.observe({}, {request: Result("", [1], 0, finish_reason="stop", **times)})
    lines = metrics.render().splitlines()
    label = 'model_name="a \\"b\\"\\\\\ufffd"'
    numbers = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    wanted = {
        "generation_tokens_total": 9,
        "prompt_tokens_total": 7,
        "prefix_cache_queries_total": 7,
        "prefix_cache_hits_total": 2,
        "num_preemptions_total": 3,
        "spec_decode_num_drafts_total": 3,
        "spec_decode_num_draft_tokens_total": 8,
        "spec_decode_num_accepted_tokens_total": 5,
        "inter_token_latency_seconds_count": 3 + 4 + 1,  # one a token after the first round
        "inter_token_latency_seconds_sum": 7.0,
        "time_to_first_token_seconds_sum": 0.75,
        "e2e_request_latency_seconds_sum": 2.0,
        "request_queue_time_seconds_sum": 0.25,
        "request_prefill_time_seconds_sum": 0.5,
        "request_decode_time_seconds_sum": 1.25,
    }
    for name, value in wanted.items():
        assert float(numbers[f"vllm:{name}{{{label}}}"]) == value, name
    buckets = [("0.25", 0), ("0.5", 7), ("2.5", 7), ("5", 8), ("+Inf", 8)]  # 3 of 1/3, 4 of 1/2
    for bound, count in buckets:
        name = f'vllm:inter_token_latency_seconds_bucket{{{label},le="{bound}"}}'
        assert int(numbers[name]) == count, bound
    places = [line.split()[-1] for line in lines if "per_pos_total{" in line]
    assert places == ["2", "2", "1"]


def test_the_state_is_streamed_while_somebody_listens(monkeypatch):
    monkeypatch.setattr(server, "SNAPSHOT_SECONDS", 0.01)
    taken = []

    def snapshot(batcher, num_tokens):
        taken.append(threading.current_thread().name)
        return {"running": len(batcher.running)}

    monkeypatch.setattr(server, "snapshot", snapshot)
    monkeypatch.setattr(server, "MAX_WATCHERS", 1)

    async def scenario(app):
        body = {**GREEDY, "max_tokens": 250, "ignore_eos": True}
        async with Client(app, "GET", "/state") as client:
            async with Client(app, "POST", COMPLETE, body=body):
                while b'data: {"running": 1}\n\n' not in client.parts:
                    await asyncio.sleep(0.001)
            assert (await ask(app, "GET", "/state"))[0] == 429
        count = len(taken)
        await asyncio.sleep(0.05)
        assert len(taken) == count and {*taken} == {"engine"} and app.num_watchers == 0

    run(scenario)


# ---- The program


@contextmanager
def running(*flags: str):
    """The server's process and its port."""
    process = subprocess.Popen(
        [sys.executable, "serve.py", "--port", "0", "--dtype", "float64", *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heard,
    )
    try:
        line = process.stderr.readline()
        while line and "serving" not in line:
            line = process.stderr.readline()
        yield process, int(re.search(r":(\d+)/,", line)[1])
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def opened(port: int, path: str = COMPLETE, **body) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body))
    return connection.getresponse()


def seconds_of(process: subprocess.Popen) -> float:
    """The processor's time that it took so far: other work on the machine does not count."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_large_bodies_hold_up_nobody(tmp_path):
    """Six of the largest of each kind: others are answered, and what streams goes on. The bounds
    are twice what they are on a machine with nothing else to do: 0.5 s, and 0.3 s for a gap."""
    shutil.copytree(ROOT / "models" / "tiny", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["max_position_embeddings"] = 2**17
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    said = [dict(role="user", content=f"message {i} is this") for i in range(20_000)]
    lists = [[] for _ in range(MAX_BRACKETS - 10)]
    floats = [1e300] * 500_000
    kinds = [(COMPLETE, dict(prompt="ab cd " * 600_000)), (COMPLETE, dict(metadata=lists))]
    kinds += [(COMPLETE, dict(metadata=floats))]
    kinds += [(CHAT, dict(messages=[dict(role="user", content="ab cd " * 250_000)]))]
    kinds += [(CHAT, dict(messages=said))]
    small = [(COMPLETE, dict(prompt="a")), (CHAT, dict(messages=said[:1]))]
    flags = ["--target", str(tmp_path), "--kv-memory", "100000000", "--max-batch", "2"]
    with running(*flags) as (process, port), ThreadPoolExecutor(6) as threads:

        def now() -> tuple[float, float]:
            """By the clock, and of processors: another program may have them, and the server's
            threads may have both."""
            return time.perf_counter(), seconds_of(process)

        def between(earlier: tuple[float, float], later: tuple[float, float]) -> float:
            return min(end - begin for begin, end in zip(earlier, later))

        def longest(lines: Iterable[Any]) -> float:
            """The longest time between two lines."""
            return max(between(*pair) for pair in pairwise([now() for _ in lines]))

        for path, body in kinds:
            large = [threads.submit(opened, port, path, **body) for _ in range(6)]
            while not all(future.done() for future in large):
                begun = now()
                for small_path, small_body in small:
                    assert opened(port, small_path, **small_body, max_tokens=1).status == 200
                assert between(begun, now()) < len(small) * 1.0
                stream = opened(port, prompt=PROMPT, max_tokens=60, stream=True, ignore_eos=True)
                assert longest(stream) < 0.6
            for future in large:
                error = json.loads(future.result().read())["error"]
                is_long = error["code"] == "context_length_exceeded"
                assert is_long or error["param"] == "prompt", error


@pytest.mark.slow
def test_a_signal_amid_streams(capsys):
    """What is open is finished; the door is closed; a second server cannot have the port."""
    with running("--grace", "300") as (process, port):
        assert server.main(["--port", str(port)]) == 2
        err = capsys.readouterr().err
        assert f"cannot listen on 127.0.0.1, port {port}" in err and err.count("\n") == 1
        asked = dict(prompt=PROMPT, max_tokens=100, ignore_eos=True, temperature=0, stream=True)
        response = opened(port, **asked)
        first = response.readline()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"no HTTP\r\n\r\n")  # which nobody is told of but its client
            assert connection.recv(99).startswith(b"HTTP/1.1 400")
        process.send_signal(signal.SIGINT)
        rest = response.read()
        assert first.startswith(b"data: ") and rest.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason": "length"' in rest and b'"error"' not in rest
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err.count("\n") == 1 and "finishing open requests (1)" in err


@pytest.mark.slow
def test_grace_is_limited_and_a_second_signal_ends_at_once():
    long = dict(prompt=PROMPT, max_tokens=1000, ignore_eos=True, stream=True)
    with running("--grace", "0.1", "--max-batch", "2") as (process, port):
        response = opened(port, **long)
        response.readline()
        process.send_signal(signal.SIGHUP)
        rest = response.read()
        assert b"the server stops" in rest and rest.endswith(b"data: [DONE]\n\n")
        _, err = process.communicate(timeout=20)
        assert process.returncode == 129
        assert "after 0.1 s, the requests that are still open are ended (1)" in err
    with running() as (process, port):
        response = opened(port, **long)
        process.terminate()
        process.stderr.readline()
        process.terminate()
        assert process.wait(timeout=5) == 143


def test_mistakes_are_one_line(capsys):
    table = r"""
        --port 70000 → --port is 70000
        --max-queue 0 → --max-queue is 0
        --gamma 2 → --gamma needs drafted tokens
        --draft-bits 4 → --draft-bits needs drafted tokens
        --grace -1 → --grace is -1.0
        --api-key '' → --api-key is empty
        --host '' → --host is empty
        --model-name '' → --model-name is empty
        --target '' → --target is empty
        --allow-origin http://localhost:3000/ → --allow-origin is 'http://localhost:3000/'
        --allow-origin localhost:3000 → --allow-origin is 'localhost:3000'
        --allow-origin HTTP://a → --allow-origin is 'HTTP://a'
        --allow-origin http://a:* → --allow-origin is 'http://a:*'
        --allow-origin http://a:80 → --allow-origin is 'http://a:80'
        --allow-origin https://[::1]:443 → --allow-origin is 'https://[::1]:443'
        --tensor-parallel 2 → a server runs in one process
        --api-key 'a{line}' → --api-key (or LLAMA_API_KEY) begins or ends with a space
        --host {byte} → cannot listen on
        --host no.such.host.invalid → cannot listen on no.such.host.invalid
        --prompts x → unrecognized arguments
        --target none → 'none' is neither
    """

    def main(flags: list[str]) -> int:
        return server.main(["--port", "0", *flags])

    check_refusals(main, table, capsys, line="\n", byte="\udcff")


@pytest.mark.slow
def test_a_package_that_is_missing_is_named(tmp_path):
    (tmp_path / "starlette.py").write_text("import package_that_is_missing")
    done = subprocess.run(
        [sys.executable, "serve.py", "--port", "0"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "the server needs the package package_that_is_missing: pip install" in done.stderr


def test_the_model_is_loaded_in_a_thread_that_ends(monkeypatch, capsys):
    threads = []

    def cannot_load(args) -> None:
        threads.append(threading.current_thread())
        raise UserError("no such model")

    monkeypatch.setattr(server, "load_engine", cannot_load)
    assert server.main(["--port", "0"]) == 2
    assert "no such model" in capsys.readouterr().err
    (thread,) = threads
    thread.join(10)
    assert thread is not threading.current_thread() and not thread.is_alive()


def cannot(*arguments) -> None:
    raise UserError("no such model")
