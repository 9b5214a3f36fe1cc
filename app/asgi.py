"""What the server adds to starlette: bounds on what a client sends and reads, and its errors.

Nothing here is without a bound: a body has at most MAX_BODY bytes and PATIENCE seconds to come, and
a client that does not read for PATIENCE seconds is given up. A client that goes ends the work that
is done for it.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import anyio
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

MAX_BODY = 2**22  # bytes
MAX_DISCARDED = 2**28  # bytes of a body that is too long
PATIENCE = 60.0  # seconds

T = TypeVar("T")
Headers = Mapping[str, str]
EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # for nginx, which would gather them
}
DONE = b"data: [DONE]\n\n"


@dataclass(eq=False)
class HttpError(Exception):
    """An answer that is an error, with the fields that OpenAI's clients read. (A mistake in a body
    is a UserError, as anywhere: server.py.)"""

    status: int
    message: str
    _: KW_ONLY
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Headers | None = None

    def __str__(self) -> str:
        return self.message

    def to_dict(self) -> dict[str, Any]:
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": told}


# ---- The request


class Upload:
    """A request's body: it comes, and then it waits to be read."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.last_part = time.monotonic()  # when it came
        self.is_whole = False
        self.limit = anyio.move_on_after(PATIENCE)  # the time that it has to come

    async def receive(self, request: Request, on_part: Callable[[], None]) -> None:
        """HttpError if it is too long or too slow, or if `limit` is cancelled. on_part: is called
        for each part that comes."""
        size = 0
        with self.limit:
            async for part in request.stream():
                size += len(part)
                self.data += part
                self.last_part = time.monotonic()
                if size > MAX_BODY:  # go on without keeping it: who still sends reads no answer
                    self.data.clear()
                if size > MAX_DISCARDED:
                    break
                on_part()
            self.is_whole = True
        if size > MAX_BODY:
            raise HttpError(413, f"the body is too long: at most {MAX_BODY:,} bytes")
        if not self.is_whole:
            raise HttpError(
                408,
                f"the body did not come within {PATIENCE:.0f} s, or it paused while other bodies "
                "needed the memory: send it at once, or try again later",
            )


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Do the work, but cancel it when the client goes. The body has been read."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await future


# ---- The answer


class Wire:
    """Sends an answer to a client. ClientDisconnect if the client does not read it."""

    def __init__(self, send: Send):
        self.send = send
        self.headers: Headers = {}  # of any answer
        self.start: Message = {}  # goes with the first part: until then it can be another one
        self.is_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(self.headers)
            self.start = message
            return
        if not self.is_started:
            self.is_started = True
            await self._send(self.start)
        await self._send(message)

    async def tell(self, error: HttpError, scope: Scope) -> None:
        """The error as an answer, or as the last event of a stream."""
        if self.is_started:
            last = event(error.to_dict()) + DONE
            await self({"type": "http.response.body", "body": last, "more_body": False})
        else:
            await Json(error.to_dict(), error.status, error.headers)(scope, None, self)

    async def _send(self, message: Message) -> None:
        try:
            with anyio.fail_after(PATIENCE):
                await self.send(message)
        except OSError:  # the connection is closed, or it took too long
            raise ClientDisconnect from None


class Json(Response):
    """An object. Half a surrogate pair, which UTF-8 does not have, is escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


class Events(StreamingResponse):
    """Server-sent events: "data: …" and an empty line. `events` is closed at their end."""

    def __init__(self, events: AsyncIterator[bytes], headers: Headers = {}):
        super().__init__(events, headers={**EVENTS, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await unless_gone(receive, self.stream_response(send))


def event(content: Any) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()
