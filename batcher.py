"""Continuous batching: who runs in this step.

A pass of the target costs what reading its weights costs, for one text or for sixteen, so texts are made together. Static batching
puts some together and waits until the longest ends; every text that ended before leaves its place empty:

    places wasted = 1 − Σ lengths / (texts · longest),      half and more where lengths vary

Continuous batching (Orca) decides anew in every step. A text that ends leaves at once, and the next that waits takes its place.
Prompts are read in chunks (Sarathi-Serve): what the step's budget of tokens leaves after one token, or one round of drafts, for
every text that is being written. So nobody who is reading a long prompt holds up those who write.

    step:  schedule · run · finish

  - First come, first served: the oldest take of the budget first. A text is let in when all before it write, so only the last can be reading.
  - Where the cache has no room for a step, the youngest text is put back in front of the queue, and gives up all its places in the
    caches. It is read again later, from its own tokens, and goes on exactly as it would have: its numbers are drawn by its seed and
    the place in its text (sampling.py), and no other text has a part in them.
  - A text that could never fit, even alone, is refused at once, with the reason; the others go on.

Invariant: a request is in exactly one of `waiting`, `running` and the hands of who made it; of those running, each has its places in
the caches, of the others none. Cost: scheduling is Python, as much for each text however many there are.

Not covered: priorities; several models.

Yu et al. 2022, Orca (OSDI); Agrawal et al. 2024, Sarathi-Serve (arXiv:2403.02310).
"""
import time
from collections import deque
from collections.abc import Iterable, Iterator

from kvcache import CacheFull
from request import Request
from speculative import Decoder, Work

AGAIN = 16                                              # steps until whoever found no room is looked at again, though nobody has left


class Batcher:
    """Makes many texts with one decoder, at most `max_batch` at a time; a step has the decoder's budget of tokens."""

    def __init__(self, maker: Decoder, max_batch: int = 16):
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}: it must be at least 1")
        self.maker, self.max_batch = maker, max_batch
        self.waiting, self.running = deque[Request](), list[Request]()               # both with the oldest first
        self.steps, self.again = 0, 0                                                # so far; and when the oldest that waits is looked at again

    def check(self, request: Request) -> None:
        """ValueError if this request could never be served."""
        longest, gamma = len(request.tokens) + request.left - 1, request.settings.gamma or 0
        if longest > self.maker.cache.max_len:
            raise ValueError(f"a prompt of {request.prompt} tokens and {request.settings.max_tokens} to be made need a cache of {longest} tokens, "
                             f"and it has {self.maker.cache.max_len}: shorten the prompt, ask for fewer, or give the cache more memory")
        if gamma >= self.maker.budget:
            raise ValueError(f"gamma is {gamma}, and a step has a budget of {self.maker.budget} tokens: draft fewer, or raise the budget")

    def add(self, request: Request) -> None:
        """Let a request wait for its turn. ValueError, at once, if it could never be served."""
        self.check(request)
        request.arrived = time.perf_counter()
        self.waiting.append(request)

    def step(self) -> dict[Request, list[int]]:
        """One pass for all that run -> what each has grown by. Those that are finished have left."""
        work = self.schedule()
        grown = self.maker.step(work)
        for request in grown:
            if request.finish_reason:
                self._leave(request)
        return grown

    def run(self, requests: Iterable[Request] = ()) -> Iterator[tuple[Request, list[int]]]:
        """(request, its new tokens) as they are made, until nobody is left."""
        for request in requests:
            self.add(request)
        while self.waiting or self.running:
            yield from self.step().items()

    def cancel(self, request: Request) -> None:
        """End a request now, whether it waits or runs; its places are free at once. Nothing happens to one that has ended."""
        if request in self.running:
            self._leave(request)
        elif not request.finish_reason and request in self.waiting:                  # who has ended does not wait: there is no queue to look through
            self.waiting.remove(request)
            self.again = 0

    def schedule(self) -> list[Work]:
        """What to do in this step: those that run, the oldest first; then those that are let in."""
        work, left = list[Work](), self.maker.budget
        self.steps += 1
        for request in self.running:
            if planned := self.maker.plan(request, left):
                work.append(planned)
                left -= planned.size
        while not self.maker.fits(work):                                             # asked once for all: who is older has room if all have
            youngest = self.running[-1]
            self._put_back(youngest)
            if work[-1].request is youngest:
                left += work.pop().size
        while self.waiting and len(self.running) < self.max_batch and left > 0 and self.steps >= self.again:
            if (planned := self._enter(self.waiting[0], work, left)) is None:
                break
            work.append(planned)
            left -= planned.size
        return work

    def _reads(self, request: Request) -> bool:
        return len(request.tokens) - self.maker.cache.length(request.seq) > 1

    def _enter(self, request: Request, work: list[Work], left: int) -> Work | None:
        """Let the oldest that waits in, if the cache has room for all of its text as it is now. It waits for a twin that reads their prompt.
        (To look its text up among the blocks takes longer the longer it is: who was refused is not asked again in each step.)"""
        twin = request.twin if request.twin in self.running else None
        if twin is not None and self._reads(twin):
            return None
        try:
            self.maker.open(request, twin)
        except CacheFull:
            return self._refuse()
        planned = self.maker.plan(request, left)
        whole = Work(request, len(request.tokens) - self.maker.cache.length(request.seq), 0)
        if planned is None or not all(self.maker.fits([*work, w]) for w in {planned, whole}):
            self.maker.close(request)
            return None if planned is None else self._refuse()
        self.running.append(self.waiting.popleft())
        request.started = request.started or time.perf_counter()
        return planned

    def _refuse(self) -> None:
        self.again = self.steps + AGAIN

    def _put_back(self, request: Request) -> None:
        self._leave(request)
        request.preempted += 1
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.maker.close(request)
        self.again = 0


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: the places of a batch over the steps, static above continuous.

def timeline(batch: Batcher, requests: list[Request], lengths: list[int], first: int = 0) -> list[str]:
    """One row a place, one letter a step: whose token it made. · for nobody's, or one beyond the `lengths` that were wanted."""
    rows, places = [""] * batch.max_batch, dict[Request, int]()
    for request in requests:
        batch.add(request)
    while batch.waiting or batch.running:
        grown = batch.step()
        for request in [r for r in grown if r not in places]:
            taken = {place for r, place in places.items() if r in grown or not r.finish_reason}
            places[request] = min(set(range(batch.max_batch)) - taken)
        wanted = {places[r]: chr(ord("a") + first + i) for i, (r, length) in enumerate(zip(requests, lengths)) if r in grown and len(r.tokens) - r.prompt <= length}
        rows = [row + wanted.get(i, "·") for i, row in enumerate(rows)]
    return rows


def main() -> None:
    from engine import Engine
    from pretrained import Model
    from request import Settings

    model, places = Model.load("tiny"), 4
    lengths = [round(4 * 12 ** ((7 * i % 16) / 15)) for i in range(16)]                  # 4 to 48, spread evenly on a logarithmic scale
    batch, seconds = Engine(model, None, 1000, 64, places, prefix_cache=False).batch, dict[str, float]()

    def requests(lengths: list[int]) -> list[Request]:
        return [Request(model.encode("Once upon a time"), Settings(0.7, seed=i, max_tokens=n)) for i, n in enumerate(lengths)]

    def static() -> list[str]:
        """Four by four, each four for as long as the longest of them."""
        parts = [(i, lengths[i:i + places]) for i in range(0, len(lengths), places)]
        drawn = [timeline(batch, requests([max(part)] * places), part, i) for i, part in parts]
        return ["".join(rows) for rows in zip(*drawn)]

    for name, draw in (("static", static), ("continuous", lambda: timeline(batch, requests(lengths), lengths))):
        draw()                                                                           # once to warm up
        start = time.perf_counter()
        rows = draw()
        seconds[name] = time.perf_counter() - start
        print(f"{name}: {sum(lengths)} tokens in {len(rows[0])} steps; {sum(row.count('·') for row in rows) / (places * len(rows[0])):.0%} of the places in vain")
        print("\n".join(f"  {row}" for row in rows))
    print(f"the same texts in {seconds['static']:.2f} s and {seconds['continuous']:.2f} s: {seconds['static'] / seconds['continuous']:.2f} times as fast")


if __name__ == "__main__":
    main()
