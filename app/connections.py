"""Connections: what is bounded before there is a request.

A request begins with its head: a line and headers. uvicorn, which reads it, bounds neither its
bytes nor its time, and once too many connections are open it refuses all requests, though most of
the connections may be silent. Here a connection *owes* bytes of a request:

    from ── its opening, or the end of an answer ──  to ── the end of a request's body ──

  - A connection that owes a head for HEAD_SECONDS is closed; one whose client does not read the end
    of an answer, after PATIENCE seconds. (The time of a body, and of an answer: asgi.py.)
  - A head has at most MAX_HEAD bytes; the same holds for all else that is not the body: trailers,
    the frames of a chunk. (One read of the network more, before it is noticed.)
  - If there are too many connections, of those that owe bytes the one that has been silent for
    longest is closed. So silent ones keep nobody out.

A client that closes its sending side has gone, as if it had closed the connection.

uvicorn's other parser, h11, bounds heads by itself. But it is written in Python: a body in chunks
of one byte each would keep the event loop from everybody else for seconds.
"""

import asyncio
import resource
from collections.abc import Collection
from typing import Any, NamedTuple

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.asgi import PATIENCE

MAX_CONNECTIONS = 1000  # beside those of the texts
MAX_HEAD = 2**16  # bytes
HEAD_SECONDS = 15.0
LOOK_SECONDS = 0.1
OTHER_FILES = 128  # that a server may have open
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n"


def files_for(wanted: int) -> int:
    """Raise this process's limit of open files for so many connections, and as many that come
    between two looks -> how many it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return min(wanted, needed - OTHER_FILES)


class Connection(HttpToolsProtocol):
    """A connection of uvicorn's, in which what is not a body is bounded."""

    num_heard = 0  # bytes
    num_bytes = 0  # that came since the last part of a body

    def data_received(self, data: bytes) -> None:
        self.num_heard += len(data)
        self.num_bytes += len(data)
        super().data_received(data)
        if self.num_bytes > MAX_HEAD and not self.transport.is_closing():
            self.transport.write(TOO_LONG)
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        self.num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.num_bytes = 0
        super().on_message_complete()


class Owing(NamedTuple):
    """A connection that owes bytes. It is equal to the one of the last look if it was silent."""

    connection: Connection
    cycle: Any  # uvicorn's last request
    is_over: bool  # and its answer, so that a head is owed
    unread: int  # bytes of the answer
    num_heard: int  # those of a head do not count


def owing(connections: Collection[Connection]) -> list[Owing]:
    found = []
    for connection in connections:
        cycle = connection.cycle
        is_over = cycle is None or cycle.response_complete or connection.transport.is_closing()
        if is_over or cycle.more_body:
            unread = connection.transport.get_write_buffer_size()
            num_heard = 0 if is_over else connection.num_heard
            found.append(Owing(connection, cycle, is_over, unread=unread, num_heard=num_heard))
    return found


async def close_silent(connections: Collection[Connection], most: int) -> None:
    """Keep at most so many connections open, and none that is silent for too long."""
    since: dict[Owing, float] = {}
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now = asyncio.get_running_loop().time()
        since = {each: since.get(each, now) for each in owing(connections)}
        for i, each in enumerate(sorted(since, key=since.get)):
            limit = PATIENCE if each.unread else HEAD_SECONDS
            is_late = each.is_over and now - since[each] > limit
            if is_late or i < len(connections) - most:
                each.connection.transport.abort()
