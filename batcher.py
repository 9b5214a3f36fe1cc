"""Continuous batching: which requests run in this step.

A pass of the target costs what reading its weights costs, for one text or for sixteen, so texts are
made together. Static batching runs a batch until its longest text ends, and wastes
1 − Σ lengths / (texts · longest) of its places. Continuous batching (Orca) plans every step anew: a
text that ends leaves at once, and the next in the queue takes its place. A step has a budget of
tokens. Texts beyond their prompts take a round each; prompts are read in chunks of what is left
(Sarathi-Serve), so a long prompt does not delay the other texts. The more of a prompt has been
read, the more a token of it costs (`Llama.price`), and the smaller its chunks are.

  - First come, first served: the oldest texts take from the budget first, but a round of each
    running text is reserved. A text is admitted only if its round can be reserved, too: so no
    running text ever waits.
  - A client that asks for many texts at once does not keep the next one waiting for all of them:
    the queue is in the order of turns, and text n of a client (from 0) gets the turn that is on,
    plus n. To admit a text of a later turn begins that turn, and to admit max_batch texts the next
    one: so nobody waits without end (start-time fair queueing).
  - If the caches have no room for a step, the youngest text is preempted: it gives up its sequences
    and goes back to the front of the queue. Later it is read again, and its random numbers are
    those it would have had: they depend on its seed and its positions alone (sampling.py).
  - A text that could never fit, even alone, is refused at once, with the reason.

Invariant: a request is in `waiting`, in `running`, or in neither; only requests in `running` have
sequences in the caches.
Cost: scheduling is Python. A step, and each admission, takes time in proportion to the running
texts.
Not covered: priorities; several models.

Yu et al. 2022, Orca (OSDI); Agrawal et al. 2024, Sarathi-Serve (arXiv:2403.02310).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from errors import UserError
from kvcache import CacheFull
from request import Request
from runner import ModelRunner, ScheduledRequest
from settings import Options, check_known

# A text that found no room in the caches is tried again after so many steps, or when a text ends:
# a try costs time, and seldom finds room.
RETRY_AFTER = 16


class Batcher:
    """Makes many texts with one runner, at most `max_batch` at a time."""

    def __init__(self, runner: ModelRunner, max_batch: int):
        self.runner = runner
        self.max_batch = max_batch
        self.waiting = deque[Request]()  # in the order of turns, then oldest first
        self.turn = 0.0  # the turn that is on
        self.running: list[Request] = []  # oldest first
        self.num_steps = 0
        self.retry_at_step = 0  # when the first in the queue is tried again

    def check(self, request: Request) -> None:
        """UserError if this request could never be served."""
        if request.settings.seed is None or not request.tokens:
            raise UserError(
                "a request needs tokens, and settings with a seed: make it by Model.request_of"
            )
        was_added = request.arrived > 0  # else it is not searched
        if was_added and (request in self.running or request in self.waiting):
            raise UserError("this request is in a batch already: make another, of the same tokens")
        check_known(request.tokens, self.runner.drawing.vocab_size)
        # No cache holds the last token. If none is made, the prompt's own last one is read, too.
        longest = len(request.tokens) + max(1, request.num_remaining) - 1
        most = self.runner.cache.max_len
        if longest > most:
            raise UserError(
                f"a prompt of {request.num_prompt_tokens} tokens and {request.settings.max_tokens} "
                f"to be made need a cache of {longest} tokens, and it has {most}: shorten the "
                "prompt, ask for fewer, or give the cache more memory"
            )
        budget = self.runner.budget
        if self.runner.round_size(request) > budget:
            raise UserError(
                f"gamma is {request.settings.gamma}, and a step has a budget of {budget} tokens: "
                "draft fewer"
            )

    def add(self, request: Request, num_before: int = 0) -> None:
        """Put a request into the queue. UserError, at once, if it could never be served.
        num_before: texts of the same client that come before it."""
        self.check(request)
        request.arrived = time.perf_counter()
        request.turn = self.turn + num_before
        place = len(self.waiting)
        while place and self.waiting[place - 1].turn > request.turn:
            place -= 1
        self.waiting.insert(place, request)
        if place == 0:
            self.retry_at_step = 0  # it was not tried yet

    def step(self) -> dict[Request, list[int]]:
        """Run one pass over all running texts -> the new tokens of each. Finished texts leave."""
        scheduled = self.schedule()
        new_tokens = self.runner.step(scheduled)
        for request in new_tokens:
            if request.finish_reason:
                self._release(request)
        return new_tokens

    def run(self, requests: Iterable[Request] = ()) -> Iterator[tuple[Request, list[int]]]:
        """Yield (request, its new tokens) as they are made, until no request is left."""
        requests = [*requests]
        try:
            for request in requests:
                self.add(request)
            while self.waiting or self.running:
                yield from self.step().items()
        finally:  # an error, or a caller that has enough
            for request in requests:
                self.cancel(request)

    def cancel(self, request: Request) -> None:
        """End a request now, and free its sequences. A request that has ended stays as it is."""
        if request in self.running:
            self._release(request)
        elif not request.finish_reason and request in self.waiting:  # no search for one that ended
            self.waiting.remove(request)
            self.runner.close(request)  # Ctrl-C may have come while it was admitted
            self.retry_at_step = 0  # another may be first now

    # ---- The plan of a step

    def schedule(self) -> list[ScheduledRequest]:
        """Plan running texts, oldest first; preempt until they fit; then admit waiting texts."""
        self.num_steps += 1
        scheduled = self._schedule_running()
        while not self.runner.fits(scheduled):
            self._preempt(self.running[-1])  # tried again below, where all of it must fit
            scheduled.pop()
        left = self.runner.budget - sum(map(self.runner.work, scheduled))
        while left > 0 and self._may_admit():
            item = self._admit(self.waiting[0], scheduled, left)
            if item is None:
                break
            scheduled.append(item)
            left -= self.runner.work(item)
        return scheduled

    def _schedule_running(self) -> list[ScheduledRequest]:
        """Plan a round or a chunk for each text, so that a round of each younger text is left."""
        scheduled = []
        left = self.runner.budget
        reserved = self._reserved()
        for request in self.running:
            reserved -= self.runner.round_size(request)
            item = self.runner.schedule(request, left - reserved)
            scheduled.append(item)
            left -= self.runner.work(item)
        return scheduled

    def _reserved(self) -> int:
        """Tokens of a step that the running texts need for a round each."""
        return sum(self.runner.round_size(request) for request in self.running)

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _may_admit(self) -> bool:
        """Whether the first in the queue may be tried in this step."""
        if not self.waiting or len(self.running) >= self.max_batch:
            return False
        if self.num_steps < self.retry_at_step:
            return False
        first = self.waiting[0]
        if self._reserved() + self.runner.round_size(first) > self.runner.budget:
            return False
        sibling = first.sibling
        if sibling in self.running and self.runner.num_pending(sibling) > 1:
            return False  # it still reads the prompt that this text is to find
        return True

    def _admit(
        self, request: Request, scheduled: Sequence[ScheduledRequest], left: int
    ) -> ScheduledRequest | None:
        """Admit a text -> its work in this step. None if the target's cache has no room for all of
        it, if a cache has none for this step, or if too few tokens of the step are left."""
        try:
            self.runner.open(request)
        except CacheFull:
            self.retry_at_step = self.num_steps + RETRY_AFTER
            return None
        item = self.runner.schedule(request, left)
        # This work is asked about, and never run: a text whose first chunk alone fits would soon be
        # preempted.
        whole_text = item._replace(
            num_tokens=self.runner.num_pending(request), num_drafts=0, samples=True
        )
        has_room = all(self.runner.fits([*scheduled, work]) for work in (item, whole_text))
        if item.num_new_tokens == 0 or not has_room:
            self.runner.close(request)
            if not has_room:
                self.retry_at_step = self.num_steps + RETRY_AFTER
            return None
        self.running.append(self.waiting.popleft())
        self.turn = max(self.turn + 1 / self.max_batch, request.turn)
        if not request.started:
            request.started = time.perf_counter()
            request.num_cached_tokens = self.runner.cache.length(request.seq)
        return item

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.runner.close(request)
        self.retry_at_step = 0


def main() -> None:
    """The demonstration draws 16 texts, four at a time: a row is a text, and a column a step."""
    model = Model.load("tiny")
    batcher = Engine(model, None, Options(max_len=64, max_batch=4), tokens=1000).batcher
    batcher.runner.multi_step = 1  # a column is a token, on a GPU too
    lengths = [5, 41, 12, 30, 4, 22, 48, 8, 16, 6, 35, 10, 27, 7, 19, 13]
    requests = []
    for seed, length in enumerate(lengths):
        settings = Settings(temperature=0.7, seed=seed, max_tokens=length)
        requests.append(Request([1], settings))
    rows = {request: "" for request in requests}
    for request, _ in batcher.run(requests):
        rows[request] = rows[request].ljust(batcher.num_steps - 1, "·") + "█"
    for row in rows.values():
        print(row.ljust(batcher.num_steps, "·"))
    static = sum(max(lengths[i : i + 4]) for i in range(0, 16, 4))
    print(
        f"{sum(lengths)} tokens in {batcher.num_steps} steps, and in {static} if each four wait "
        "for the longest of them"
    )


if __name__ == "__main__":
    from generate import Engine
    from loading import Model
    from request import Settings

    main()
