"""Serving many texts: what paging wastes, what a shared prefix saves, and what batching gains.

    python .ci/serving.py

Speeds are ratios between runs in turns. The machine is shared: what misses the aim is measured
again, up to four times, and of the best a lower limit counts.
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
from measure.effort import OPENINGS
from measure.memory import memory_use, mixed_requests
from measure.serving import Served, random_request, serve_at_once
from request import Request, Settings


def require(holds: bool, what: str) -> None:
    print(("ok    " if holds else "WRONG ") + what, flush=True)
    if not holds:
        sys.exit(1)


def best_of(measure: Callable[[], tuple], aim: float) -> tuple:
    """What is measured, again while the first ratio misses the aim: the best of up to four."""
    found = measure()
    for _ in range(3):
        if found[0] >= aim:
            break
        found = max(found, measure())
    return found


# ---- Memory


def check_memory(model: Model) -> None:
    """Rows and blocks with memory for 8 texts of 1024 tokens."""
    c = model.llama.config
    numbers = 8 * 1024 * 2 * c.num_hidden_layers * c.kv_size
    memory = numbers * model.llama.dtype.itemsize
    rows = Engine(model, None, 0, 1024, 8, kv="contiguous").caches[0]
    blocks = Engine(model, None, 0, 1024, 128, kv_memory=memory, prefix_cache=False).caches[0]
    require(rows.bytes == blocks.bytes == memory, f"{memory:,} bytes for keys and values")
    in_rows = memory_use(rows, mixed_requests(96))
    in_blocks = memory_use(blocks, mixed_requests(96))
    waste = in_blocks["waste"]
    told = f"wasted, lengths with mean 300: {waste:.1%} in blocks, {in_rows['waste']:.0%} in rows"
    require(waste < 0.04, told)
    ratio = in_blocks["texts_in_flight"] / in_rows["texts_in_flight"]
    require(
        ratio >= 3, f"texts in flight with the same memory: {ratio:.1f} times as many in blocks"
    )


# ---- Time


def first_token(model: Model) -> tuple[float]:
    """The first token of 500, cold, over that where the first 90 % were read before: seconds."""
    ratios = []
    for trial in range(5):
        engine = Engine(model, None, 4000, 600, 2)
        prompt = random_request(500, 1, trial)
        other = random_request(50, 1, 100 + trial)
        other = Request(prompt.tokens[:450] + other.tokens, other.settings)
        cold = serve_at_once(engine, [prompt]).seconds
        ratios.append(cold / serve_at_once(engine, [other]).seconds)
    return (median(ratios),)


def serve_random(model: Model, lengths: list[int], max_batch: int) -> Served:
    """Texts of these lengths after prompts of 16 tokens, at most so many at a time."""
    requests = [random_request(16, length, seed) for seed, length in enumerate(lengths)]
    engine = Engine(model, None, max_batch * 512, 512, max_batch, prefix_cache=False)
    return serve_at_once(engine, requests)


def batching(model: Model) -> tuple[float, float]:
    """Continuous batching over static batches, which end with their longest text; and over one
    text at a time: tokens a second of 128 texts of 10 to 400 tokens, 16 in flight."""
    generator = random.Random(0)
    lengths = [generator.randint(10, 400) for _ in range(128)]
    static = 0.0
    for start in range(0, 128, 16):
        longest = max(lengths[start : start + 16])
        static += serve_random(model, [longest] * 16, 16).seconds
    continuous = serve_random(model, lengths, 16)
    alone = serve_random(model, lengths[::8], 1)
    gain = continuous.tokens_per_second / alone.tokens_per_second
    return static / continuous.seconds, gain


def together(model: Model) -> tuple[float]:
    """8 greedy requests at once over one at a time: the shortest times of four turns."""

    def seconds(max_batch: int) -> float:
        settings = Settings(temperature=0.0, seed=0, max_tokens=128, gamma=0)
        openings = [*OPENINGS, "A cat", "In the park"]
        requests = [Request(model.encode(opening), settings) for opening in openings]
        engine = Engine(model, None, max_batch * 256, 256, max_batch)
        return serve_at_once(engine, requests).seconds

    alone = []
    at_once = []
    for _ in range(4):
        alone.append(seconds(1))
        at_once.append(seconds(8))
    return (min(alone) / min(at_once),)


def pauses(model: Model) -> tuple[float, float, float]:
    """The longest step of texts that are being written while prompts of 900 tokens arrive: whole
    prompts over chunks of 128, and both in ms."""
    longest = {}
    for budget in (1024, 128):
        engine = Engine(model, None, 16 * 1024, 1024, 16, prefix_cache=False)
        engine.runner.budget = budget
        for seed in range(4):
            engine.batcher.add(random_request(24, 300, seed))
        seconds = []
        for step in range(100):
            if step in (10, 30, 50):
                engine.batcher.add(random_request(900, 2, step))
            start = time.perf_counter()
            engine.batcher.step()
            seconds.append(time.perf_counter() - start)
        longest[budget] = 1e3 * max(seconds)
    return longest[1024] / longest[128], longest[1024], longest[128]


@torch.inference_mode()
def main() -> int:
    torch.set_num_threads(2)
    model = Model.load("tiny", "cpu")
    check_memory(model)
    (ratio,) = best_of(lambda: first_token(model), 4)
    require(ratio >= 3, f"the first token of 500, 450 of them shared: {ratio:.1f} times as soon")
    ratio, alone = best_of(lambda: batching(model), 2)
    told = f"continuous batching: {ratio:.2f} times static, {alone:.2f} times one at a time"
    require(ratio >= 1.5, f"128 requests of 10 to 400 tokens, 16 in flight: {told}")
    (ratio,) = best_of(lambda: together(model), 3)
    require(ratio >= 1.8, f"8 greedy requests together: {ratio:.2f} times one at a time")
    ratio, whole, chunks = best_of(lambda: pauses(model), 1.5)
    told = f"{whole:.0f} ms, and {chunks:.0f} ms in chunks of 128"
    require(ratio > 1.1, f"the longest pause while prompts of 900 tokens are read: {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
