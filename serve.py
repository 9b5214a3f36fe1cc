"""A server: requests enter a running batch, and tokens leave it.

    python serve.py --target 8B --draft 1B --port 8000     OpenAI's protocol, and a page at /

Clients connect and disconnect at any time, but the batch never waits for them: it runs one step
after the other. So there are two threads. The *engine thread* runs the batch, and no other thread
touches the engine. The *event loop* (asyncio) serves all clients. They exchange two kinds of
messages:

    event loop    ── commands: add, cancel, ask ──►    engine thread, runs them between two steps
    event loop    ◄── the new text of a step ──────    engine thread, starts the next step at once

So a new request joins the batch after at most one step, and a disconnected client's blocks are
freed just as soon. An `Answer` holds all outputs that one client waits for. It merges new pieces of
text with those that the client has not taken yet. So a slow client gets fewer, longer pieces, does
not delay other clients, and costs only the memory of its own outputs.

A client that sends many requests at once does not make the next client wait for all of them. A
client's request n (from 0) gets the current turn plus n, and the batch admits earlier turns first.
When a request with a later turn gets its first token, that turn becomes the current one. After
max_batch first tokens, the next turn does. So no request waits forever (start-time fair queueing).

An exception that concerns one output (if it cannot be decoded, say) ends only that answer. An
exception in a step ends the engine: every answer fails, and the event `ended` is set.

Invariants: a request is in `served` from the command that adds it until it is finished or
cancelled. All open answers together have at most `capacity` requests, finished ones included.
Cost: the event loop wakes up after each step that produces text for a streaming client.
Not covered: several engines; several processes (parallel.py).

HTTP, OpenAI's fields and the metrics are in app/.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports, so that a signal ends the program at once
    from app.shell import begin

    begin()
    from app.flags import server_flags, tell_early

    tell_early(server_flags)

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from devices import make_current
from generate import Engine
from request import OutputStream, Request, Result
from sampling import TokenLogprob

T = TypeVar("T")
Observe = Callable[[dict[Request, list[int]], dict[Request, Result]], None]


class QueueFull(Exception):
    """The server has as many requests as it accepts. The client should try again later."""


class Unavailable(Exception):
    """The server is stopping, or its engine has failed, so no more requests are served."""


# ---- Requests as the event loop sees them --------------------------------------------------------


@dataclass
class Update:
    """What is new in one output since the client's last update."""

    index: int  # of the output in its answer
    pieces: list[tuple[str, str]] = field(default_factory=list)  # (text, its last token's origin)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_tokens: int = 0  # tokens of the whole output so far
    result: Result | None = None  # set once the output is finished

    def merge(self, later: Update) -> None:
        self.pieces += later.pieces
        self.logprobs += later.logprobs
        self.num_tokens = later.num_tokens
        self.result = later.result


class Answer:
    """The outputs that one client waits for. Only the event loop touches it.

    is_streamed: whether the client wants the outputs piece by piece, or only their results.
    """

    def __init__(self, streams: Sequence[OutputStream], is_streamed: bool = False):
        self.streams = streams
        self.is_streamed = is_streamed
        self.num_unfinished = len(streams)
        self.waiting: dict[int, Update] = {}  # index -> the update that the client has not taken
        self.error: Exception | None = None
        self.changed = asyncio.Event()

    def put(self, update: Update) -> None:
        if update.index in self.waiting:
            self.waiting[update.index].merge(update)
        else:
            self.waiting[update.index] = update
        if update.result is not None:
            self.num_unfinished -= 1
        self.changed.set()

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.changed.set()

    async def updates(self) -> AsyncIterator[list[Update]]:
        """Yield updates until every output is finished. Raises the answer's error."""
        while self.num_unfinished or self.waiting:
            await self.changed.wait()
            self.changed.clear()
            if self.error is not None:
                raise self.error
            taken = list(self.waiting.values())
            self.waiting = {}
            yield taken

    async def whole(self) -> list[Update]:
        """Wait until every output is finished: one update for each, if they are not streamed."""
        told = [update async for updates in self.updates() for update in updates]
        return sorted(told, key=lambda update: update.index)


# ---- Requests as the engine thread sees them -----------------------------------------------------


@dataclass
class ServedRequest:
    answer: Answer
    stream: OutputStream
    pieces: list[tuple[str, str]] = field(default_factory=list)  # for the next update
    num_reported: int = 0  # tokens that have been reported to the event loop


class BatchServer:
    """An engine in a thread of its own, for the clients of one event loop.

    capacity: the most requests at a time, whether running, waiting, or finished but not read.
    observe: a function that the engine thread calls with the new tokens of a step, and with the
    results of the requests that it finished.
    """

    def __init__(self, engine: Engine, capacity: int, observe: Observe = lambda *_: None):
        self.engine = engine
        self.capacity = capacity
        self.observe = observe
        # These belong to the event loop:
        self.num_texts = 0
        self.answers: set[Answer] = set()
        self.asked: set[Future[Any]] = set()
        self.refusal = ""  # why no more requests are accepted
        self.ended = asyncio.Event()  # set when the engine fails; others may set it, too
        self.error: BaseException | None = None
        # These belong to the engine thread:
        self.served: dict[Request, ServedRequest] = {}
        self.turn = 0.0  # the current turn
        self.is_stopped = False
        # Both threads use this:
        self.commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.thread = Thread(target=self._run, name="engine", daemon=True)

    # ---- Called by the event loop

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def check_room(self, num_texts: int) -> None:
        """Raise Unavailable or QueueFull if this many more requests cannot be accepted now."""
        if self.refusal:
            raise Unavailable(self.refusal)
        if self.num_texts + num_texts > self.capacity:
            raise QueueFull(
                f"the server has {self.num_texts} requests and accepts {self.capacity}: try again "
                "later"
            )

    def submit(self, answer: Answer) -> None:
        """Send the answer's requests to the batch. The caller must call `close` afterwards,
        whatever happens."""
        self.check_room(len(answer.streams))
        self.num_texts += len(answer.streams)
        self.answers.add(answer)
        arrived = time.perf_counter()
        for i, stream in enumerate(answer.streams):
            text = ServedRequest(answer, stream)
            stream.show = lambda *piece, pieces=text.pieces: pieces.append(piece)
            self.commands.put(partial(self._add, text, arrived, i))

    def close(self, answer: Answer) -> None:
        """The client has all outputs or has disconnected. Cancel the requests that are
        unfinished."""
        if answer not in self.answers:
            return
        self.answers.remove(answer)
        self.num_texts -= len(answer.streams)
        if answer.num_unfinished:
            requests = [stream.request for stream in answer.streams]
            self.commands.put(partial(self._cancel, requests))

    async def ask(self, question: Callable[[], T]) -> T:
        """Call `question` in the engine thread, between two steps, and return its result."""
        if self.error is not None or self.is_stopped:
            raise Unavailable(self.refusal)
        future: Future[T] = Future()
        self.asked.add(future)
        self.commands.put(partial(reply, future, question))
        try:
            return await asyncio.wrap_future(future)
        finally:
            self.asked.discard(future)

    def refuse(self, why: str) -> None:
        """Accept no new requests. Those that are open continue."""
        self.refusal = self.refusal or why

    def fail_all(self, error: Exception) -> None:
        """End every open answer with this error."""
        for answer in self.answers:
            answer.fail(error)

    def stop(self) -> None:
        """End the engine thread after its current step."""
        self.refuse("the server has stopped")
        self.commands.put(self._stop)
        self.thread.join()

    def _deliver(self, updates: Sequence[tuple[Answer, Update]]) -> None:
        for answer, update in updates:
            answer.put(update)

    def _engine_failed(self, error: BaseException) -> None:
        self.error = error
        self.refuse("the engine has failed")
        self.fail_all(Unavailable(self.refusal))
        for future in self.asked:
            if not future.done():
                future.set_exception(Unavailable(self.refusal))
        self.ended.set()

    # ---- The engine thread

    def _run(self) -> None:
        try:
            make_current(self.engine.runner.target.device)  # each thread has a current device
            while not self.is_stopped:
                self._obey()
                if self.served:
                    self._step()
        except BaseException as error:
            self._post(self._engine_failed, error)

    def _obey(self) -> None:
        """Run the event loop's commands. If there is no request to serve, wait for one."""
        while not self.commands.empty() or not (self.served or self.is_stopped):
            command = self.commands.get()
            command()

    def _step(self) -> None:
        new_tokens = self.engine.batcher.step()
        updates = []
        results = {}
        for request, tokens in new_tokens.items():
            text = self.served[request]
            if not text.stream.result.tokens:  # these are its first tokens
                self.turn = max(self.turn + 1 / self.engine.batcher.max_batch, request.turn)
            update = self._feed(text, tokens)
            if update is not None:
                updates.append((text.answer, update))
                if update.result is not None:
                    results[request] = update.result
        self.observe(new_tokens, results)
        if updates:
            self._post(self._deliver, updates)

    def _feed(self, text: ServedRequest, tokens: list[int]) -> Update | None:
        """Turn new tokens into text -> the update for the client, or None if there is none."""
        stream = text.stream
        result = None
        try:
            stream.feed(tokens)
            if stream.is_done:
                result = self.engine.finish(stream)
        except Exception as error:  # concerns only this request
            self._cancel([stream.request])
            self._post(text.answer.fail, error)
            return None
        if result is not None:
            del self.served[stream.request]
        elif not (text.pieces and text.answer.is_streamed):
            return None
        num_tokens = len(stream.result.tokens)
        logprobs = stream.request.logprobs[text.num_reported : num_tokens]
        update = Update(
            stream.result.index, text.pieces[:], logprobs, num_tokens=num_tokens, result=result
        )
        text.num_reported = num_tokens
        text.pieces.clear()
        return update

    def _add(self, text: ServedRequest, arrived: float, num_before: int) -> None:
        """Add a request to the batch. num_before: the requests of this answer that come before."""
        request = text.stream.request
        request.turn = self.turn + num_before
        try:
            self.engine.batcher.add(request)
        except Exception as error:
            self._post(text.answer.fail, error)
            return
        request.arrived = arrived
        self.served[request] = text

    def _cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if self.served.pop(request, None) is not None:
                self.engine.batcher.cancel(request)

    def _stop(self) -> None:
        self.is_stopped = True

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have the event loop call the function soon."""
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed, so no client is waiting
            self.is_stopped = True


def reply(future: Future[T], question: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():  # the caller no longer waits
        return
    try:
        future.set_result(question())
    except Exception as error:
        future.set_exception(error)


if __name__ == "__main__":
    import sys

    from app.shell import refuse

    try:
        from app.server import main
    except ModuleNotFoundError as error:
        needs = f"the server needs the package {error.name}"
        sys.exit(refuse(f"{needs}: pip install '.[server]'"))
    sys.exit(main())
