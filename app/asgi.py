"""HTTP as an ASGI application sees it: a request's parts come in, an answer's parts go out.

ASGI is three things that the HTTP server (uvicorn) calls an application with: `scope`, a dict about
the request; `receive()`, the next part of its body, or that the client has gone; `send(part)`, of
the answer, which waits while the client does not read. `Exchange` makes verbs of them.

Nothing here is without a bound: a body has at most MAX_BODY bytes and PATIENCE seconds to come, and
a client that does not read for PATIENCE seconds is given up.
"""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

MAX_BODY = 2**22  # bytes
MAX_DISCARDED = 2**28  # bytes of a body that is too long
PATIENCE = 60.0  # seconds
PART = 2**16  # bytes of an answer that are given to the network at a time

T = TypeVar("T")
Headers = dict[str, str]
EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # for nginx, which would gather them
}
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class HttpError(Exception):
    """An answer that is an error, with the fields that OpenAI's clients read."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Headers | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def to_dict(self) -> dict[str, Any]:
        fields = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": fields}


class ClientGone(Exception):
    """The client has closed the connection, or reads no more."""


class Exchange:
    """One HTTP request, and the answer to it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.is_started = False  # whether the status is sent
        self.sending_since = math.inf  # when the client was given what it has not taken yet
        self.num_bytes = 0  # of the body, so far; 0 if it is too long
        self.last_part = 0.0  # when the last of them came
        self.coming: asyncio.Future[bytes] | None = None  # the body
        self.headers: Headers = {}
        self.for_page: Headers = {}  # of the answer: what lets a page of another origin read it
        for name, value in scope["headers"]:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    # ---- The request

    async def read_body(self, on_part: Callable[[], None] = lambda: None) -> bytes:
        """HttpError if it is too long or too slow, or if `coming` is cancelled. on_part: is called
        for each part that comes."""
        self.coming = asyncio.ensure_future(self._read_body(on_part))
        try:
            await asyncio.wait({self.coming}, timeout=PATIENCE)
        finally:
            self.coming.cancel()
        if self.coming.cancelled() or not self.coming.done():
            raise HttpError(
                408,
                f"the body did not come within {PATIENCE:.0f} s, or it paused while other bodies "
                "needed the memory: send it at once, or try again later",
            )
        return self.coming.result()

    async def _read_body(self, on_part: Callable[[], None]) -> bytes:
        """A body that is too long is read, and thrown away: who still sends reads no answer."""
        parts = []
        size = 0
        has_more = True
        while has_more and size <= MAX_DISCARDED:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            parts.append(part)
            if size > MAX_BODY:
                parts.clear()
            self.num_bytes = size if size <= MAX_BODY else 0
            self.last_part = time.monotonic()
            on_part()
            has_more = message.get("more_body", False)
        if size > MAX_BODY:
            raise HttpError(413, f"the body is too long: at most {MAX_BODY:,} bytes are read")
        return b"".join(parts)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work, but cancel it when the client goes away, or does not read. The body has been
        read."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._until_gone())
        try:
            while not task.done():
                often = PATIENCE / 10
                await asyncio.wait({task, gone}, timeout=often, return_when="FIRST_COMPLETED")
                is_stuck = time.monotonic() - self.sending_since > PATIENCE
                if not task.done() and (gone.done() or is_stuck):
                    raise ClientGone
            return task.result()
        finally:
            for future in (task, gone):
                future.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await future

    async def _until_gone(self) -> None:
        message = await self.receive()
        while message["type"] != "http.disconnect":
            message = await self.receive()

    # ---- The answer

    async def start(self, status: int, headers: Headers) -> None:
        self.is_started = True
        every = headers | self.for_page
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in every.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, body: bytes, has_more: bool = True) -> None:
        """The next part of the answer. ClientGone if the client does not read it."""
        await self._send({"type": "http.response.body", "body": body, "more_body": has_more})

    async def _send(self, message: dict[str, Any]) -> None:
        self.sending_since = time.monotonic()
        try:
            await self.send(message)
        except OSError:
            raise ClientGone from None
        self.sending_since = math.inf

    async def reply(self, body: bytes, headers: Headers, status: int = 200) -> None:
        """A whole answer, in parts: its end is sent when the client has read nearly all of it."""
        await self.start(status, headers | {"content-length": str(len(body))})
        for begin in range(0, len(body), PART):
            await self.write(body[begin : begin + PART])
        await self.write(b"", has_more=False)

    async def reply_json(self, content: Any, headers: Headers, status: int = 200) -> None:
        body = json.dumps(content).encode()
        await self.reply(body, headers | {"content-type": "application/json"}, status)

    # ---- Server-sent events: "data: …" and an empty line

    async def start_events(self, headers: Headers) -> None:
        await self.start(200, headers | EVENTS)

    async def write_event(self, content: Any) -> None:
        await self.write(f"data: {json.dumps(content)}\n\n".encode())

    async def end_events(self, last: str) -> None:
        await self.write(f"data: {last}\n\n".encode(), has_more=False)
