"""Connections: what is bounded before there is a request.

A request begins with its head: a line and headers. uvicorn, which reads it, bounds neither its
bytes nor its time, and once too many connections are open it refuses all requests, though most of
the connections may be silent. Here a connection *owes* bytes of a request:

    from ── its opening, or the end of an answer ──  to ── the end of a request's body ──

  - A connection that owes a head for HEAD_SECONDS is closed. (The time of a body: asgi.py.)
  - A head has at most MAX_HEAD bytes; the same holds for all else that is not the body: trailers,
    the frames of a chunk. (One read of the network more, before it is noticed.)
  - If there are too many connections, of those that owe bytes the one that has been silent for
    longest is closed. So silent ones keep nobody out.
  - A connection that is closed here waits until the client has read what was written. It is dropped
    if nothing of that was read between two looks, PATIENCE seconds apart, or if there are too many
    connections.

A client that closes its sending side has gone, as if it had closed the connection.
"""

import asyncio
import resource
from typing import Any

from app.asgi import PATIENCE

MAX_CONNECTIONS = 1000  # beside those of the texts
MAX_HEAD = 2**16  # bytes
HEAD_SECONDS = 15.0
OTHER_FILES = 128  # that a server may have open


def files_for(wanted: int) -> int:
    """Raise this process's limit of open files for so many connections -> how many it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard - OTHER_FILES)
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return wanted


def bounded_protocol(max_connections: int) -> Any:
    """The class of uvicorn's connections, with these bounds."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Connection(HttpToolsProtocol):
        last_byte = 0.0  # when it came; at first, and after an answer: when a head was owed
        head_limit: asyncio.TimerHandle | None = None
        num_bytes = 0  # that came, and are no body
        unread = 0  # bytes that the client had not read at the last look
        next_look: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.await_head()
            self.look()
            if len(self.connections) > max_connections:
                closed = [other for other in self.connections if other.transport.is_closing()]
                if closed:
                    return closed[0].transport.abort()
                silent = [other for other in self.connections if other.owes]
                longest = min(silent, key=lambda other: other.last_byte)
                longest.refuse("503 Service Unavailable", "too many connections are open")

        def connection_lost(self, error: Exception | None) -> None:
            self.head_limit.cancel()
            self.next_look.cancel()
            super().connection_lost(error)

        def look(self) -> None:
            """Drop a connection that is closed, if nothing was read since the last look."""
            unread = self.transport.get_write_buffer_size()
            if self.transport.is_closing() and unread == self.unread:
                return self.transport.abort()
            self.unread = unread
            self.next_look = self.loop.call_later(PATIENCE, self.look)

        def data_received(self, data: bytes) -> None:
            self.last_byte = self.loop.time()
            self.num_bytes += len(data)
            super().data_received(data)
            if self.num_bytes > MAX_HEAD:
                status = "431 Request Header Fields Too Large"
                self.refuse(
                    status, f"the headers are too long: at most {MAX_HEAD:,} bytes are read"
                )

        def on_headers_complete(self) -> None:
            self.head_limit.cancel()
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self.num_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self.num_bytes = 0
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # no other request has come meanwhile
                self.await_head()

        @property
        def owes(self) -> bool:
            return self.cycle is None or self.cycle.more_body or self.cycle.response_complete

        def await_head(self) -> None:
            self.last_byte = self.loop.time()
            self.head_limit = self.loop.call_later(HEAD_SECONDS, self.transport.close)

        def refuse(self, status: str, message: str) -> None:
            """Answer without a request, and close."""
            if self.transport.is_closing():
                return
            head = (
                f"HTTP/1.1 {status}\r\ncontent-length: {len(message)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write((head + message).encode())
            self.transport.close()
            self.connections.discard(self)

    return Connection
