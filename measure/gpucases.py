"""The claims on a GPU: models of 1B and 8B shapes, with random weights that are made on the device.

    python bench.py --gpu kernels          attention, products and sampling alone (gpukernels.py)
    python bench.py --gpu decode           one stream, 16, 8 and 4 bits
    python bench.py --gpu speculation      1B shapes draft for 8B shapes
    python bench.py --gpu serving          many requests at a time, beside transformers, and beside a long prompt

Every figure is a share of what this machine did a moment before: bytes read a second, and bf16 operations a second.
With --quick the same runs with toy shapes, on a CPU if there is no GPU: its figures mean nothing.

Random weights never agree, so in `speculation` a coin of our own accepts each draft with a fixed probability α;
drafting, verification, sampling and both caches are production's.

No step can be faster than reading all weights and the keys and values of its texts: the least time of serving is the
bytes of all its steps over the bytes read a second. The peer serves some of the same requests: one at a time, with
answers cut short, since only their rate counts; and together, whole, by transformers' own continuous batching.

Invariant: a case is a title, headers and rows, whatever the machine; a peer that is missing or fails is named.
Not covered: several GPUs; requests that arrive one after the other (traffic.py has them on a CPU).
"""
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from gamma import expected_tokens
from kvcache import kv_bytes
from measure.clock import percentile
from measure.gpukernels import Rows, draw_tokens, kernel_case
from measure.gpumodels import (QUICK, Case, Roof, Scale, device_seconds, random_engine, random_model, random_numbers,
                               roofs)
from measure.pair import Served, at_once, log_spread, random_request, seconds_a_token, serve, weight_bytes
from measure.peers import RandomTransformers, Work, installed, not_compared
from model import Llama
from sampling import Keyed


def decode_case(scale: Scale, roof: Roof) -> Case:
    """One stream."""
    rows, context, longest = [], scale.context, scale.context + scale.count
    for name, c in scale.models:
        cached, first = kv_bytes(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, context, scale.dtype), 0.0
        for bits in (16, 8, 4):
            llama = random_model(c, bits, scale)
            logits = 4 * random_numbers(scale, 1, c.vocab_size)
            sampling = device_seconds(partial(draw_tokens, llama.ops, logits, top_p=0.9), scale)
            asked = [random_request(context, scale.count, 0) for _ in range(scale.turns)]
            one = median(median(at_once(random_engine(llama, None, longest, longest, 1), [r]).gaps) for r in asked)
            first, share = first or one, (weight_bytes(llama) + cached) / one / roof[0]
            rows.append([f"{name}, {bits} bits", 1 / one, 1e3 * one, f"{share:.0%}", f"{first / one:.2f}",
                         f"{sampling / one:.1%}", ""])
            del llama
            if bits == 16 and installed("transformers"):
                peer = RandomTransformers(c, scale.device, scale.dtype)
                theirs = peer.seconds_a_token(context, scale.count, scale.turns)
                rows[-1][-1] = ", ".join(f"{seconds / one:.2f} of {kind}" for kind, seconds in theirs.items())
    return dict(title=f"One stream after a prompt of {context} tokens, random weights",
                headers=("shapes", "tokens/s", "ms a token", "of the read bandwidth", "times 16 bits",
                         "sampling with top-p, of that", "times transformers"),
                rows=rows, notes=[] if installed("transformers") else [not_compared("transformers")])


class Biased(Keyed):
    """Accepts every draft with probability alpha, whatever the models say; a place without a draft never."""

    def __init__(self, *place: Any, alpha: float, **more: Any):
        super().__init__(*place, **more)
        self.alpha = alpha

    def accept(self, prob: Tensor) -> Tensor:
        return super().accept(torch.where(prob > 0, self.alpha, 0.0))


def speculation_case(scale: Scale, roof: Roof) -> Case:
    """The second model drafts for the first, in 16 bits and in 4; γ fixed, then by the clock for several streams."""
    (_, large), (_, small) = scale.models
    target, rows, ends = random_model(large, 16, scale), [], (scale.alphas[0], scale.alphas[-1])
    cases = [(alpha, gamma, 1) for alpha in scale.alphas for gamma in scale.gammas]
    cases += [(alpha, None, streams) for alpha in ends for streams in scale.streams]
    for bits in (16, 4):
        draft = random_model(small, bits, scale)
        rows += [[f"{bits} bits", *speculate(target, draft, *case, scale)] for case in cases]
    return dict(title="Speculation with random weights: a coin accepts with probability α, "
                      "all else is the production path",
                headers=("draft", "α", "γ", "streams", "times plain decoding", "by the formula", "share of it"),
                rows=rows, notes=[])


def speculate(target: Llama, draft: Llama, alpha: float, gamma: int | None, streams: int, scale: Scale) -> list[str]:
    """Plain decoding and drafting in turns, over as many tokens. By the clock, the formula is of the mean γ."""
    gains, formulas, taken, count = [], [], [], scale.count if gamma is not None else 4 * scale.count
    longest = scale.context + count
    for turn in range(scale.turns):
        spent = []
        for drafter, drafts in ((None, 0), (draft, gamma)):
            engine = random_engine(target, drafter, streams * longest, longest, streams)
            engine.decoder.coin = partial(Biased, alpha=alpha, picks=target.ops.pick)
            requests = [random_request(scale.context, count, 100 * turn + i, drafts) for i in range(streams)]
            at_once(engine, requests)
            spent.append(median(map(seconds_a_token, requests)))
        mean_gamma = mean(done.drafted for one in requests for done in one.rounds[1:]) if gamma is None else gamma
        costs = engine.decoder.costs
        c, w = costs.drafting() / spent[0], costs.verifying(round(streams * (mean_gamma + 1))) / spent[0]
        gains.append(spent[0] / spent[1])
        formulas.append(expected_tokens(alpha, mean_gamma) / (w + mean_gamma * c))
        taken.append(mean_gamma)
    gain, formula = median(gains), median(formulas)
    told = str(gamma) if gamma is not None else f"by the clock: {median(taken):.1f}"
    return [f"{alpha}", told, str(streams), f"{gain:.2f}", f"{formula:.2f}", f"{gain / formula:.2f}"]


def serving_case(scale: Scale, roof: Roof) -> Case:
    """Many requests at once; the same by the peer; the first token of a prompt; a long prompt among other texts."""
    llama = random_model(scale.models[0][1], 16, scale)
    lengths = log_spread(scale.requests, scale.longest, scale.longest / scale.shortest)
    work = list(zip(lengths, reversed(lengths)))
    all_, some = serve_together(llama, work, scale), serve_together(llama, work[:scale.batched], scale)
    what, size = f"requests, prompts and answers of {scale.shortest} to {scale.longest}", weight_bytes(llama)
    rows = [[f"{len(served.texts)} {what}", f"{served.rate:.0f} tokens/s",
             f"{(served.steps * size + served.read) / roof[0] / served.seconds:.0%}", ""] for served in (all_, some)]
    prompt = min(512, scale.longest)
    first = [at_once(random_engine(llama, None, 600, 600, 1), [random_request(prompt, 1, i)]).first[0]
             for i in range(scale.turns + 1)][1:]
    alone = [[f"first token of a prompt of {prompt}", f"{1e3 * median(first):.1f} ms", "", ""]]
    for name, budget in (("at once", scale.long + 64), ("in chunks of 512", 512 if scale.long > 512 else 16)):
        late = percentile(long_arrives(llama, budget, scale).gaps, 99)
        alone.append([f"99th percentile between tokens while a prompt of {scale.long} is read {name}",
                      f"{1e3 * late:.1f} ms", "", ""])
    del llama                                           # the peer's own takes as much
    others, notes = beside_transformers(work, all_.rate, some.rate, scale)
    return dict(title=f"Serving, {scale.models[0][0]} shapes, random weights",
                headers=("", "measured", "of the bandwidth's limit", "times the peer's rate"),
                rows=[*rows, *others, *alone], notes=notes)


def serve_together(llama: Llama, work: Work, scale: Scale) -> Served:
    """All of these arrive at once. Two that do not count are served before: the first builds kernels."""
    longest = 2 * scale.longest
    engine = random_engine(llama, None, len(work) * longest, longest, len(work), prefix_cache=False)
    for lengths in ([(prompt, 4) for prompt, _ in work[:2]], work):
        served = at_once(engine, [random_request(*pair, i) for i, pair in enumerate(lengths)])
    return served


def long_arrives(llama: Llama, budget: int, scale: Scale) -> Served:
    """Eight texts are being written, and a long prompt arrives."""
    tokens, longest = 8 * (scale.shortest + scale.count) + scale.long + 16, scale.long + 16 + scale.count
    engine = random_engine(llama, None, tokens, longest, 9, prefix_cache=False)
    engine.decoder.budget = budget
    writers = [(0.0, random_request(scale.shortest, scale.count, i)) for i in range(8)]
    late = 0.2 if scale.device == "cuda" else 0.0
    return serve(engine.batch, engine.caches, [*writers, (late, random_request(scale.long, 2, 99))])


def beside_transformers(work: Work, rate: float, rate_of_some: float, scale: Scale) -> tuple[Rows, list[str]]:
    """transformers, one request at a time and by its continuous batching -> rows, and a note for each failure."""
    if not installed("transformers"):
        return [], [not_compared("transformers")]
    torch.cuda.empty_cache()                            # does nothing without a GPU
    peer, rows, notes = RandomTransformers(scale.models[0][1], scale.device, scale.dtype), [], list[str]()
    few, some = [(prompt, min(count, scale.short)) for prompt, count in work[:scale.alone]], work[:scale.batched]
    alone = (f"{len(few)} of them one at a time by transformers, answers of at most {scale.short} "
             f"(ours: all {len(work)})")
    for ours, asked, name, serves in (
            (rate, few, alone, peer.one_at_a_time),
            (rate_of_some, some, f"{scale.batched} of them by transformers' continuous batching", peer.batched)):
        try:
            theirs = serves(asked)
            rows.append([name, f"{theirs:.0f} tokens/s", "", f"{ours / theirs:.2f}"])
        except Exception as error:                      # whatever fails over there, our own figures stand
            notes.append(f"no figure for {name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return rows, notes


CASES: dict[str, Callable[[Scale, Roof], Case]] = dict(kernels=kernel_case, decode=decode_case,
                                                       speculation=speculation_case, serving=serving_case)


@torch.inference_mode()
def run_case(name: str, quick: bool = False) -> dict[str, Case]:
    """One case. ValueError where there is no GPU."""
    there = torch.cuda.is_available()
    if not there and not quick:
        raise ValueError(f"--gpu {name} needs a GPU, and PyTorch finds none here: "
                         "--quick runs it with toy shapes on the CPU")
    scale = replace(QUICK, device="cuda" if there else "cpu") if quick else Scale()
    roof = roofs(scale)
    case, kind = CASES[name](scale, roof), str(scale.dtype)[6:]
    told = f"roof: {roof[0] / 1e9:,.0f} GB/s read, {roof[1] / 1e12:,.3g} TFLOP/s in {kind} products"
    return {name: case | dict(notes=[told, *case["notes"]], read_bandwidth=roof[0], operations=roof[1])}
