"""Many texts at a time: how much memory their caches waste, and how long users wait for tokens.

Invariant: everything that is compared gets the same requests in the same order.
"""

import math
import random
from collections.abc import Sequence
from itertools import accumulate
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from batcher import Batcher
from generate import Engine, Model
from kernels import Ops
from kvcache import KVCache
from measure.clock import percentile
from measure.pair import Effort, Rows, Served, random_request, serve
from paged import PagedCache
from request import Request
from speculative import Decoder


def mixed(count: int, average: float = 300, most: int = 1000) -> list[Request]:
    """Requests of log-normal lengths, prompt and answer together; a third is the prompt."""
    coin, middle = random.Random(1), math.log(average) - 0.5 * 0.6**2
    lengths = [min(most, max(8, round(coin.lognormvariate(middle, 0.6)))) for _ in range(count)]
    return [
        random_request(length // 3, length - length // 3, seed)
        for seed, length in enumerate(lengths)
    ]


class Blank:
    """Stands in for a model if only its cache matters: every token has the same probability."""

    device, dtype, ops = torch.device("cpu"), torch.float32, Ops()

    def __call__(self, tokens: Tensor, step: Any, rows: Tensor | None = None) -> Tensor:
        return torch.zeros(len(tokens) if rows is None else len(rows), 2)


def waste(effort: Effort) -> Rows:
    """With memory for 8 texts of 1024 tokens, in rows or in blocks: the texts in flight, and the wasted share."""
    layouts: dict[str, Any] = {"rows of 1024": KVCache(1, 1, 1, 1024, 8)}
    layouts |= {
        f"blocks of {size}": PagedCache(1, 1, 1, 8192 // size, size, 1024)
        for size in (256, 64, 16, 1)
    }
    return [
        dict(layout=name, **in_flight(cache, mixed(effort.many))) for name, cache in layouts.items()
    ]


def in_flight(cache: Any, requests: Sequence[Request]) -> dict[str, float]:
    """The mean number of running texts while others wait, and the mean share of their memory that holds no token."""
    batch, running, empty = (
        Batcher(Decoder(Blank(), cache, 2), len(requests)),
        list[int](),
        list[float](),
    )
    for one in requests:
        batch.add(one)
    while batch.waiting or batch.running:
        batch.step()
        if batch.running:
            lengths = [cache.length(one.seq) for one in batch.running]
            empty.append(
                cache.waste()
                if isinstance(cache, PagedCache)
                else 1 - mean(lengths) / cache.max_len
            )
        if batch.waiting:
            running.append(len(batch.running))
    return dict(texts_in_flight=mean(running) if running else len(requests), waste=mean(empty))


def pool_blocks(effort: Effort) -> list[dict[str, str]]:
    """A pool of 40 blocks as texts come and go: a letter is one text's block, * shared by several, ░ cached, · free."""
    cache, names, drawn, opening = (
        PagedCache(1, 1, 1, 40, block_size=4),
        dict[int, str](),
        [],
        [*range(24)],
    )

    def draw(what: str) -> None:
        owners: dict[int, str] = {}
        for seq, name in names.items():
            owners |= {
                block: "*" if block in owners else name for block in cache._texts[seq].blocks
            }
        row = [
            owners.get(block, "░" if block in cache.pool.cached else "·")
            for block in range(cache.pool.total)
        ]
        drawn.append(dict(what=what, row="".join(row)))

    def read(name: str, tokens: list[int]) -> int:
        seq, have = cache.open(tokens)
        names[seq] = name
        cache.extend([(seq, tokens[have:])])
        draw(f"{name} reads {len(tokens)} tokens" + (f": {have} are there" if have else ""))
        return seq

    a = read("a", opening + [100] * 14)
    cache.extend([(a, [1])])
    b = read("b", opening + [200] * 18)
    names[d := cache.fork(b)] = "d"
    draw("b is forked into d")
    cache.extend([(b, [2]), (d, [3])])
    draw("both write: the last block is copied")
    cache.free(a)
    del names[a]
    draw("a ends; what it read stays")
    read("e", opening + [300] * 60)
    return drawn


def latency(effort: Effort) -> Rows:
    """Short texts are written while long prompts arrive, which steps read whole or in chunks.

    Arrivals are random, spread over twice the time that this machine takes if all requests arrive at the start."""
    model, coin = Model.load("tiny", "cpu", torch.float32), random.Random(3)
    arrivals = [(at, 24, 64) for at in accumulate(coin.expovariate(2) for _ in range(effort.load))]
    arrivals += [
        (at, 900, 16)
        for at in accumulate(coin.expovariate(1) for _ in range(max(1, effort.load // 2)))
    ]
    seconds = under_load(model, [(0.0, *sizes) for _, *sizes in arrivals], 1024).seconds
    arrivals = [
        (at * 2 * seconds / max(at for at, *_ in arrivals), *sizes) for at, *sizes in arrivals
    ]
    steps = {"a whole prompt": 1024, "chunks of 128": 128}
    told = lambda served: {
        f"{name}_p{percent}": percentile(times, percent)
        for percent in (50, 99, 100)
        for name, times in (("between", served.gaps), ("first", served.first))
    }
    turns = [
        [told(under_load(model, arrivals, steps[name])) for name in steps]
        for _ in range(effort.turns)
    ]
    return [
        dict(
            step=name,
            budget=steps[name],
            **{key: median(one[key] for one in found) for key in found[0]},
        )
        for name, found in zip(steps, zip(*turns))
    ]


def under_load(model: Model, arrivals: Sequence[tuple[float, int, int]], budget: int) -> Served:
    """Serve random requests. arrivals: (seconds after the start, tokens of the prompt, tokens to make)."""
    engine = Engine(model, None, 64 * 1024, 1024, 64, prefix_cache=False)
    engine.decoder.budget = budget
    requests = [
        (at, random_request(prompt, count, seed))
        for seed, (at, prompt, count) in enumerate(arrivals)
    ]
    return serve(engine.batch, engine.caches, requests)
