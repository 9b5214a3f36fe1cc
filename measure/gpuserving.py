"""Many requests at a time on a GPU: a share of the bandwidth's limit, beside transformers, and what a long prompt does to those who write.

No step can be faster than reading all weights and the keys and values of the texts in it; what all steps together had to read, over what
the machine reads a second, is the least that serving can take. The share is of that.

The peers make a model of the same shape with random weights and serve some of the same requests: one at a time, with answers that are cut
short, since only their rate counts; and together, by transformers' own continuous batching, whole. The ratio is of the rates of one run:
of all requests to one at a time, and of the same requests together.

Invariant: a peer that is not there, or that fails, is named with what it said; nobody stops early.

Not covered: requests that arrive one after the other, which traffic.py has on a CPU.
"""
from statistics import median
from typing import Any

import torch

from measure.gpumodels import Case, Roof, Scale, engine, random_model, request
from measure.pair import Served, at_once, serve, spread, weight_bytes
from measure.peers import INSTALL, RandomTransformers, installed
from model import Llama
from request import Request


def serving(scale: Scale, roof: Roof) -> Case:
    """Many requests at once; the same by others; the first token of a prompt alone; and a long prompt among those who write."""
    llama = random_model(scale.models[0][1], 16, scale)
    lengths = spread(scale.requests, scale.longest, scale.longest / scale.shortest)
    work = list(zip(lengths, reversed(lengths)))
    all_, some = together(llama, work, scale), together(llama, work[:scale.batched], scale)
    what = f"requests, prompts and answers of {scale.shortest} to {scale.longest}"
    rows = [[f"{len(part)} {what}", f"{served.rate:.0f} tokens/s", f"{limit(llama, served, roof):.0%}", ""]
            for part, served in ((work, all_), (work[:scale.batched], some))]
    first = [at_once(engine(llama, None, 600, 600, 1), [request(llama, min(512, scale.longest), 1, i)]).first[0] for i in range(scale.turns + 1)][1:]
    alone = [[f"first token of a prompt of {min(512, scale.longest)}", f"{1e3 * median(first):.1f} ms", "", ""]]
    for name, budget in (("at once", scale.long + 64), ("in chunks of 512", 512 if scale.long > 512 else 16)):
        gaps = sorted(long_arrives(llama, budget, scale).gaps)
        late = gaps[int(0.99 * (len(gaps) - 1))]
        alone.append([f"99th percentile between tokens while a prompt of {scale.long} is read {name}", f"{1e3 * late:.1f} ms", "", ""])
    del llama                                                                  # the peer's own takes as much
    others, notes = beside(work, all_.rate, some.rate, scale)
    return dict(title=f"Serving, {scale.models[0][0]} shapes, random weights", headers=("", "measured", "of the bandwidth's limit", "times the peer's rate"),
                rows=[*rows, *others, *alone], notes=notes)


def made(llama: Llama, work: list[tuple[int, int]]) -> list[Request]:
    return [request(llama, prompt, count, i) for i, (prompt, count) in enumerate(work)]


def together(llama: Llama, work: list[tuple[int, int]], scale: Scale) -> Served:
    """All of these (prompt, answer) arrive at once. Two of them were served before, and do not count: the first builds kernels."""
    longest = 2 * scale.longest
    maker = engine(llama, None, len(work) * longest, longest, len(work), prefix_cache=False)
    at_once(maker, made(llama, [(prompt, 4) for prompt, _ in work[:2]]))
    return at_once(maker, made(llama, work))


def limit(llama: Llama, served: Served, roof: Roof) -> float:
    return (served.steps * weight_bytes(llama) + served.read) / roof[0] / served.seconds


def long_arrives(llama: Llama, budget: int, scale: Scale) -> Served:
    """Eight texts are being written, and a long prompt arrives."""
    maker = engine(llama, None, 8 * (scale.shortest + scale.count) + scale.long + 16, scale.long + 16 + scale.count, 9, prefix_cache=False)
    maker.maker.budget = budget
    writers = [(0.0, request(llama, scale.shortest, scale.count, i)) for i in range(8)]
    return serve(maker.batch, maker.caches, [*writers, (0.2 if scale.device == "cuda" else 0.0, request(llama, scale.long, 2, 99))])


# ---- Beside others --------------------------------------------------------------------------------------------------------------

def beside(work: list[tuple[int, int]], rate: float, rate_of_some: float, scale: Scale) -> tuple[list[list[Any]], list[str]]:
    """transformers, one request at a time and by its continuous batching -> rows, and a note for each that is not there."""
    if not installed("transformers"):
        return [], [f"transformers is not installed here, so nothing is compared with it: {INSTALL['transformers']}"]
    if scale.device == "cuda":
        torch.cuda.empty_cache()
    peer, rows, notes = RandomTransformers(scale.models[0][1], scale.device, scale.dtype), [], list[str]()
    few = [(prompt, min(count, scale.short)) for prompt, count in work[:scale.alone]]
    for ours, some, name, serves in (
            (rate, few, f"{len(few)} of them one at a time by transformers, answers of at most {scale.short} (ours: all {len(work)})", peer.one_at_a_time),
            (rate_of_some, work[:scale.batched], f"{scale.batched} of them by transformers' continuous batching", peer.batched)):
        try:
            theirs = serves(some)
            rows.append([name, f"{theirs:.0f} tokens/s", "", f"{ours / theirs:.2f}"])
        except Exception as error:                                             # whatever goes wrong over there, our own figures stand
            notes.append(f"no figure for {name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return rows, notes
