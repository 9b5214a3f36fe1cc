"""Continuous batching: every step decides anew which requests run.

A pass of the target takes as long as reading its weights, whether for one request or for sixteen,
so requests run together. Static batching runs a batch until its longest output ends, and wastes the
fraction 1 − Σ lengths / (requests · longest) of its places. Continuous batching (Orca) plans every
step anew: a request that ends leaves at once, and the next one in the queue takes its place. A step
has a budget of tokens. Each request that has read its prompt takes one round. Prompts are read in
chunks, with the rest of the budget (Sarathi-Serve), so a long prompt does not delay other requests.
With γ auto, drafts take at most half of that rest, so the other half is always there for prompts.
A token late in a prompt costs more (`Llama.price`), so chunks become smaller along the prompt.

  - First come, first served: the oldest requests take from the budget first, but a round of each
    running request is reserved. A request is admitted only if its round can also be reserved, so a
    running request never waits. (serve.py gives requests turns; those with an earlier turn come
    first.)
  - If the caches have no room for a step, the youngest request is preempted: its sequences are
    freed, and it goes back to the front of the queue. Later its tokens are read again. Its random
    numbers stay the same, because they depend only on its seed and its positions (sampling.py).
  - A request that could never fit, even by itself, is refused at once. The error gives the reason.

Invariant: a request is in `waiting`, in `running`, or in neither; only requests in `running` have
sequences in the caches.
Cost: scheduling runs in Python. Planning a step takes time proportional to the number of running
requests, and so does each admission.
Not covered: priorities; several models.

Yu et al. 2022, Orca (OSDI); Agrawal et al. 2024, Sarathi-Serve (arXiv:2403.02310).
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from errors import UserError
from kvcache import CacheFull
from request import Request
from runner import ModelRunner, ScheduledRequest
from settings import Options, check_in_vocabulary

# A request that finds no room in the caches is tried again only after this many steps or when a
# request ends, because trying takes time and seldom succeeds.
RETRY_AFTER = 16


class Batcher:
    """Serves many requests with one runner, at most `max_batch` at a time."""

    def __init__(self, runner: ModelRunner, max_batch: int):
        self.runner = runner
        self.max_batch = max_batch
        self.waiting = deque[Request]()  # ordered by turn, then oldest first
        self.running: list[Request] = []  # oldest first
        self.num_steps = 0
        self.num_added = 0
        self.retry_at_step = 0  # the step at which the first request in the queue is tried again

    def check(self, request: Request) -> None:
        """UserError if this request could never be served."""
        if request.settings.seed is None or not request.tokens:
            raise UserError(
                "a request needs tokens, and settings with a seed: make it with Model.request_of"
            )
        was_added = request.arrived > 0  # otherwise there is no need to search for it
        if was_added and (request in self.running or request in self.waiting):
            raise UserError("this request is already in a batch: make another with the same tokens")
        check_in_vocabulary(request.tokens, self.runner.drawing.vocab_size)
        # The last new token is never cached. With max_tokens 0, the whole prompt is.
        longest = len(request.tokens) + max(1, request.num_remaining) - 1
        most = self.runner.cache.max_len
        if longest > most:
            raise UserError(
                f"a prompt of {request.num_prompt_tokens} tokens and {request.settings.max_tokens} "
                f"new ones need a cache of {longest} tokens, and it has {most}: shorten the "
                "prompt, ask for fewer tokens, or give the cache more memory"
            )
        budget = self.runner.budget
        if self.runner.round_size(request) > budget:
            raise UserError(
                f"gamma is {request.settings.gamma}, and a step has a budget of {budget} tokens: "
                "choose a smaller gamma"
            )

    def add(self, request: Request) -> None:
        """Put a request into the queue. UserError, at once, if it could never be served."""
        self.check(request)
        request.arrived = time.perf_counter()
        self.num_added += 1
        request.number = self.num_added
        insort(self.waiting, request, key=lambda waiting: waiting.turn)
        if self.waiting[0] is request:
            self.retry_at_step = 0  # this request has not been tried yet

    def step(self) -> dict[Request, list[int]]:
        """Run one pass over the running requests -> the new tokens of each. Finished requests
        leave."""
        scheduled = self.schedule()
        new_tokens = self.runner.step(scheduled)
        for request in new_tokens:
            if request.finish_reason:
                self._release(request)
        return new_tokens

    def run(self, requests: Iterable[Request] = ()) -> Iterator[tuple[Request, list[int]]]:
        """Yield (request, its new tokens) after each step, until every request has finished."""
        requests = [*requests]
        try:
            for request in requests:
                self.add(request)
            while self.waiting or self.running:
                yield from self.step().items()
        finally:  # also after an error, or when the caller stops iterating
            for request in requests:
                self.cancel(request)

    def cancel(self, request: Request) -> None:
        """End a request now, and free its sequences. Does nothing if it has already ended."""
        if request in self.running:
            self._release(request)
        elif not request.finish_reason and request in self.waiting:  # a finished one is not waiting
            self.waiting.remove(request)
            self.runner.close(request)  # Ctrl-C may have interrupted its admission
            self.retry_at_step = 0  # another request may be first now

    # ---- The plan of a step

    def schedule(self) -> list[ScheduledRequest]:
        """Plan running requests, oldest first; preempt the youngest until they fit; then admit
        waiting ones, with what is left of the budget. num_steps counts the step."""
        self.num_steps += 1
        scheduled = self._schedule_running()
        while not self.runner.fits(scheduled):
            # It goes to the front of `waiting`, so it may be admitted again below.
            self._preempt(self.running[-1])
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
        """Plan a round or a chunk for each request. Each younger one keeps budget for a round, and
        prompts, also of requests that wait, keep half of the rest."""
        scheduled = []
        left = self.runner.budget
        reserved = self._reserved()
        for_prompts = (left - reserved + 1) // 2
        for request in self.running:
            round_size = self.runner.round_size(request)
            reserved -= round_size
            budget = left - reserved
            if self.runner.num_pending(request) == 1:  # with γ auto, drafts would take all of it
                budget = max(round_size, budget - for_prompts)
            item = self.runner.schedule(request, budget)
            scheduled.append(item)
            left -= self.runner.work(item)
        return scheduled

    def _reserved(self) -> int:
        """The tokens that a round of every running request takes."""
        return sum(self.runner.round_size(request) for request in self.running)

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _may_admit(self) -> bool:
        """Whether to try the first request in the queue in this step."""
        if not self.waiting or len(self.running) >= self.max_batch:
            return False
        if self.num_steps < self.retry_at_step:
            return False
        first = self.waiting[0]
        if self._reserved() + self.runner.round_size(first) > self.runner.budget:
            return False
        sibling = first.sibling
        if sibling in self.running and self.runner.num_pending(sibling) > 1:
            return False  # it is still reading the prompt that `first` will find in the cache
        return True

    def _admit(
        self, request: Request, scheduled: Sequence[ScheduledRequest], left: int
    ) -> ScheduledRequest | None:
        """Admit a request -> its plan for this step. None if the target's cache has no room for all
        its tokens, if a cache has no room for this step, or if the budget left is too small."""
        try:
            self.runner.open(request)
        except CacheFull:
            self.retry_at_step = self.num_steps + RETRY_AFTER
            return None
        item = self.runner.schedule(request, left)
        # There must be room for all its tokens: if only a chunk fits, it would soon be preempted.
        num_pending = self.runner.num_pending(request)
        whole = item._replace(num_tokens=num_pending, num_drafts=0, samples=True)
        has_room = all(self.runner.fits([*scheduled, asked]) for asked in (item, whole))
        if item.num_new_tokens == 0 or not has_room:
            self.runner.close(request)
            if not has_room:
                self.retry_at_step = self.num_steps + RETRY_AFTER
            return None
        self.running.append(self.waiting.popleft())
        if not request.started:
            request.started = time.perf_counter()
            request.num_cached_tokens = self.runner.cache.length(request.seq)
        return item

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.runner.close(request)
        self.retry_at_step = 0


def main() -> None:
    """Demonstration: 16 requests, four at a time. A row is a request, and a column a step."""
    model = Model.load("tiny", plain=True)  # a GPU would draw several tokens in a step
    batcher = Engine(model, None, Options(max_len=64, max_batch=4), tokens=1000).batcher
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
        f"{sum(lengths)} tokens in {batcher.num_steps} steps; with static batches of four, in "
        f"{static}"
    )


if __name__ == "__main__":  # these pages import this one
    from generate import Engine
    from loading import Model
    from request import Settings

    main()
