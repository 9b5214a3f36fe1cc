"""The measurements on a GPU: models of 1B and 8B shapes, with random weights that are made on the device.

    python bench.py --gpu smoke            is everything right? Run this first (gpukernels.py)
    python bench.py --gpu kernels          attention, products and sampling alone
    python bench.py --gpu decode           one stream, 16, 8 and 4 bits
    python bench.py --gpu speculation-16   1B shapes draft for 8B shapes; speculation-4: in 4 bits
    python bench.py --gpu serving          many requests at a time, also while a long prompt is read
    python bench.py --gpu parallel         one model over all GPUs of this machine (parallel.py)

Figures are shares of the machine's roof, measured just before: bytes read a second, and bf16 operations a second. New
kernels are compiled and new shapes recorded, which takes seconds, so every engine serves once before it is measured.
Two random models never agree, so in `speculation` a special coin accepts each draft with a fixed probability α. The
least time of serving is the time to read, in each step, all weights and the keys and values of the texts.

Invariant: each row is printed and kept as soon as it is measured; a peer that is missing or fails is named.
Not covered: requests that arrive one after the other (traffic.py has them on a CPU).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from app.shell import say
from checkpoint.config import Config
from errors import UserError
from gamma import expected_tokens
from generate import Engine
from kvcache import kv_bytes
from measure.clock import percentile
from measure.gpukernels import kernel_rows, smoke_rows
from measure.gpumodels import (
    QUICK,
    Roof,
    Rows,
    Scale,
    StepModel,
    launches,
    random_engine,
    random_model,
    roofs,
    tried,
)
from measure.pair import Served, at_once, log_spread, machine, random_request, serve, weight_bytes
from measure.peers import RandomTransformers, Work, installed, not_compared
from measure.report import Results
from measure.shares import compared
from model import Llama
from sampling import Keyed


def stream_rows(scale: Scale, roof: Roof) -> Rows:
    """One stream, and the time that `StepModel` predicts for it."""
    context, longest = scale.context, scale.context + scale.count
    yield (
        f"One stream, {context} tokens read",
        (
            "",
            "tokens/s",
            "ms a token",
            "by the model",
            "launches a pass",
            "of the read bandwidth",
            "times 16 bits",
        ),
    )
    model = StepModel.measured(scale, roof)
    yield f"a launch in a recording {1e6 * model.launch:.2f} µs, a wait for the device {1e6 * model.wait:.1f} µs"
    for name, c in scale.models:
        cached, first = (
            kv_bytes(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, context, scale.dtype),
            0.0,
        )
        for bits in (16, 8, "fp8", 4):
            llama = random_model(c, bits, scale)
            asked = [random_request(context, scale.count, 0) for _ in range(scale.turns)]
            engine = random_engine(llama, None, longest, longest, 1)
            one = median(median(at_once(engine, [r]).gaps) for r in asked) / engine.decoder.ahead
            size, launched = (
                weight_bytes(llama, read=True) + cached,
                launches_of_a_pass(llama, engine, scale),
            )
            first, least = first or one, model.seconds(size, launched, engine.decoder.ahead)
            yield [
                f"{name}, {bits} bits",
                1 / one,
                1e3 * one,
                1e3 * least,
                f"{launched}",
                f"{size / one / roof[0]:.0%}",
                f"{first / one:.2f}",
            ]
            del llama, engine
        works = {
            f"{name}, transformers, {kind} cache": partial(
                RandomTransformers.seconds_a_token,
                prompt=context,
                count=scale.count,
                turns=scale.turns,
                cache=kind,
            )
            for kind in ("dynamic", "static")
        }
        for told, theirs in beside_transformers(c, works, scale):
            yield (
                [told, 1 / theirs, 1e3 * theirs, "", "", "", f"{first / theirs:.2f}"]
                if theirs
                else told
            )


def launches_of_a_pass(llama: Llama, engine: Engine, scale: Scale) -> int:
    """The launches of a pass over one token after `context` others, once it is compiled and recorded."""
    cache, token = engine.caches[0], torch.ones(1, dtype=torch.int64, device=scale.device)
    seq, _ = cache.open(())
    for new in (scale.context, 1, 1):
        step, tokens = cache.extend([(seq, [1] * new)]), token.expand(new).contiguous()
        llama(tokens, step, slice(-1, None))
    step = cache.extend([(seq, [1])])
    found = launches(lambda: llama(token, step, slice(-1, None)), scale)
    cache.free(seq)
    return found


def beside_transformers(
    config: Config, works: dict[str, Callable[[RandomTransformers], float]], scale: Scale
) -> Iterator[tuple[str, float]]:
    """transformers' figures: (name and the attention that it chose, figure), or (a note of why there is none, 0)."""
    torch.cuda.empty_cache()  # does nothing without a GPU
    missing = "" if installed("transformers") else not_compared("transformers")
    peer = missing or tried(lambda: RandomTransformers(config, scale.device, scale.dtype))
    for name, work in works.items():
        found = peer if isinstance(peer, str) else tried(partial(work, peer))
        yield (
            (f"no figure for {name}: {found}", 0)
            if isinstance(found, str)
            else (f"{name} ({peer.attention})", found)
        )


class Biased(Keyed):
    """A coin that accepts every draft with probability alpha, whatever p and q are, but never an absent draft."""

    def __init__(self, *place: Any, alpha: float, **more: Any):
        super().__init__(*place, **more)
        self.alpha = alpha

    def accept(self, prob: Tensor) -> Tensor:
        return super().accept(torch.where(prob > 0, self.alpha, 0.0))


def speculation_rows(scale: Scale, roof: Roof, bits: int) -> Rows:
    """The second model drafts for the first; with fixed γ, then with γ by the clock for several streams."""
    yield (
        f"Speculation with random weights, a draft of {bits} bits: a coin accepts with probability α",
        ("α", "γ", "streams", "times plain decoding", "by the formula", "share of it"),
    )
    target, draft = (
        random_model(config, n, scale) for (_, config), n in zip(scale.models, (16, bits))
    )
    cases = [(alpha, gamma, 1) for alpha in scale.alphas for gamma in scale.gammas]
    cases += [
        (alpha, None, n)
        for alpha in {scale.alphas[0]: 1, scale.alphas[-1]: 1}
        for n in scale.streams
    ]
    for case in cases:
        yield speculate(target, draft, *case, scale)


def speculate(
    target: Llama, draft: Llama, alpha: float, gamma: int | None, streams: int, scale: Scale
) -> list[str]:
    """A row: plain decoding and drafting in turns; the first turn warms up. The gain is by the wall clock, after all
    prompts are read; the formula takes the device's times and the mean γ."""
    longest, gains, coin = (
        scale.context + scale.count,
        [],
        partial(Biased, alpha=alpha, picks=target.ops.pick),
    )
    engines = [
        random_engine(target, drafter, streams * longest, longest, streams)
        for drafter in (None, draft)
    ]
    for turn in range(scale.turns + 1):
        spent, device = [], []
        for engine, drafts in zip(engines, (0, gamma)):
            engine.decoder.coin, engine.decoder.budget = (
                coin,
                streams * longest,
            )  # one coin: recordings depend on it
            asked = [
                random_request(scale.context, scale.count, 100 * turn + i, drafts)
                for i in range(streams)
            ]
            seconds, rounds = (
                sum(at_once(engine, asked).gaps),
                [done for one in asked for done in one.rounds[1:]],
            )
            spent.append(seconds / sum(done.accepted + 1 for done in rounds))
            device.append(
                median(done.seconds / (done.accepted + 1) for done in rounds)
            )  # a plain token's
        gains.append(spent[0] / spent[1])
    gain, drafted, costs = (
        median(gains[1:]),
        mean(done.drafted for done in rounds),
        engine.decoder.costs,
    )
    cost = costs.passes.at(round(streams * (drafted + 1))) + drafted * costs.drafting(drafted)
    formula, told = (
        expected_tokens(alpha, drafted) * device[0] / cost,
        gamma or f"by the clock: {drafted:.1f}",
    )
    return [
        f"{alpha}",
        f"{told}",
        f"{streams}",
        f"{gain:.2f}",
        f"{formula:.2f}",
        f"{gain / formula:.2f}",
    ]


def serving_rows(scale: Scale, roof: Roof) -> Rows:
    """Many requests at once; the first token of a prompt; a long prompt among other texts; transformers' batching."""
    (name, config), prompt = scale.models[0], min(512, scale.longest)
    yield (
        f"Serving, {name} shapes",
        ("", "measured", "of the bandwidth's limit", "times the peer's rate"),
    )
    llama, lengths = (
        random_model(config, 16, scale),
        log_spread(scale.requests, scale.longest, scale.longest / scale.shortest),
    )
    work, size = list(zip(lengths, reversed(lengths))), weight_bytes(llama, read=True)
    for asked in (work, work[: scale.streams[-1]]):
        served = serve_together(llama, asked, scale)
        rate, least = served.rate, (served.steps * size + served.read) / roof[0]
        yield [
            f"{len(asked)} requests, prompts and answers of {scale.shortest} to {scale.longest}",
            f"{rate:.0f} tokens/s",
            f"{least / served.seconds:.0%}",
            "",
        ]
    first = [
        at_once(random_engine(llama, None, 600, 600, 1), [random_request(prompt, 1, i)]).first[0]
        for i in range(scale.turns + 1)
    ][1:]
    yield [f"first token of a prompt of {prompt}", f"{1e3 * median(first):.1f} ms", "", ""]
    for name, budget in (
        ("at once", scale.long + 64),
        ("in chunks of 512", 512 if scale.long > 512 else 16),
    ):
        late = 1e3 * percentile(long_arrives(llama, budget, scale).gaps, 99)
        yield [
            f"99th percentile between tokens, a prompt of {scale.long} is read {name}",
            f"{late:.1f} ms",
            "",
            "",
        ]
    del llama  # the peer's model needs its memory
    works = {
        f"{len(asked)} of them by transformers' continuous batching": lambda peer: peer.batched(
            asked
        )
    }
    for told, theirs in beside_transformers(config, works, scale):
        yield [told, f"{theirs:.0f} tokens/s", "", f"{rate / theirs:.2f}"] if theirs else told


def serve_together(llama: Llama, work: Work, scale: Scale) -> Served:
    """Serve all requests at once, twice: the second time all kernels are compiled and all passes recorded."""
    longest = 2 * scale.longest
    engine = random_engine(llama, None, len(work) * longest, longest, len(work), prefix_cache=False)
    for _ in range(2):
        served = at_once(engine, [random_request(*pair, i) for i, pair in enumerate(work)])
    return served


def long_arrives(llama: Llama, budget: int, scale: Scale) -> Served:
    """Serve eight texts that are being written when a long prompt arrives."""
    tokens, longest = (
        8 * (scale.shortest + scale.count) + scale.long + 16,
        scale.long + 16 + scale.count,
    )
    engine = random_engine(llama, None, tokens, longest, 9, prefix_cache=False)
    engine.decoder.budget = budget
    writers = [(0.0, random_request(scale.shortest, scale.count, i)) for i in range(8)]
    late = 0.2 * (scale.device == "cuda"), random_request(scale.long, 2, 99)
    return serve(engine.batch, engine.caches, [*writers, late])


def parallel_rows(scale: Scale, roof: Roof) -> Rows:
    """One stream over all GPUs of this machine, beside one GPU."""
    n = 2 if scale.device == "cpu" else torch.cuda.device_count()
    yield (
        f"Tensor parallelism, {n} processes",
        ("", "tokens/s of one", "of all together", "times one"),
    )
    for name, config in scale.models[: scale.turns] if n > 1 else ():
        found = tried(
            lambda: compared(
                config, n, scale.turns, scale.device, str(scale.dtype)[6:], scale.count
            )
        )
        yield (
            found
            if isinstance(found, str)
            else [name, found["one"], found["many"], f"{found['ratio']:.2f}"]
        )
    if n == 1:
        yield "this machine has one GPU: two are needed"


CASES = {
    "smoke": smoke_rows,
    "kernels": kernel_rows,
    "decode": stream_rows,
    "serving": serving_rows,
    "parallel": parallel_rows,
    **{f"speculation-{bits}": partial(speculation_rows, bits=bits) for bits in (16, 4)},
}


@torch.inference_mode()
def run_case(
    name: str, quick: bool = False, keep: Callable[..., Any] = lambda results: None
) -> Results:
    """Run a case: print each row, and give all results so far to `keep`. ValueError without a GPU, unless quick."""
    there = torch.cuda.is_available()
    if not there and not quick:
        raise UserError(
            f"--gpu {name} needs a GPU, and PyTorch finds none here: "
            "--quick runs it with toy shapes on the CPU"
        )
    scale = replace(QUICK, device="cuda" if there else "cpu") if quick else Scale()
    roof, kind = roofs(scale), str(scale.dtype)[6:]
    told = f"roof: {roof[0] / 1e9:,.0f} GB/s read, {roof[1] / 1e12:,.3g} TFLOP/s in {kind} products"
    title, headers = next(rows := CASES[name](scale, roof))
    case = dict(
        title=title,
        headers=headers,
        rows=[],
        notes=[told],
        read_bandwidth=roof[0],
        operations=roof[1],
    )
    results = machine(roof[0]) | dict(gpu={name: case})
    say("\n".join((title, told, "  ".join(headers))))
    for row in rows:
        if isinstance(row, str):
            case["notes"].append(row)
        else:
            case["rows"].append(
                row := [cell if isinstance(cell, str) else f"{cell:.3g}" for cell in row]
            )
        say(row if isinstance(row, str) else "  ".join(row))
        keep(results)
    return results
