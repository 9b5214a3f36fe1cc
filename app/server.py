"""The server: who may ask what, and how it begins and ends. Its flags: flags.py.

Trust. It listens on 127.0.0.1 unless told otherwise. There it answers only to the names of this
machine, so that no web page reaches it under a name of its own (DNS rebinding); and a page of
another origin is refused everywhere, unless --allow-origin names it (CORS). With --api-key, /v1 and
/state want the key. All that clients share is bounded: texts (QueueFull is 429), bodies, watchers,
grammars that are compiled, the time of a client that does not read (asgi.py), connections and their
heads (connections.py). TOUR.md has the table.

The end. SIGTERM, SIGHUP and Ctrl-C close the door: what is open is finished, for up to --grace
seconds, and then ends with an error; a second signal ends the program at once. An exception of a
step ends all streams with an error, and the program with its traceback and status 1.

    0   never: a server ends by a signal (129, 130, 143), an engine's failure (1) or a mistake (2)
"""

import asyncio
import gc
import hmac
import ipaddress
import os
import re
import signal
import socket
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from app.asgi import DONE, Events, Headers, HttpError, Json, Upload, Wire, event, unless_gone
from app.cli import load, start
from app.connections import (
    HEAD_SECONDS,
    MAX_CONNECTIONS,
    Connection,
    close_silent,
    files_for,
)
from app.flags import server_flags
from app.metrics import Metrics
from app.openai import Asked, Offer, Reply, model_card, read_request
from app.shell import noted_signals, say, status
from app.state import snapshot
from automaton import run_in_thread
from devices import find_device
from errors import TooManyTokens, UserError, brief
from generate import Engine
from loading import Model
from request import Settings
from serve import Answer, BatchServer, QueueFull, Unavailable, Update

CHATS = "/v1/chat/completions"
PATHS = f"OpenAI's protocol is at {CHATS}, /v1/completions and /v1/models"
PAGE = Path(__file__).parent / "page.html"
# Reading a body takes a thread the longer, the larger the body is. Bodies above SMALL_BODY have
# threads of their own, so that small ones never wait for them.
SMALL_BODY = 2**16  # bytes
LARGE_BODIES = 1  # that are read at a time; others wait
MAX_HELD = 2**28  # bytes of large bodies that come or wait
# Threads that read bodies share Python's lock with the engine's thread, which wants it again after
# each kernel: it waits for at most so long.
SWITCH_SECONDS = 0.0005
MAX_WATCHERS = 32  # of /state
MAX_COMPILING = 2  # grammars at a time; others wait
COMPILE_SECONDS = 10.0
SNAPSHOT_SECONDS = 0.1
PREFLIGHT_SECONDS = 600  # a browser may remember the answer
# A text's client gets the next chunk after so long for each open text: so the event loop writes at
# most a thousand chunks a second, and leaves the engine its time.
CHUNK_SECONDS = 0.001


# ---- The application ---------------------------------------------------------------------------


@dataclass(eq=False)
class Application:
    """Answers requests: what uvicorn calls (ASGI)."""

    offer: Offer
    batch: BatchServer
    metrics: Metrics
    api_key: str | None = None
    is_local: bool = True  # it listens to this machine alone
    origins: Collection[str] = ()  # those of pages that may use it, "*" for all

    def __post_init__(self) -> None:
        self.card = model_card(self.offer)
        self.uploads: set[Upload] = set()
        self.large_bodies = ThreadPoolExecutor(LARGE_BODIES, "large bodies")
        self.compiling = asyncio.Semaphore(MAX_COMPILING)
        self.num_watchers = 0
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
            Route("/state", self.state),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route(CHATS, self.make_texts, methods=["POST"]),
            Route("/v1/completions", self.make_texts, methods=["POST"]),
        ]
        self.router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = Wire(send)
        try:
            await self.answer(scope | {"app": self}, receive, wire)
        except ClientDisconnect:
            return
        except Exception as error:
            failure = http_error(error, scope["path"])
            if failure.status == 500:
                traceback.print_exception(error)
            with suppress(ClientDisconnect):
                await wire.tell(failure, scope)

    async def answer(self, scope: Scope, receive: Receive, wire: Wire) -> None:
        headers = Request(scope).headers
        self.check_host(headers)
        wire.headers = self.check_origin(headers)
        if scope["method"] == "OPTIONS" and wire.headers:
            return await preflight(headers)(scope, receive, wire)
        if scope["path"].startswith("/v1/") or scope["path"] == "/state":
            self.check_key(headers)
        await self.router(scope, receive, wire)

    # ---- Trust

    def check_host(self, headers: Headers) -> None:
        """Only this machine's names where it listens to this machine alone."""
        host = headers.get("host", "")
        name = re.sub(r":\d*$", "", host).strip("[]")  # of 127.0.0.1:8000, of [::1]:8000
        if self.is_local and not is_loopback(name):
            raise HttpError(
                403,
                f"the host {brief(repr(host), 100)} is not this machine: use localhost, or --host; "
                "a proxy sends its clients' or its upstream's name unless it is told localhost",
            )

    def check_origin(self, headers: Headers) -> Headers:
        """No pages but the server's own and those of --allow-origin -> what lets such a page read
        the answer."""
        origin = headers.get("origin")
        if origin is None or origin.split("://")[-1] == headers.get("host", ""):
            return {}
        if origin not in self.origins and "*" not in self.origins:
            shown = brief(origin, 100)
            raise HttpError(
                403, f"pages of {shown} may not use this server: --allow-origin {shown} lets them"
            )
        return {"access-control-allow-origin": origin, "vary": "origin"}

    def check_key(self, headers: Headers) -> None:
        if self.api_key is None:
            return
        given = headers.get("authorization", "")
        scheme, _, key = given.partition(" ")
        if scheme.lower() == "bearer":
            given = key.strip(" \t")  # a byte of a letter may be a space in Latin-1
        same = hmac.compare_digest(given.encode("latin-1"), os.fsencode(self.api_key))
        if not same:  # compared in constant time
            raise HttpError(
                401,
                "this server wants its --api-key: Authorization: Bearer KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    # ---- What there is

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE.read_bytes())

    async def health(self, request: Request) -> Response:
        self.batch.check_room(0)
        return Json({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return Json({"object": "list", "data": [self.card]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self.offer.name:
            raise HTTPException(404)
        return Json(self.card)

    async def show_metrics(self, request: Request) -> Response:
        text = await self.batch.ask(self.metrics.render)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def state(self, request: Request) -> Response:
        """Snapshots of the batch, at most ten a second, while somebody listens."""
        return Events(self._snapshots(request.method == "HEAD"))

    async def _snapshots(self, wants_headers: bool) -> AsyncIterator[bytes]:
        if self.num_watchers >= MAX_WATCHERS:
            raise QueueFull(f"{MAX_WATCHERS} watch already: try again later")
        self.num_watchers += 1
        try:
            while not (wants_headers or self.batch.refusal):
                yield event(await self.batch.ask(self.take_picture))
                await asyncio.sleep(SNAPSHOT_SECONDS)
        finally:
            self.num_watchers -= 1

    def take_picture(self) -> dict[str, Any]:
        """Called in the engine thread, between two steps."""
        num_tokens = self.metrics.counts["generation_tokens"]
        return snapshot(self.batch.engine.batcher, num_tokens)

    # ---- Texts

    async def make_texts(self, request: Request) -> Response:
        offered = request.headers.get("upgrade")
        if offered and "upgrade" in request.headers.get("connection", "").lower():
            # uvicorn has dropped the body.
            raise UserError(
                f"Upgrade: {brief(repr(offered), 100)} is not supported: speak HTTP/1.1 (in Java: "
                "HttpClient.Version.HTTP_1_1)",
            )
        self.batch.check_room(1)
        asked = await self.read(request)
        if len(asked.streams) > self.batch.capacity:
            raise UserError(
                f"{len(asked.streams)} outputs are asked for, and the server accepts "
                f"{self.batch.capacity}: ask for fewer"
            )
        for stream in asked.streams:
            self.batch.engine.batcher.check(stream.request)
        if asked.follows is not None:
            await self.compile(asked)
        reply = Reply(asked, self.offer)
        answer = Answer(asked.streams, asked.body.stream)
        headers = {"x-request-id": reply.id}
        if asked.body.stream:
            return Events(self._chunks(answer, asked, reply), headers)
        updates = await unless_gone(request.receive, self._whole(answer))
        return Json(reply.completion(updates), headers=headers)

    async def read(self, request: Request) -> Asked:
        """The body, once it has come, in a thread."""
        upload = Upload()
        self.uploads.add(upload)
        try:
            await upload.receive(request, self.make_room_for_uploads)
            threads, read = None, read_request
            if len(upload.data) > SMALL_BODY:
                threads, read = self.large_bodies, read_large
            arguments = upload.data, request.scope["path"] == CHATS, self.offer
            asked = asyncio.get_running_loop().run_in_executor(threads, read, *arguments)
            return await unless_gone(request.receive, asked)
        finally:
            self.uploads.remove(upload)

    def make_room_for_uploads(self) -> None:
        """If large bodies take too much memory, give up the one that has been silent for longest;
        then the next one."""
        large = [upload for upload in self.uploads if len(upload.data) > SMALL_BODY]
        size = sum(len(upload.data) for upload in large)
        for upload in sorted(large, key=lambda upload: upload.last_part):
            if size > MAX_HELD and not upload.is_whole:
                upload.limit.cancel()
                size -= len(upload.data)

    async def compile(self, asked: Asked) -> None:
        """Compile the grammar of the texts. Unavailable if it, or others, take too long."""
        try:
            with anyio.fail_after(COMPILE_SECONDS):
                await self.compiling.acquire()
                try:
                    compiled = asyncio.wrap_future(self.offer.model.grammars.submit(asked.follows))
                except BaseException:  # no thread could be started
                    self.compiling.release()
                    raise
                compiled.add_done_callback(lambda _: self.compiling.release())
                await asyncio.shield(compiled)  # a thread is not to be cancelled
        except UserError as error:
            # Much of the grammar may be ours, so the field that asks for it stands for it.
            rule = str(error).replace(str(asked.follows), asked.param)
            raise UserError(rule, asked.param) from None
        except TimeoutError:
            raise Unavailable(
                f"the grammar was not compiled within {COMPILE_SECONDS:.0f} s: simplify it, or try "
                "again later"
            ) from None
        for stream in asked.streams:
            stream.request.compiled = compiled.result()

    async def _whole(self, answer: Answer) -> list[Update]:
        try:
            self.batch.submit(answer)
            return await answer.whole()
        finally:
            self.batch.close(answer)

    async def _chunks(self, answer: Answer, asked: Asked, reply: Reply) -> AsyncIterator[bytes]:
        try:
            self.batch.submit(answer)
            async for updates in answer.updates():
                for update in updates:
                    yield event(reply.chunk(update))
                if answer.num_unfinished:
                    await asyncio.sleep(CHUNK_SECONDS * self.batch.num_texts)
            if asked.body.stream_options.include_usage:
                yield event(reply.usage_chunk())
            yield DONE
        finally:
            self.batch.close(answer)


def read_large(*arguments: Any) -> Asked:
    """`read_request`, and then a rest of the same length. One call of json or pydantic holds
    Python's lock for a whole large body, so without a rest small requests would wait for several
    of them."""
    begun = time.thread_time()
    try:
        return read_request(*arguments)
    finally:
        time.sleep(time.thread_time() - begun)


def preflight(headers: Headers) -> Response:
    """What a browser asks before a page's request. It sends no key."""
    allowed = {
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": headers.get("access-control-request-headers", ""),
        "access-control-max-age": str(PREFLIGHT_SECONDS),
    }
    return Response(status_code=204, headers=allowed)


def http_error(error: Exception, path: str = "") -> HttpError:
    """The answer to an exception. Bugs are told as 500, without their words."""
    match error:
        case HttpError():
            return error
        case HTTPException():  # of starlette's router
            words = f"there is no {brief(path, 100)} here: {PATHS}"
            if error.status_code == 405:
                words = f"{path} is for {error.headers['Allow']}"
            return HttpError(error.status_code, words, headers=error.headers)
        case TooManyTokens():
            return HttpError(400, str(error), param=error.param, code="context_length_exceeded")
        case UserError():
            return HttpError(400, str(error), param=error.param)
        case RecursionError():
            return HttpError(400, "the body has too many objects within objects")
        case QueueFull():
            return HttpError(
                429,
                str(error),
                type="rate_limit_error",
                code="overloaded",
                headers={"retry-after": "1"},
            )
        case Unavailable():
            return HttpError(503, str(error), type="server_error", code="unavailable")
    return HttpError(500, "the server failed on this request", type="server_error")


def is_loopback(name: str) -> bool:
    """Whether it is a name, or an address, of this machine for itself."""
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


# ---- The program -------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """UserError if nobody can listen there: the port is in use, say."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, TypeError) as error:  # TypeError: the name is not UTF-8
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen on {host}, port {port}: {brief(why)}; choose another --port or --host"
        ) from None


def load_engine(args: Namespace) -> tuple[Model, Engine]:
    model, draft = load(args, find_device(args.device))
    return model, start(args, model, draft)


def run_server(arguments: Sequence[str] | None) -> int:
    """Do what the flags ask for -> the exit status."""
    args = server_flags(arguments)
    listener = listen(args.host, args.port)  # early: loading takes long; clients wait
    # OpenMP keeps helpers for each thread that has computed. With more of them than cores they
    # sleep between two loops, and each loop waits until they are awake. So this thread ends.
    model, engine = run_in_thread(partial(load_engine, args)).result()
    # Without a common key, no client may find out what others ask (lookup.py).
    model.history.is_shared = args.api_key is not None
    name = args.model_name or str(args.target)
    metrics = Metrics(name, engine.batcher)
    batch = BatchServer(engine, args.max_batch + args.max_queue, metrics.observe)
    application = Application(
        Offer(model, name, engine.max_len, Settings(gamma=args.gamma)),
        batch,
        metrics,
        api_key=args.api_key,
        is_local=is_loopback(args.host),
        origins=args.allow_origin,
    )
    config = uvicorn.Config(
        application,
        lifespan="off",
        ws="none",
        log_level="error",  # a warning is a line of any client's
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(HEAD_SECONDS),  # uvicorn's own silence after an answer
        http=Connection,
        timeout_graceful_shutdown=args.grace + 5,  # for clients that do not read their error
    )
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # uvicorn's own handlers
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # the garbage collector, which stops all threads, leaves out what there is by now
    return asyncio.run(serve_until_signal(server, listener, batch, args.grace))


async def serve_until_signal(
    server: Any, listener: socket.socket, batch: BatchServer, grace: float
) -> int:
    """Serve -> the exit status."""
    loop = asyncio.get_running_loop()
    with noted_signals(partial(loop.call_soon_threadsafe, batch.ended.set)) as signals:
        batch.start()
        serving = asyncio.ensure_future(server.serve([listener]))
        host, port, *_ = listener.getsockname()
        host = f"[{host}]" if ":" in host else host
        say(f"serving: a page at http://{host}:{port}/, OpenAI's protocol at /v1; Ctrl-C ends")
        most = files_for(MAX_CONNECTIONS + batch.capacity)
        watching = asyncio.ensure_future(close_silent(server.server_state.connections, most))
        for task in (serving, watching):  # neither ends by itself, but by a bug
            task.add_done_callback(lambda _: batch.ended.set())
        await batch.ended.wait()
        if signals:
            word = "Ctrl-C" if signals[0] == signal.SIGINT else signal.Signals(signals[0]).name
            say(
                f"{word}: finishing open requests ({batch.num_texts}); a second signal ends at once"
            )
        batch.refuse("the server stops")
        server.should_exit = True
        _, unfinished = await asyncio.wait([serving], timeout=grace)
        if unfinished:
            say(
                f"after {grace:g} s, the requests that are still open are ended ({batch.num_texts})"
            )
            batch.fail_all(Unavailable("the server stops"))
        await serving
        watching.cancel()
        batch.stop()
    if batch.error is not None:
        traceback.print_exception(batch.error)
        say("error: the engine has failed, so the server ends")
        return 1
    return 128 + signals[0] if signals else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """arguments: of the command line; None: this program's."""
    return status(lambda: run_server(arguments))
