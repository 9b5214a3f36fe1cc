"""Connections: heads and silences are bounded, and silent clients keep nobody out."""

import asyncio
import resource
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

pytest.importorskip("app.server", reason="the extra 'server' is not installed")
import uvicorn

from app import connections
from app.connections import MAX_HEAD, OTHER_FILES, Connection, close_silent, files_for
from app.server import listen

GET = b"GET / HTTP/1.1\r\nhost: a\r\n"
POST = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


async def answers(scope, receive, send) -> None:
    """An application: it reads the body, waits as long as the path says, and answers its size. A
    query makes the answer so many times as long."""
    size = 0
    message = await receive()
    while message.get("more_body"):
        size += len(message["body"])
        message = await receive()
    await asyncio.sleep(float(scope["path"].strip("/") or 0))
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"x-size", b"%d" % size)]}
    )
    await send({"type": "http.response.body", "body": b"done" * int(scope["query_string"] or 1)})


class Client:
    """A connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, within: float = 5.0) -> bytes:
        """Up to the end of an answer, or of the connection."""
        data = b""
        while not data.endswith(b"\r\n0\r\n\r\n"):
            try:
                part = await asyncio.wait_for(self.reader.read(2**16), within)
            except ConnectionError:
                break
            if not part:
                break
            data += part
        return data


def play(
    scenario: Callable[[Callable[[], Awaitable[Client]]], Awaitable[None]], most: int = 100
) -> None:
    """Play it against a server that takes `most` connections."""

    async def run() -> None:
        config = uvicorn.Config(
            answers, lifespan="off", ws="none", log_level="critical", http=Connection
        )
        server = uvicorn.Server(config)
        opened = []

        async def connect() -> Client:
            opened.append(Client(*await asyncio.open_connection("127.0.0.1", port)))
            return opened[-1]

        with listen("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            config.load()
            server.lifespan = config.lifespan_class(config)
            await server.startup(sockets=[listener])
            closing = asyncio.ensure_future(close_silent(server.server_state.connections, most))
            try:
                await scenario(connect)
            finally:
                for client in opened:
                    client.writer.close()
                closing.cancel()
                await server.shutdown(sockets=[listener])

    asyncio.run(run())


def test_what_is_no_body_has_a_bound():
    """A head, one header or many; a chunk's frame; what follows the chunks. Bodies have another."""
    letters = b"a" * (MAX_HEAD - 1000)
    many = b"a: b\r\n" * (MAX_HEAD // 6 - 100)
    chunks = (b"%x\r\n" % 2**18 + b"a" * 2**18 + b"\r\n") * 4
    small = b"1\r\na\r\n" * MAX_HEAD
    within = [
        GET + b"x: " + letters + b"\r\n\r\n",
        GET + many + b"\r\n",
        POST + b"1;" + letters + b"\r\na\r\n0\r\n\r\n",
        POST + b"0\r\nx: " + letters + b"\r\n\r\n",
        POST + chunks + b"0\r\n\r\n",
        POST + small + b"0\r\n\r\n",
    ]
    more = b"b" * 2**20
    beyond = [
        GET + b"x: " + more,
        GET + b"a: b\r\n" * 2**17,
        POST + b"1;" + more,
        POST + b"0\r\nx: " + more,
        b"GET /" + more,
    ]

    async def scenario(connect):
        for data in within:
            client = await connect()
            client.send(data)
            assert (await client.answer()).startswith(b"HTTP/1.1 200"), data[:80]
            client.send(data)  # the next request has the bound for itself
            assert (await client.answer()).startswith(b"HTTP/1.1 200"), data[:80]
        for data in beyond:
            client = await connect()
            client.send(data)
            told = await client.answer()
            assert told == b"" or told.startswith((b"HTTP/1.1 431", b"HTTP/1.1 200")), data[:80]
            assert client.reader.at_eof() or client.reader.exception(), data[:80]
        client = await connect()
        for i in range(MAX_HEAD // 1000 + 2):  # in parts, so that the answer is read
            client.send((GET if i == 0 else b"") + b"x%d: " % i + b"a" * 1000 + b"\r\n")
            await client.writer.drain()
            await asyncio.sleep(0.001)
        assert (await client.answer()).startswith(b"HTTP/1.1 431")

    play(scenario)


@pytest.mark.slow
def test_an_answer_that_nobody_reads_is_dropped(monkeypatch):
    """After a while, or where there are too many connections; one that is read slowly is not."""
    long = GET.replace(b"/ ", b"/?4000000 ") + b"\r\n"
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)

    async def unread(client: Client) -> socket.socket:
        """Another client of the same server: it asks for a long answer, and reads nothing."""
        other = socket.socket()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        other.connect(client.writer.get_extra_info("peername"))
        other.sendall(long)
        other.settimeout(1)
        await asyncio.sleep(1)  # the server closes it
        return other

    def is_dropped(other: socket.socket) -> bool:
        size = 0
        with other, suppress(ConnectionError):
            while part := other.recv(2**20):
                size += len(part)
        return size < 16_000_000

    async def after_a_while(connect):
        slow = await connect()
        slow.send(long)
        other = await unread(slow)
        size = 0
        while part := await slow.reader.read(2**20):
            size += len(part)
            await asyncio.sleep(0.001)
        await asyncio.sleep(3)
        assert size > 16_000_000 and is_dropped(other)

    async def too_many(connect):
        first = await connect()
        other = await unread(first)
        another = await connect()
        another.send(GET + b"\r\n")
        assert (await another.answer()).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(1)  # until the server has looked
        assert is_dropped(other)

    with monkeypatch.context() as patch:
        patch.setattr(connections, "PATIENCE", 2.0)
        play(after_a_while)
    play(too_many, most=1)


def test_a_silent_connection_is_closed(monkeypatch):
    """One that sends nothing, half a head, or nothing after its answer; not one that waits."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)

    async def scenario(connect):
        clients = [await connect() for _ in range(4)]
        for client, data in zip(clients, (b"", GET, b"\r\n\r\n", GET + b"\r\n")):
            client.send(data)
        patient = await connect()
        patient.send(GET.replace(b"/ ", b"/0.5 ") + b"\r\n")
        both = await connect()  # the second request is under way when the first has its answer
        both.send(GET + b"\r\n" + GET.replace(b"/ ", b"/0.5 ") + b"\r\n")
        assert (await clients[3].answer()).startswith(b"HTTP/1.1 200")
        for client in clients:
            assert await asyncio.wait_for(client.reader.read(), 2) == b""
        assert (await patient.answer()).startswith(b"HTTP/1.1 200")
        told = await asyncio.wait_for(both.reader.read(), 2)
        assert told.count(b"HTTP/1.1 200") == 2

    play(scenario)


async def is_closed(client: Client) -> bool:
    with suppress(ConnectionError):
        await asyncio.wait_for(client.reader.read(), 5)
    return True


@pytest.mark.slow
def test_silent_connections_make_room(monkeypatch):
    """Those that owe a head or a body go, in the order of their last bytes; a newcomer gets in,
    again and again. If all others wait for their answers, the newcomer goes."""
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.02)
    owes = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{"
    slow = GET.replace(b"/ ", b"/1 ") + b"\r\n"

    async def scenario(connect):
        for begun in (GET, owes, POST, GET + b"\r\n" + owes):  # the last one: two in one packet
            silent = []
            for _ in range(3):
                silent.append(await connect())
                silent[-1].send(begun)
                await asyncio.sleep(0.1)
            silent[0].send(b"1")  # of a head it does not count
            await asyncio.sleep(0.1)
            waiting = []
            for i in (0, 1, 2) if begun == GET else (1, 2, 0):
                waiting.append(await connect())
                waiting[-1].send(slow)
                assert await is_closed(silent[i])
            assert await is_closed(await connect())
            for client in waiting:
                assert (await client.answer()).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.1)  # they are silent now, for longer than those that come

    play(scenario, most=3)


def test_a_client_that_closes_its_sending_side_has_gone():
    async def scenario(connect):
        client = await connect()
        client.send(GET.replace(b"/ ", b"/0.2 ") + b"\r\n")
        client.writer.write_eof()
        assert await client.answer() == b""

    play(scenario)


def test_files_are_counted(monkeypatch):
    limits = [(100, 5000)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    assert files_for(1000) == 1000 and limits[-1] == (2000 + OTHER_FILES, 5000)
    assert files_for(900) == 900 and len(limits) == 2  # never lowered
    assert files_for(9000) == 5000 - OTHER_FILES and limits[-1] == (5000, 5000)
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert files_for(9000) == 9000 and len(limits) == 4
