"""Serving many texts: what paging wastes, how many fit, what a shared beginning saves, and what continuous batching gains.

    python .ci/serving.py

Speeds are ratios between runs in turns. The machine is shared: what is not reached is measured once more, and then a lower limit counts.
"""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch

from generate import Engine, Model
from measure.pair import random_request as request
from measure.traffic import in_flight, mixed
from request import Request, Settings


def require(holds: bool, what: str) -> None:
    print(("ok    " if holds else "WRONG ") + what, flush=True)
    if not holds:
        sys.exit(1)


def twice(measure: Callable[[], tuple], good: Callable[[tuple], bool]) -> tuple:
    got = measure()
    return got if good(got) else measure()


def layouts(model: Model) -> list[dict[str, float]]:
    """Rows and blocks with memory for 8 texts of 1024 tokens: how many texts are in flight, and what they waste (measure/traffic.py)."""
    memory = 8 * 1024 * 2 * 8 * 2 * 64 * model.llama.dtype.itemsize
    engines = {
        "rows": Engine(model, None, 0, 1024, 8, kv="contiguous"),
        "blocks": Engine(model, None, 0, 1024, 128, kv_memory=memory, prefix_cache=False),
    }
    for kv, engine in engines.items():
        require(
            engine.caches[0].bytes == memory,
            f"{kv}: {engine.caches[0].bytes:,} bytes for keys and values",
        )
    return [in_flight(engine.caches[0], mixed(96)) for engine in engines.values()]


def first_token(model: Model) -> tuple[float]:
    """Seconds to the first token of 500 tokens, cold, over those where the first 90 % were read before."""
    ratios = []
    for trial in range(5):
        engine, seconds = Engine(model, None, 4000, 600, 2), []
        prompt = request(500, 1, trial).tokens
        other = prompt[:450] + request(50, 1, 100 + trial).tokens
        for tokens in (prompt, other):
            start = time.perf_counter()
            list(engine.batch.run([Request(tokens, Settings(1.0, seed=1, max_tokens=1, gamma=0))]))
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return (median(ratios),)


def seconds(model: Model, requests: list[Request], max_batch: int) -> float:
    """Until all are made."""
    engine = Engine(model, None, max_batch * 512, 512, max_batch, prefix_cache=False)
    start = time.perf_counter()
    for _ in engine.batch.run(requests):
        pass
    return time.perf_counter() - start


def batching(model: Model) -> tuple[float, float, float]:
    """128 requests of 10 to 400 tokens, log-uniform, 16 in flight: continuous batching over static, over static that stops computing texts
    that have ended, and over one at a time."""
    coin = random.Random(2)
    lengths = [round(10 * 40 ** coin.random()) for _ in range(128)]
    groups = [range(first, first + 16) for first in range(0, 128, 16)]
    computed = sum(
        seconds(model, [request(16, max(lengths[i] for i in group), i) for i in group], 16)
        for group in groups
    )
    stopped = sum(
        seconds(model, [request(16, lengths[i], i) for i in group], 16) for group in groups
    )
    continuous = seconds(model, [request(16, length, i) for i, length in enumerate(lengths)], 16)
    few = range(0, 128, 8)
    alone = (
        seconds(model, [request(16, lengths[i], i) for i in few], 1)
        * sum(lengths)
        / sum(lengths[i] for i in few)
    )
    return computed / continuous, stopped / continuous, alone / continuous


def together(model: Model) -> tuple[float]:
    """8 greedy requests at once over one at a time."""

    def greedy() -> list[Request]:
        return [
            Request(model.encode(opening), Settings(0.0, seed=0, max_tokens=128, gamma=0))
            for opening in (
                "Once upon a time",
                "One day",
                "The dog",
                "Lily saw",
                "Tom had",
                "A cat",
                "Mom said",
                "In the park",
            )
        ]

    return (median(seconds(model, greedy(), 1) / seconds(model, greedy(), 8) for _ in range(3)),)


@torch.inference_mode()
def main() -> int:
    torch.set_num_threads(2)
    model = Model.load("tiny", "cpu")
    (rows, reserved), (paged, waste) = (row.values() for row in layouts(model))
    require(
        waste < 0.04,
        f"wasted of what is allocated, lengths log-normal with mean 300: {waste:.1%} in blocks, {reserved:.0%} in rows of 1024",
    )
    require(
        paged >= 3 * rows,
        f"texts in flight with the same memory: {paged:.1f} in blocks, {rows:.1f} in rows: {paged / rows:.1f} times as many",
    )
    (ratio,) = twice(lambda: first_token(model), lambda got: got[0] >= 4)
    require(ratio >= 3, f"the first token of 500, 450 of them shared: {ratio:.1f} times as soon")
    computed, stopped, alone = twice(lambda: batching(model), lambda got: got[0] >= 2)
    require(
        computed >= 1.6,
        f"128 requests of 10 to 400 tokens, 16 in flight: continuous batching makes {computed:.2f} times the tokens a second of static "
        f"({stopped:.2f} of static that stops computing what has ended), {alone:.2f} times those of one at a time",
    )
    (ratio,) = twice(lambda: together(model), lambda got: got[0] >= 3)
    require(ratio >= 2.5, f"8 greedy requests together: {ratio:.2f} times one at a time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
