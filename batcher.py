"""Continuous batching: which texts run in this step.

A pass of the target costs what reading its weights costs, for one text or for sixteen, so texts are made together.
Static batching runs a batch until its longest text ends, and wastes 1 − Σ lengths / (texts · longest) of its places.
Continuous batching (Orca) plans every step anew: a text that ends leaves at once, and the next in the queue takes its
place. A step has a budget of tokens. Texts beyond their prompts take a round each; prompts are read in chunks of what
is left (Sarathi-Serve), so a long prompt does not delay the other texts.

  - First come, first served: the oldest texts take from the budget first. A text is admitted once all older ones write.
  - If the cache has no room for a step, the youngest text is preempted: it gives up its places in the caches and goes
    back to the front of the queue. Later it is read again and goes on exactly as it would have, because its random
    numbers depend on its seed and its positions alone (sampling.py).
  - A text that could never fit, even alone, is refused at once, with the reason; the other texts go on.

Invariant: a request is in `waiting`, in `running`, or in neither; only requests in `running` have places in the caches.
Cost: scheduling is Python, in proportion to the number of texts. Not covered: priorities; several models.

Yu et al. 2022, Orca (OSDI); Agrawal et al. 2024, Sarathi-Serve (arXiv:2403.02310).
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from errors import UserError
from kvcache import CacheFull
from request import Request
from speculative import Decoder, Scheduled

AGAIN = 16  # steps before a text without room is tried again


class Batcher:
    """Makes many texts with one decoder, at most `max_batch` at a time; a step has the decoder's budget of tokens."""

    def __init__(self, decoder: Decoder, max_batch: int = 16):
        if max_batch < 1:
            raise UserError(f"max_batch is {max_batch}: it must be at least 1")
        self.decoder, self.max_batch = decoder, max_batch
        self.waiting, self.running = deque[Request](), list[Request]()  # both: oldest first
        self.steps, self.again = 0, 0  # steps so far; the step that next tries the queue's first

    def check(self, request: Request) -> None:
        """ValueError if this request could never be served."""
        longest, most = len(request.tokens) + request.left - 1, self.decoder.cache.max_len
        if longest > most:
            raise UserError(
                f"a prompt of {request.prompt} tokens and {request.settings.max_tokens} to be made need a "
                f"cache of {longest} tokens, and it has {most}: shorten the prompt, ask for fewer, or "
                "give the cache more memory"
            )
        if (gamma := request.settings.gamma or 0) >= self.decoder.budget:
            raise UserError(
                f"gamma is {gamma}, and a step has a budget of {self.decoder.budget} tokens: draft fewer"
            )

    def add(self, request: Request) -> None:
        """Put a request into the queue. ValueError, at once, if it could never be served."""
        self.check(request)
        request.arrived = time.perf_counter()
        self.waiting.append(request)

    def step(self) -> dict[Request, list[int]]:
        """One pass over all running texts -> the new tokens of each. Finished texts leave."""
        grown = self.decoder.step(self.schedule())
        for request in grown:
            if request.finish_reason:
                self._leave(request)
        return grown

    def run(self, requests: Iterable[Request] = ()) -> Iterator[tuple[Request, list[int]]]:
        """(request, its new tokens) as they are made, until no request is left."""
        for request in requests:
            self.add(request)
        while self.waiting or self.running:
            yield from self.step().items()

    def cancel(self, request: Request) -> None:
        """End a request now, and free its places in the caches. A request that has ended stays as it is."""
        if request in self.running:
            self._leave(request)
        elif (
            not request.finish_reason and request in self.waiting
        ):  # (the queue is not searched for an ended one)
            self.waiting.remove(request)
            self.again = 0

    def schedule(self) -> list[Scheduled]:
        """Plan a step: the running texts, oldest first; preempt until they fit; then admit waiting texts."""
        work, left = list[Scheduled](), self.decoder.budget
        self.steps += 1
        for request in self.running:
            if planned := self.decoder.plan(request, left):
                work.append(planned)
                left -= planned.size
        while not self.decoder.fits(work):
            youngest = self.running[-1]
            self._leave(youngest)
            youngest.preempted += 1
            self.waiting.appendleft(youngest)
            if work[-1].request is youngest:
                left += work.pop().size
        while (
            self.waiting
            and len(self.running) < self.max_batch
            and left > 0
            and self.steps >= self.again
        ):
            if (planned := self._enter(self.waiting[0], work, left)) is None:
                break
            work.append(planned)
            left -= planned.size
        return work

    def _enter(self, request: Request, work: Sequence[Scheduled], left: int) -> Scheduled | None:
        """Admit a text -> its work; None if the caches lack room for all of it, or its twin still reads the prompt."""
        twin = request.twin if request.twin in self.running else None
        if twin is not None and self.decoder.lag(twin) > 1:
            return None
        try:
            self.decoder.open(request, twin)
        except CacheFull:
            self.again = self.steps + AGAIN
            return None
        planned, whole = (
            self.decoder.plan(request, left),
            Scheduled(request, self.decoder.lag(request), 0),
        )
        if planned is None or not all(self.decoder.fits([*work, w]) for w in (planned, whole)):
            self.decoder.close(request)
            self.again = self.again if planned is None else self.steps + AGAIN
            return None
        self.running.append(self.waiting.popleft())
        request.started = request.started or time.perf_counter()
        return planned

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.decoder.close(request)
        self.again = 0


def main() -> None:
    lengths = [round(4 * 12 ** ((7 * i % 16) / 15)) for i in range(16)]  # 4 to 48 tokens
    asked = [Request([1], Settings(0.7, seed=i, max_tokens=n)) for i, n in enumerate(lengths)]
    batch = Engine(Model.load("tiny"), None, 1000, 64, 4, prefix_cache=False).batch
    made = {(request, batch.steps) for request, _ in batch.run(asked)}
    for request in asked:
        print("".join("·█"[(request, step) in made] for step in range(1, batch.steps + 1)))
    print(
        f"{sum(lengths)} tokens, four texts at a time: {batch.steps} steps, and "
        f"{sum(max(lengths[i : i + 4]) for i in range(0, 16, 4))} if each four wait for the longest of them"
    )


if __name__ == "__main__":
    from generate import Engine, Model
    from request import Settings

    main()
