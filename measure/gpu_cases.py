"""The measurements on a GPU: models of 1B and 8B shapes, with random weights made on the device.

    python bench.py --gpu first          the first thing to run on one (first_contact.py)
    python bench.py --gpu smoke          whether all is right (smoke.py)
    python bench.py --gpu kernels        attention and products alone
    python bench.py --gpu decode         one stream, with weights in all ways, beside a model of it
    python bench.py --gpu speculation    1B shapes draft for 8B shapes
    python bench.py --gpu serving        many requests at a time

Speed does not depend on the values of weights, so nothing is downloaded. Kernels are compiled and
passes recorded when a shape first occurs, which takes seconds, so every engine serves once before
it is measured. Shares are of the roof, the bytes that this GPU reads a second, measured first. Two
random models never agree, so in `speculation` a special coin accepts each draft with a fixed
probability α.

Invariant: a row is printed and stored as soon as it is measured, and an error ends its row only.
Not covered: requests that arrive one after the other.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.shell import say
from errors import UserError
from generate import Engine
from kernels import Linear, ops_for
from kvcache import kv_bytes
from measure import smoke
from measure.clock import read_bandwidth
from measure.gpu_parts import (
    QUICK,
    SHAPES,
    WAYS,
    WRONG,
    Measurements,
    Row,
    Scale,
    device_seconds,
    guarded_row,
    random_engine,
    random_model,
    random_numbers,
)
from measure.machine import machine
from measure.report import Results
from measure.serving import log_spread, random_request, serve_at_once, weight_bytes
from model import Llama
from paged import PagedCache
from quant import WIDTHS, quantize
from sampling import Keyed

# ---- Kernels alone -------------------------------------------------------------------------------


Kernel = tuple[Callable[[], object], int]  # a call, and the bytes that it must read


def kernel_rows(scale: Scale, bandwidth: float) -> Measurements:
    """A prompt, beside PyTorch's attention, which need not store; a query of many texts; the gate
    and up product, whose weights no GPU's cache holds."""
    n = scale.prompt
    calls = {f"PyTorch's attention, a prompt of {n}": torch_attention_call}
    calls[f"attention, a prompt of {n}"] = partial(attention_call, num_texts=1, count=n)
    for kv_bits in WIDTHS:
        name = f"attention, {scale.num_texts} texts of {n}, KV {kv_bits}"
        calls[name] = partial(attention_call, num_texts=scale.num_texts, kv_bits=kv_bits)
    for way, rows in product(WAYS, (1, 8, 64)):
        calls[f"gate and up, {way}, {rows} rows"] = partial(product_call, way=way, rows=rows)
    for name, make in calls.items():
        yield name, partial(kernel_row, make, scale, bandwidth)


def kernel_row(make: Callable[[Scale], Kernel], scale: Scale, bandwidth: float) -> Row:
    run, read = make(scale)
    seconds = device_seconds(run, scale)
    share = read / seconds / bandwidth
    return [f"{1e3 * seconds:.3g}", f"{share:.0%}"]


def torch_attention_call(scale: Scale) -> Kernel:
    c = SHAPES[scale.target]
    n = scale.prompt
    q = random_numbers(scale, 1, c.num_attention_heads, n, c.head_dim)
    k = random_numbers(scale, 1, c.num_key_value_heads, n, c.head_dim)
    call = partial(F.scaled_dot_product_attention, q, k, k, is_causal=True, enable_gqa=True)
    return call, 2 * k.nbytes


def attention_call(scale: Scale, num_texts: int, count: int = 1, kv_bits: str = "16") -> Kernel:
    """Attention of each text's newest `count` of `scale.prompt` tokens."""
    c = SHAPES[scale.target]
    G = c.num_key_value_heads
    num_blocks = num_texts * (scale.prompt // 16 + 1)
    bits = WIDTHS[kv_bits]
    ops = ops_for(scale.device)
    cache = PagedCache(
        1,
        G,
        c.head_dim,
        num_blocks,
        device=scale.device,
        dtype=scale.dtype,
        bits=bits,
        ops=ops,
    )
    seqs = [cache.open([])[0] for _ in range(num_texts)]
    if count < scale.prompt:
        cache.extend([(seq, [0] * (scale.prompt - count)) for seq in seqs])
    metadata = cache.extend([(seq, [0] * count) for seq in seqs])
    q = random_numbers(scale, num_texts * count, c.num_attention_heads, c.head_dim)
    k = random_numbers(scale, num_texts * count, G, c.head_dim)
    read = kv_bytes(1, G, c.head_dim, num_texts * scale.prompt, scale.dtype, bits)
    return partial(ops.store_and_attend, q, k, k, metadata, 0), read


def product_call(scale: Scale, way: str, rows: int) -> Kernel:
    K = SHAPES[scale.target].hidden_size
    N = 2 * SHAPES[scale.target].intermediate_size
    weight = random_numbers(scale, N, K)
    layout = WAYS[way]
    if layout is not None:
        weight = quantize(weight, layout.bits, layout.group)
        weight = weight._replace(input_bits=layout.activations)
    ops = ops_for(scale.device)
    packed = ops.pack_weight(Linear(weight), scale.dtype, "gate_up")
    x = random_numbers(scale, rows, K)
    return partial(ops.linear, x, packed), weight.nbytes


# ---- Whole models --------------------------------------------------------------------------------


def decode_rows(scale: Scale, bandwidth: float) -> Measurements:
    """One stream; the share of the bandwidth is that of the weights alone."""
    for name, way in product((scale.target, scale.draft), WAYS):
        yield f"{name}, {way}", partial(decode_row, name, way, scale, bandwidth)


def decode_row(name: str, way: str, scale: Scale, bandwidth: float) -> Row:
    llama = random_model(name, way, scale)
    engine = random_engine(llama, None, 2 * scale.context, 1)
    seconds = stream_seconds(engine, scale)
    share = weight_bytes(llama, read=True) / seconds / bandwidth
    return [f"{1 / seconds:.1f}", f"{share:.0%}"]


def stream_seconds(
    engine: Engine, scale: Scale, gamma: int | None = 0, num_texts: int = 1
) -> float:
    """Seconds a token of each text: a median over turns. One turn more warms up."""
    seconds = []
    for turn in range(scale.turns + 1):
        seeds = range(num_texts * turn, num_texts * (turn + 1))
        requests = [random_request(scale.context, scale.count, seed, gamma) for seed in seeds]
        seconds.append(serve_at_once(engine, requests).seconds_per_token)
    return median(seconds[1:])


class BiasedCoin(Keyed):
    """Accepts every draft with probability alpha, whatever p and q are; never an absent draft."""

    def __init__(self, *keys: Any, alpha: float, **options: Any):
        super().__init__(*keys, **options)
        self.alpha = alpha

    def accept(self, prob: Tensor) -> Tensor:
        return super().accept(torch.where(prob > 0, self.alpha, 0.0))


def speculation_rows(scale: Scale, bandwidth: float) -> Measurements:
    """The second model drafts for the first, with a fixed γ and with auto."""
    target = cache(partial(random_model, scale.target, "16 bits", scale))
    draft = cache(partial(random_model, scale.draft, "16 bits", scale))
    for num_texts, alpha in product((1, scale.num_texts), (0.5, 0.7, 0.9)):
        measure = partial(speculation_row, target, draft, alpha, num_texts, scale)
        yield f"α {alpha}, {num_texts} texts", measure


def speculation_row(
    target: Callable[[], Llama],
    draft: Callable[[], Llama],
    alpha: float,
    num_texts: int,
    scale: Scale,
) -> Row:
    plain, *drafted = (
        biased_seconds(target(), draft(), alpha, gamma, num_texts, scale)
        for gamma in (0, 2, 4, None)
    )
    return [f"{plain / seconds:.2f}" for seconds in drafted]


def biased_seconds(
    target: Llama, draft: Llama, alpha: float, gamma: int | None, num_texts: int, scale: Scale
) -> float:
    """Seconds a token of each text, where drafts are accepted with probability alpha."""
    drafter = None if gamma == 0 else draft
    engine = random_engine(target, drafter, 2 * scale.context, num_texts)
    engine.runner.make_coin = partial(BiasedCoin, alpha=alpha, draw=target.ops.pick)
    return stream_seconds(engine, scale, gamma, num_texts)


def serving_rows(scale: Scale, bandwidth: float) -> Measurements:
    """Many requests at once, prompts and answers of many lengths."""
    yield f"{scale.num_requests} requests", partial(serving_row, scale)


def serving_row(scale: Scale) -> Row:
    llama = random_model(scale.target, "16 bits", scale)
    n = scale.num_requests
    lengths = log_spread(n, scale.longest)
    engine = random_engine(llama, None, 2 * scale.longest, n)
    for _ in range(2):  # the first one compiles and records
        requests = []
        for seed, length in enumerate(lengths):
            requests.append(random_request(length, lengths[-1 - seed], seed))
        served = serve_at_once(engine, requests)
    first = f"{1e3 * median(served.first_token):.3g}"
    return [f"{served.tokens_per_second:.0f}", first]


# ---- The cases -----------------------------------------------------------------------------------

SHARE = "of the read bandwidth"
Case = tuple[tuple[str, ...], Callable[[Scale, float], Measurements]]  # headers, rows
CASES: dict[str, Case] = {
    "smoke": (smoke.HEADERS, smoke.smoke_rows),
    "kernels": (("a kernel", "ms", SHARE), kernel_rows),
    "decode": (("one stream", "tokens/s", SHARE), decode_rows),
    "speculation": (("times plain decoding", "γ = 2", "γ = 4", "auto"), speculation_rows),
    "serving": (("many requests", "tokens/s", "first token, median ms"), serving_rows),
}


def check_gpu(name: str, quick: bool) -> None:
    """UserError unless there is a GPU, or it is not needed."""
    if not torch.cuda.is_available() and not quick:
        raise UserError(
            f"--gpu {name} needs a GPU, and PyTorch finds none here: "
            "--quick runs it with toy shapes on the CPU"
        )


@torch.inference_mode()
def run_case(name: str, quick: bool, store: Callable[[Results], None]) -> Results:
    """Run a case: print each row, and give all results so far to `store`."""
    check_gpu(name, quick)
    on_gpu = torch.cuda.is_available()
    scale = QUICK if quick else Scale()
    if on_gpu:
        scale = replace(scale, device="cuda")
    bandwidth = read_bandwidth(scale.megabytes, scale.device)
    headers, measurements = CASES[name]
    rows: list[Row] = []
    section: Results = {"title": f"{name}, {scale.target} shapes", "headers": headers, "rows": rows}
    results = machine(bandwidth, on_gpu) | {"gpu": {name: section}}
    for measurement in measurements(scale, bandwidth):
        row = guarded_row(measurement, len(headers))
        rows.append(row)
        say("  ".join(row))
        store(results)
    say(verdict(results))
    return results


def wrong_rows(results: Results) -> list[Row]:
    """Those of GPU cases."""
    rows = [row for section in results.get("gpu", {}).values() for row in section["rows"]]
    return [row for row in rows if row[-1].startswith(WRONG)]


def verdict(results: Results) -> str:
    """A line about all rows."""
    wrong = wrong_rows(results)
    if not wrong:
        return "all is as it should be"
    return (
        f"{len(wrong)} rows are wrong; after an illegal address all others are, too: look at the "
        f"first one, {wrong[0][0]}"
    )
