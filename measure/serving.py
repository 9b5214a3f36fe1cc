"""Serving requests through an engine, with a stopwatch at every step.

Invariant: a text's times are those of the steps that gave it tokens: the first one counts from the
start, each later one from the one before.
"""

import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from generate import Engine
from loading import Draft, Model
from paged import PagedCache
from request import Request, Settings
from settings import Options


class Served(NamedTuple):
    """The costs of serving some requests."""

    seconds: float
    num_tokens: int
    num_first_tokens: int  # those of each text's first step
    first_token: list[float]  # seconds from the start to each request's first token
    gaps: list[float]  # seconds between a text's successive steps
    cache_bytes: int  # the most bytes of keys and values in use after any step
    texts: list[list[int]]  # the new tokens

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def seconds_per_token(self) -> float:
        """For a text, after its first step."""
        return sum(self.gaps) / (self.num_tokens - self.num_first_tokens)


def random_request(prompt: int, count: int, seed: int, gamma: int | None = 0) -> Request:
    """A request for exactly `count` tokens after a prompt of `prompt` random tokens."""
    tokens = random.Random(seed).choices(range(300, 4000), k=prompt)
    return Request(tokens, Settings(temperature=1.0, seed=seed, max_tokens=count, gamma=gamma))


def bytes_in_use(caches: Sequence[Any]) -> int:
    """All of a contiguous cache, and the live blocks of a paged one."""
    total = 0
    for cache in caches:
        if isinstance(cache, PagedCache):
            live = cache.pool.total - cache.pool.available
            total += cache.bytes * live // cache.pool.total
        else:
            total += cache.bytes
    return total


def serve(engine: Engine, requests: Sequence[Request]) -> Served:
    """Serve all requests; they arrive at the start."""
    for request in requests:
        engine.batcher.add(request)
    last_seen: dict[Request, float] = {}
    first_token: list[float] = []
    gaps: list[float] = []
    cache_bytes = 0
    num_first_tokens = 0
    now = 0.0
    start = time.perf_counter()
    while engine.batcher.waiting or engine.batcher.running:
        new_tokens = engine.batcher.step()
        now = time.perf_counter() - start
        cache_bytes = max(cache_bytes, bytes_in_use(engine.caches))
        for request, tokens in new_tokens.items():
            if request in last_seen:
                gaps.append(now - last_seen[request])
            else:
                first_token.append(now)
                num_first_tokens += len(tokens)
            last_seen[request] = now
    texts = [request.tokens[request.num_prompt_tokens :] for request in requests]
    num_tokens = sum(map(len, texts))
    return Served(
        now,
        num_tokens,
        num_first_tokens,
        first_token=first_token,
        gaps=gaps,
        cache_bytes=cache_bytes,
        texts=texts,
    )


def engine_for(model: Model, draft: Draft | None, requests: Sequence[Request]) -> Engine:
    """An engine that has room for all these requests in one batch."""
    max_len = max(len(request.tokens) + request.num_remaining for request in requests)
    count = len(requests)
    options = Options(max_len=max_len, max_batch=count)
    return Engine(model, draft, options, tokens=count * max_len)


def log_spread(count: int, longest: int) -> list[int]:
    """`count` lengths from a fifth of the longest on, even on a logarithmic scale, shuffled."""
    order = [7 * i % count for i in range(count)]
    return [round(longest * 5 ** (-i / count)) for i in order]
