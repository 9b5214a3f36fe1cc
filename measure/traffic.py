"""Many texts at a time: what their caches waste, how long their readers wait, and who has which place.

    waste        of what is allocated for keys and values, the share that holds none, by layout: half a block a text, or most of a row
    latency      seconds between tokens and to the first, while long prompts arrive, with and without chunks
    places       whose token each place of a batch made, step by step, static and continuous
    blocks       whose each block of a paged pool is, as texts come and go

A request for random tokens takes as long as one for a story, and what a cache holds does not depend on what texts say: so the model may
be `Blank` where only its cache is looked at.

Invariant: the same requests, in the same order, for everything that is compared.

Not covered: arrivals that come in bursts; what a network adds.
"""
import math
import random
from collections.abc import Sequence
from itertools import accumulate
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from batcher import Batcher, timeline
from engine import Engine
from kvcache import KVCache
from measure.pair import Effort, Rows, Served, serve, spread
from paged import PagedCache
from pretrained import Model
from request import Request, Settings
from speculative import Decoder

# ---- Caches ---------------------------------------------------------------------------------------------------------------------

class Blank:
    """In a model's place: every token is as likely as any other. What caches hold does not depend on what texts say."""
    device, dtype = torch.device("cpu"), torch.float32

    def __call__(self, tokens: Tensor, step: Any, rows: Tensor | None = None) -> Tensor:
        return torch.zeros(len(tokens) if rows is None else len(rows), 2)


def request(prompt: int, count: int, seed: int, gamma: int | None = 0) -> Request:
    """A request for exactly `count` tokens after a prompt of `prompt` random ones."""
    coin = random.Random(seed)
    return Request([coin.randrange(300, 4000) for _ in range(prompt)], Settings(1.0, seed=seed, max_tokens=count, gamma=gamma))


def mixed(count: int, average: float = 300, most: int = 1000) -> list[Request]:
    """Lengths log-normal, prompt and answer together."""
    coin, requests = random.Random(1), []
    for seed in range(count):
        length = min(most, max(8, round(coin.lognormvariate(math.log(average) - 0.5 * 0.6 ** 2, 0.6))))
        requests.append(request(length // 3, length - length // 3, seed))
    return requests


def waste(effort: Effort) -> Rows:
    """Memory for 8 texts of 1024 tokens, in rows or in blocks: how many texts are in flight, and what share of what they hold is empty."""
    layouts = [("rows of 1024", KVCache(1, 1, 1, 1024, 8))]
    layouts += [(f"blocks of {size}", PagedCache(1, 1, 1, 8 * 1024 // size, size, 1024)) for size in (256, 64, 16, 1)]
    return [dict(layout=name, **in_flight(cache, mixed(effort.many))) for name, cache in layouts]


def in_flight(cache: Any, requests: Sequence[Request]) -> dict[str, float]:
    """The mean number of texts while some wait, and the mean share of what they hold that holds no token."""
    batch, running, empty = Batcher(Decoder(Blank(), cache, 2), len(requests)), list[int](), list[float]()
    for one in requests:
        batch.add(one)
    while batch.waiting or batch.running:
        batch.step()
        live = batch.running
        if live:
            stored = sum(cache.length(one.seq) for one in live)
            empty.append(cache.waste() if isinstance(cache, PagedCache) else 1 - stored / (len(live) * cache.max_len))
        if batch.waiting:
            running.append(len(live))
    return dict(texts_in_flight=mean(running) if running else len(requests), waste=mean(empty))


def blocks() -> list[dict[str, str]]:
    """Whose each block of a pool of 40 is, as texts come and go: letters have one text, * several, ░ is cached, · free."""
    cache, names, drawn = PagedCache(1, 1, 1, 40, block_size=4), dict[int, str](), []

    def draw(what: str) -> None:
        owners: dict[int, str] = {}
        for seq, name in names.items():
            for block in cache._texts[seq].blocks:
                owners[block] = "*" if block in owners else name
        drawn.append(dict(what=what, row="".join(owners.get(block, "░" if block in cache.pool.cached else "·") for block in range(cache.pool.total))))

    def read(name: str, tokens: list[int]) -> int:
        seq, have = cache.open(tokens)
        names[seq] = name
        cache.extend([(seq, tokens[have:])])
        draw(f"{name} reads {len(tokens)} tokens" + (f": {have} are there" if have else ""))
        return seq

    opening = list(range(24))
    a = read("a", opening + [100] * 14)
    cache.extend([(a, [1])])
    b = read("b", opening + [200] * 18)
    d = cache.fork(b)
    names[d] = "d"
    draw("b is forked into d")
    cache.extend([(b, [2]), (d, [3])])
    draw("both write: the last block is copied")
    cache.free(a)
    del names[a]
    draw("a ends; what it read stays")
    read("e", opening + [300] * 60)
    return drawn


# ---- Serving --------------------------------------------------------------------------------------------------------------------

def latency(effort: Effort) -> Rows:
    """Short texts are written while long prompts arrive: seconds between tokens and to the first, where a step reads all of a prompt, or chunks.
    They arrive at random, over twice the time in which this machine makes them all when they are there from the start."""
    model, coin = Model.load("tiny", "cpu", torch.float32), random.Random(3)
    arrivals = [(at, 24, 64) for at in accumulate(coin.expovariate(2) for _ in range(effort.load))]
    arrivals += [(at, 900, 16) for at in accumulate(coin.expovariate(1) for _ in range(max(1, effort.load // 2)))]
    budgets = [("a whole prompt", 1024), ("chunks of 128", 128)]
    slower = 2 * under_load(model, [(0.0, *sizes) for _, *sizes in arrivals], 1024).seconds / max(at for at, *_ in arrivals)
    arrivals = [(slower * at, *sizes) for at, *sizes in arrivals]
    turns = [[percentiles(under_load(model, arrivals, budget)) for _, budget in budgets] for _ in range(effort.turns)]
    return [dict(step=name, budget=budget, **{key: median(turn[i][key] for turn in turns) for key in turns[0][0]}) for i, (name, budget) in enumerate(budgets)]


def under_load(model: Model, arrivals: Sequence[tuple[float, int, int]], budget: int) -> Served:
    """arrivals: (seconds, tokens of the prompt, tokens to make)."""
    engine = Engine(model, None, 64 * 1024, 1024, 64, prefix_cache=False)
    engine.maker.budget = budget
    return serve(engine.batch, engine.caches, [(at, request(prompt, count, seed)) for seed, (at, prompt, count) in enumerate(arrivals)])


def percentiles(served: Served) -> dict[str, float]:
    share = lambda times, percent: sorted(times)[min(len(times) - 1, int(percent / 100 * len(times)))]
    return {f"{name}_p{percent}": share(times, percent) for name, times in (("between", served.gaps), ("first", served.first)) for percent in (50, 95, 99)}


def places(model: Model | None = None) -> dict[str, Any]:
    """Four places, sixteen texts of 4 to 48 tokens: whose token each place made in each step, static and continuous."""
    model, width = model or Model.load("tiny", "cpu", torch.float32), 4
    lengths = spread(16, 48, 12.0)
    batch = Engine(model, None, 1000, 64, width, prefix_cache=False).batch
    asked = lambda counts: [Request(model.encode("Once upon a time"), Settings(0.7, seed=i, max_tokens=n)) for i, n in enumerate(counts)]
    parts = [(i, lengths[i:i + width]) for i in range(0, len(lengths), width)]
    static = [timeline(batch, asked([max(part)] * width), part, i) for i, part in parts]
    return dict(lengths=lengths, static=["".join(rows) for rows in zip(*static)], continuous=timeline(batch, asked(lengths), lengths))
