"""The application with a client, without a network in between; folders of models that call."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.util import find_spec

import pytest
import torch

for package in ("httptools", "pydantic", "starlette", "uvicorn"):
    pytest.importorskip(package, reason="the extra 'server' is not installed")
from app import openai
from app.metrics import Metrics
from app.openai import Offer
from app.server import Application
from generate import Engine
from loading import Model, load_draft
from serve import BatchServer
from settings import Options, Settings

PROMPT = "Once upon a time"
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
needs_llguidance = pytest.mark.skipif(not find_spec("llguidance"), reason="needs llguidance")


@cache
def tiny() -> Model:
    return Model.load("tiny", "cpu", torch.float64)


class Client:
    """One request to an application, without a network in between.

    reads: how many parts of the answer it reads; None: all.
    """

    def __init__(self, app, method, path, body=b"", headers=(), reads=None):
        self.app = app
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        pairs = {"host": "127.0.0.1:8000", **dict(headers)}
        self.scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in pairs.items() if v is not None],
        }
        self.gone = asyncio.Event()
        self.reads = reads
        self.parts: list[bytes] = []
        self.status = 0
        self.answer_headers: dict[str, str] = {}

    async def __aenter__(self) -> "Client":
        half = len(self.body) // 2
        self.to_send = [(self.body[:half], True), (self.body[half:], False)]
        self.task = asyncio.ensure_future(self.app(self.scope, self.receive, self.send))
        return self

    async def __aexit__(self, *error) -> None:
        self.gone.set()
        await self.task

    async def receive(self):
        if self.to_send:
            body, more = self.to_send.pop(0)
            return {"type": "http.request", "body": body, "more_body": more}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            for name, value in message["headers"]:
                self.answer_headers[name.decode()] = value.decode()
            return
        while self.reads is not None and len(self.parts) >= self.reads:
            await asyncio.sleep(0.001)
        self.parts.append(message["body"])

    @property
    def text(self) -> str:
        return b"".join(self.parts).decode()


async def ask(app, method, path, body=b"", headers=()) -> tuple[int, str, dict[str, str]]:
    client = Client(app, method, path, body=body, headers=headers)
    async with client:
        await asyncio.wait({client.task}, timeout=60)
    return client.status, client.text, client.answer_headers


async def post(app, path, **body):
    """The object that is answered."""
    status, text, _ = await ask(app, "POST", path, body)
    assert status == 200, text
    return json.loads(text)


async def events(app, path, **body) -> list[dict]:
    """The chunks of a stream."""
    status, text, headers = await ask(app, "POST", path, {"stream": True, **body})
    assert status == 200, text
    assert headers["content-type"].startswith("text/event-stream")
    assert text.endswith("data: [DONE]\n\n")
    lines = text.split("\n\n")
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line[6:]) for line in lines[:-2]]


async def refused(app, path, body, headers=()) -> tuple[int, dict]:
    """The status and the error, which tells no path of the server's files."""
    status, text, _ = await ask(app, "POST", path, body, headers)
    assert str(app.offer.model.folder) not in text
    return status, json.loads(text)["error"]


def run(
    scenario: Callable[[Application], Awaitable[None]],
    capacity=16,
    model=None,
    limit=300,
    draft=None,
    **how,
) -> None:
    """Play it against an application; at its end no block may be taken, and no text open."""
    model = model or tiny()
    draft = load_draft(draft, model)
    limit = min(limit, model.llama.config.max_position_embeddings)
    engine = Engine(model, draft, Options(max_len=limit, max_batch=4), tokens=4 * limit)
    metrics = Metrics("tiny", engine.batcher)
    batch = BatchServer(engine, capacity, metrics.observe)
    offer = Offer(model, "tiny", limit, settings=Settings())

    async def play() -> None:
        batch.start()
        try:
            await asyncio.wait_for(scenario(Application(offer, batch, metrics, **how)), 100)
            assert batch.num_texts == 0
            if batch.error is None:
                _, _, live = await batch.ask(engine.caches[0].check)
                assert live == 0 and not engine.batcher.running and not engine.batcher.waiting
        finally:
            batch.stop()

    asyncio.run(play())


def read(is_chat: bool, offer: Offer, **fields) -> openai.Asked:
    """What is read from a body with these fields, and with a prompt or a message."""
    said = dict(messages=[dict(role="user", content=PROMPT)]) if is_chat else dict(prompt=PROMPT)
    body = said | fields
    return openai.read_request(json.dumps(body).encode(), is_chat, offer)
