"""The claims on a GPU: models of 1B and 8B shapes, with random weights that are made on the device.

    python bench.py --gpu smoke            is everything right? To be run first (gpukernels.py)
    python bench.py --gpu kernels          attention, products and sampling alone
    python bench.py --gpu decode           one stream, 16, 8 and 4 bits
    python bench.py --gpu speculation-16   1B shapes draft for 8B shapes; speculation-4: in 4 bits
    python bench.py --gpu serving          many requests at a time, and beside a long prompt

Every figure is a share of what this machine did a moment before: bytes read a second, and bf16 operations a second.
What is met for the first time is built and recorded, which takes seconds: every engine serves once before it is
measured. Random weights never agree, so in `speculation` a coin of our own accepts each draft with a fixed probability
α. The least time of serving is that of reading all weights and the keys and values of its texts in each step.

Invariant: each row is told and kept as it comes; a peer that is missing or fails is named.
Not covered: several GPUs; requests that arrive one after the other (traffic.py has them on a CPU).
"""
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from gamma import expected_tokens
from kvcache import kv_bytes
from measure.clock import percentile
from measure.gpukernels import kernel_rows, smoke_rows
from measure.gpumodels import QUICK, Roof, Rows, Scale, random_engine, random_model, roofs, tried
from measure.pair import Served, at_once, log_spread, machine, random_request, serve, weight_bytes
from measure.peers import RandomTransformers, Work, installed, not_compared
from measure.report import Results
from model import Llama
from sampling import Keyed
from shell import say
from weights import Config


def stream_rows(scale: Scale, roof: Roof) -> Rows:
    """One stream."""
    context, longest = scale.context, scale.context + scale.count
    yield f"One stream, {context} tokens read", ("", "tokens/s", "ms a token", "of the read bandwidth", "times 16 bits")
    for name, c in scale.models:
        cached, first = kv_bytes(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, context, scale.dtype), 0.0
        for bits in (16, 8, 4):
            llama = random_model(c, bits, scale)
            asked = [random_request(context, scale.count, 0) for _ in range(scale.turns)]
            engine = random_engine(llama, None, longest, longest, 1)
            one = median(median(at_once(engine, [r]).gaps) for r in asked) / engine.decoder.ahead
            first, share = first or one, (weight_bytes(llama, read=True) + cached) / one / roof[0]
            yield [f"{name}, {bits} bits", 1 / one, 1e3 * one, f"{share:.0%}", f"{first / one:.2f}"]
            del llama
        works = {f"{name}, transformers, {kind} cache": partial(RandomTransformers.seconds_a_token, prompt=context,
                 count=scale.count, turns=scale.turns, cache=kind) for kind in ("dynamic", "static")}
        for told, theirs in beside_transformers(c, works, scale):
            yield [told, 1 / theirs, 1e3 * theirs, "", f"{first / theirs:.2f}"] if theirs else told


def beside_transformers(config: Config, works: dict[str, Callable[[RandomTransformers], float]],
                        scale: Scale) -> Iterator[tuple[str, float]]:
    """Its figures, each with its name and the attention that it chose; 0 with a note of why there is none."""
    torch.cuda.empty_cache()                            # does nothing without a GPU
    missing = "" if installed("transformers") else not_compared("transformers")
    peer = missing or tried(lambda: RandomTransformers(config, scale.device, scale.dtype))
    for name, work in works.items():
        found = peer if isinstance(peer, str) else tried(partial(work, peer))
        yield (f"no figure for {name}: {found}", 0) if isinstance(found, str) else (f"{name} ({peer.attention})", found)


class Biased(Keyed):
    """Accepts every draft with probability alpha, whatever the models say; a place without a draft never."""

    def __init__(self, *place: Any, alpha: float, **more: Any):
        super().__init__(*place, **more)
        self.alpha = alpha

    def accept(self, prob: Tensor) -> Tensor:
        return super().accept(torch.where(prob > 0, self.alpha, 0.0))


def speculation_rows(scale: Scale, roof: Roof, bits: int) -> Rows:
    """The second model drafts for the first; γ fixed, then by the clock for several streams."""
    yield (f"Speculation with random weights, a draft of {bits} bits: a coin accepts with probability α",
           ("α", "γ", "streams", "times plain decoding", "by the formula", "share of it"))
    target, draft = (random_model(config, n, scale) for (_, config), n in zip(scale.models, (16, bits)))
    cases = [(alpha, gamma, 1) for alpha in scale.alphas for gamma in scale.gammas]
    cases += [(alpha, None, n) for alpha in {scale.alphas[0]: 1, scale.alphas[-1]: 1} for n in scale.streams]
    for case in cases:
        yield speculate(target, draft, *case, scale)


def speculate(target: Llama, draft: Llama, alpha: float, gamma: int | None, streams: int, scale: Scale) -> list[str]:
    """Plain decoding and drafting in turns, of which the first does not count. The gain is by the wall clock, once all
    prompts are read; the formula is of the device's times and the mean γ."""
    longest, gains, coin = scale.context + scale.count, [], partial(Biased, alpha=alpha, picks=target.ops.pick)
    engines = [random_engine(target, drafter, streams * longest, longest, streams) for drafter in (None, draft)]
    for turn in range(scale.turns + 1):
        spent, device = [], []
        for engine, drafts in zip(engines, (0, gamma)):
            engine.decoder.coin, engine.decoder.budget = coin, streams * longest    # one coin: recordings are of one
            asked = [random_request(scale.context, scale.count, 100 * turn + i, drafts) for i in range(streams)]
            seconds, rounds = sum(at_once(engine, asked).gaps), [done for one in asked for done in one.rounds[1:]]
            spent.append(seconds / sum(done.accepted + 1 for done in rounds))
            device.append(median(done.seconds / (done.accepted + 1) for done in rounds))        # a plain token's
        gains.append(spent[0] / spent[1])
    gain, drafted, costs = median(gains[1:]), mean(done.drafted for done in rounds), engine.decoder.costs
    cost = costs.verifying(round(streams * (drafted + 1))) + drafted * costs.drafting()
    formula, told = expected_tokens(alpha, drafted) * device[0] / cost, gamma or f"by the clock: {drafted:.1f}"
    return [f"{alpha}", f"{told}", f"{streams}", f"{gain:.2f}", f"{formula:.2f}", f"{gain / formula:.2f}"]


def serving_rows(scale: Scale, roof: Roof) -> Rows:
    """Many requests at once; the first token of a prompt; a long prompt among other texts; the same by the peer."""
    (name, config), prompt = scale.models[0], min(512, scale.longest)
    yield f"Serving, {name} shapes", ("", "measured", "of the bandwidth's limit", "times the peer's rate")
    llama, lengths = random_model(config, 16, scale), log_spread(scale.requests, scale.longest,
                                                                 scale.longest / scale.shortest)
    work, size = list(zip(lengths, reversed(lengths))), weight_bytes(llama, read=True)
    for asked in (work, work[:scale.streams[-1]]):
        served = serve_together(llama, asked, scale)
        rate, least = served.rate, (served.steps * size + served.read) / roof[0]
        yield [f"{len(asked)} requests, prompts and answers of {scale.shortest} to {scale.longest}",
               f"{rate:.0f} tokens/s", f"{least / served.seconds:.0%}", ""]
    first = [at_once(random_engine(llama, None, 600, 600, 1), [random_request(prompt, 1, i)]).first[0]
             for i in range(scale.turns + 1)][1:]
    yield [f"first token of a prompt of {prompt}", f"{1e3 * median(first):.1f} ms", "", ""]
    for name, budget in (("at once", scale.long + 64), ("in chunks of 512", 512 if scale.long > 512 else 16)):
        late = 1e3 * percentile(long_arrives(llama, budget, scale).gaps, 99)
        yield [f"99th percentile between tokens, a prompt of {scale.long} is read {name}", f"{late:.1f} ms", "", ""]
    del llama                                           # the peer's own takes as much
    works = {f"{len(asked)} of them by transformers' continuous batching": lambda peer: peer.batched(asked)}
    for told, theirs in beside_transformers(config, works, scale):
        yield [told, f"{theirs:.0f} tokens/s", "", f"{rate / theirs:.2f}"] if theirs else told


def serve_together(llama: Llama, work: Work, scale: Scale) -> Served:
    """All of these arrive at once; a second time, when all kernels are built and all passes are recorded."""
    longest = 2 * scale.longest
    engine = random_engine(llama, None, len(work) * longest, longest, len(work), prefix_cache=False)
    for _ in range(2):
        served = at_once(engine, [random_request(*pair, i) for i, pair in enumerate(work)])
    return served


def long_arrives(llama: Llama, budget: int, scale: Scale) -> Served:
    """Eight texts are being written, and a long prompt arrives."""
    tokens, longest = 8 * (scale.shortest + scale.count) + scale.long + 16, scale.long + 16 + scale.count
    engine = random_engine(llama, None, tokens, longest, 9, prefix_cache=False)
    engine.decoder.budget = budget
    writers = [(0.0, random_request(scale.shortest, scale.count, i)) for i in range(8)]
    late = 0.2 * (scale.device == "cuda"), random_request(scale.long, 2, 99)
    return serve(engine.batch, engine.caches, [*writers, late])


CASES = {"smoke": smoke_rows, "kernels": kernel_rows, "decode": stream_rows, "serving": serving_rows,
         **{f"speculation-{bits}": partial(speculation_rows, bits=bits) for bits in (16, 4)}}


@torch.inference_mode()
def run_case(name: str, quick: bool = False, keep: Callable[..., Any] = lambda results: None) -> Results:
    """One case: each row is told as it comes, and all so far is given to `keep`. ValueError where there is no GPU."""
    there = torch.cuda.is_available()
    if not there and not quick:
        raise ValueError(f"--gpu {name} needs a GPU, and PyTorch finds none here: "
                         "--quick runs it with toy shapes on the CPU")
    scale = replace(QUICK, device="cuda" if there else "cpu") if quick else Scale()
    roof, kind = roofs(scale), str(scale.dtype)[6:]
    told = f"roof: {roof[0] / 1e9:,.0f} GB/s read, {roof[1] / 1e12:,.3g} TFLOP/s in {kind} products"
    title, headers = next(rows := CASES[name](scale, roof))
    case = dict(title=title, headers=headers, rows=[], notes=[told], read_bandwidth=roof[0], operations=roof[1])
    results = machine(roof[0]) | dict(gpu={name: case})
    say("\n".join((title, told, "  ".join(headers))))
    for row in rows:
        if isinstance(row, str):
            case["notes"].append(row)
        else:
            case["rows"].append(row := [cell if isinstance(cell, str) else f"{cell:.3g}" for cell in row])
        say(row if isinstance(row, str) else "  ".join(row))
        keep(results)
    return results
