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

import functools
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from app.shell import say
from errors import UserError
from generate import Engine
from kernels import Linear, ops_for
from kvcache import KVSpec
from measure import first_contact, smoke
from measure.clock import read_bandwidth
from measure.gpu_parts import (
    QUICK,
    SHAPES,
    WAYS,
    WRONG,
    Row,
    Scale,
    device_seconds,
    random_engine,
    random_model,
    random_numbers,
)
from measure.launches import launch_seconds, launches_a_token, token_bytes
from measure.machine import machine, processor
from measure.report import Results
from measure.serving import log_spread, random_request, serve_at_once
from model import Llama, weight_bytes
from paged import PagedCache
from quant import WIDTHS, quantize
from sampling import Keyed

Key = tuple[Any, ...]  # which names a row


# ---- Kernels alone -------------------------------------------------------------------------------


Kernel = tuple[Callable[[], object], int]  # a call, and the bytes that it must read


def kernel_keys(scale: Scale) -> Iterator[Key]:
    """A prompt, beside PyTorch's attention, which need not store; a query of many texts; the gate
    and up product, whose weights no GPU's cache holds."""
    yield ("PyTorch's attention",)
    yield "attention", 1, scale.prompt, "16"
    yield from product(("attention",), (scale.num_texts,), (1,), WIDTHS)
    yield from product(("product",), WAYS, (1, 8, 64))


def kernel_row(scale: Scale, bandwidth: float, kind: str, *key: Any) -> Row:
    run, read = KERNELS[kind](scale, *key)
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


def attention_call(scale: Scale, num_texts: int, count: int, kv_bits: str) -> Kernel:
    """Attention of each text's newest `count` of `scale.prompt` tokens."""
    c = SHAPES[scale.target]
    G = c.num_key_value_heads
    num_blocks = num_texts * (scale.prompt // 16 + 1)
    bits = WIDTHS[kv_bits]
    ops = ops_for(scale.device)
    cache = PagedCache(
        KVSpec(1, G, c.head_dim, dtype=scale.dtype, bits=bits, device=scale.device),
        num_blocks,
        ops=ops,
    )
    seqs = [cache.open([])[0] for _ in range(num_texts)]
    if count < scale.prompt:
        cache.extend([(seq, [0] * (scale.prompt - count)) for seq in seqs])
    metadata = cache.extend([(seq, [0] * count) for seq in seqs])
    num_heads = c.num_attention_heads + 2 * G
    qkv = random_numbers(scale, num_texts * count, num_heads, c.head_dim)
    read = KVSpec(1, G, c.head_dim, scale.dtype, bits).bytes(num_texts * scale.prompt)
    return partial(ops.attend, qkv, G, None, metadata, 0), read


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


KERNELS: dict[str, Callable[..., Kernel]] = {
    "PyTorch's attention": torch_attention_call,
    "attention": attention_call,
    "product": product_call,
}


# ---- Whole models --------------------------------------------------------------------------------


def decode_row(scale: Scale, bandwidth: float, name: str, way: str) -> Row:
    """One stream, beside the model of it; the share is that of the weights alone."""
    llama = random_model(name, way, scale)
    engine = random_engine(llama, None, 2 * scale.context, 1)
    seconds = stream_seconds(engine, scale)
    share = weight_bytes(llama, read=True) / seconds / bandwidth
    launches = launches_a_token(llama, scale.context)
    read = token_bytes(llama, scale.context + scale.count // 2)
    by_model = read / bandwidth + launches * launch_seconds(scale)
    return [f"{1 / seconds:.1f}", f"{share:.0%}", f"{launches:.0f}", f"{1 / by_model:.1f}"]


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


@functools.lru_cache(1)
def speculation_pair(scale: Scale) -> tuple[Llama, Llama]:
    """Target and draft."""
    return random_model(scale.target, "16 bits", scale), random_model(scale.draft, "16 bits", scale)


def speculation_row(scale: Scale, bandwidth: float, alpha: float, num_texts: int) -> Row:
    """The second model drafts for the first, with a fixed γ and with auto."""
    pair = speculation_pair(scale)
    plain, *drafted = (
        biased_seconds(*pair, alpha, gamma, num_texts, scale) for gamma in (0, 2, 4, None)
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


def serving_row(scale: Scale, bandwidth: float, n: int) -> Row:
    """So many requests at once, prompts and answers of many lengths."""
    llama = random_model(scale.target, "16 bits", scale)
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
ERROR = ("at most", "")
WRONG_ROWS = "{} rows are wrong: look at the first, {}; an illegal address ends all after it"


class Case(NamedTuple):
    """A table: for each key of `keys` a row, `row(scale, bandwidth, *key)`."""

    headers: tuple[str, ...]  # the first one names the parts of a key
    keys: Callable[[Scale], Iterable[Key]]
    row: Callable[..., Row]


CASES = {
    "machine": Case(
        ("this machine", "free GB", "PyTorch", "CUDA", "Triton"),
        lambda scale: [(processor(scale.on_gpu),)],
        first_contact.machine_row,
    ),
    "recordings": Case(
        ("products and norms, a recording", "error: launched, replayed", *ERROR),
        lambda scale: product(range(3)),
        first_contact.recording_row,
    ),
    "resources": Case(
        ("weights, KV", "seconds", "kernels", "most registers", "most spilled bytes"),
        lambda scale: zip(("16 bits", "INT4"), ("16", "8/4")),
        first_contact.resource_row,
    ),
    "texts": Case(
        ("greedy texts of tiny: bits, KV, draft", "the first other token", ""),
        first_contact.text_keys,
        first_contact.text_row,
    ),
    "smoke": Case(
        ("weights, KV, dtype, past, texts", "error: launched, replayed", *ERROR),
        smoke.smoke_keys,
        smoke.smoke_row,
    ),
    "kernels": Case(
        ("attention: texts, new tokens, KV; product: weights, rows", "ms", SHARE),
        kernel_keys,
        kernel_row,
    ),
    "decode": Case(
        ("one stream", "tokens/s", SHARE, "launches", "tokens/s by the model"),
        lambda scale: product((scale.target, scale.draft), WAYS),
        decode_row,
    ),
    "speculation": Case(
        ("times plain decoding: α, texts", "γ = 2", "γ = 4", "auto"),
        lambda scale: product((0.5, 0.7, 0.9), (1, scale.num_texts)),
        speculation_row,
    ),
    "serving": Case(
        ("requests", "tokens/s", "first token, median ms"),
        lambda scale: [(scale.num_requests,)],
        serving_row,
    ),
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
    case = CASES[name]
    rows: list[Row] = []
    title = f"{name}, {scale.target} shapes"
    results = machine(bandwidth, on_gpu)
    results["gpu"] = {name: {"title": title, "headers": case.headers, "rows": rows}}
    for key in case.keys(scale):
        rows.append(guarded_row(case, key, scale, bandwidth))
        say("  ".join(rows[-1]))
        store(results)
    wrong = wrong_rows(results)
    say(WRONG_ROWS.format(len(wrong), wrong[0]) if wrong else "all is as it should be")
    return results


def guarded_row(case: Case, key: Key, scale: Scale, bandwidth: float) -> Row:
    """The row of a key; after an error its first line, and the traceback is said."""
    name = ", ".join(map(str, key))
    try:
        return [name, *case.row(scale, bandwidth, *key)]
    except Exception as error:
        say(traceback.format_exc())
        first_line, *_ = f"{type(error).__name__}: {error}".splitlines()
        empty = [""] * (len(case.headers) - 2)
        return [name, *empty, f"{WRONG}: {first_line}"]


def wrong_rows(results: Results) -> list[str]:
    """Their names, of GPU cases."""
    rows = [row for section in results.get("gpu", {}).values() for row in section["rows"]]
    return [row[0] for row in rows if row[-1].startswith(WRONG)]
