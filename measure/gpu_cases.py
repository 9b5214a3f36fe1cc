"""The measurements on a GPU: models of 1B and 8B shapes, with random weights made on the device.

    python bench.py --gpu kernels        attention and products alone
    python bench.py --gpu decode         one stream, in 16, 8 and 4 bits
    python bench.py --gpu speculation    1B shapes draft for 8B shapes
    python bench.py --gpu serving        many requests at a time

Speed does not depend on the values of weights, so nothing is downloaded. Kernels are compiled and
passes recorded when a shape first occurs, which takes seconds, so every engine serves once before
it is measured. Shares are of the roof, the bytes that this GPU reads a second, measured first. Two
random models never agree, so in `speculation` a special coin accepts each draft with a fixed
probability α. Whether all is right on a GPU, tests say: run `pytest -q -m "" gpu measure` first.

Invariant: a row is printed and stored as soon as it is measured.
Not covered: requests that arrive one after the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.shell import say
from checkpoint.config import Config
from checkpoint.formats import Quantization
from checkpoint.load import fill_model
from drafters import ModelDrafter
from errors import UserError
from generate import Draft, Engine, Model
from kernels import Linear, Ops, ops_for
from kvcache import kv_bytes
from measure.clock import median_seconds, read_bandwidth
from measure.machine import machine
from measure.report import Results
from measure.serving import log_spread, random_request, serve_at_once, weight_bytes
from model import Llama
from paged import PagedCache
from quant import WIDTHS, Kind, quantize
from sampling import Keyed

Row = list[str]
SHAPES = {
    "8B": Config(128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 500000.0),
    "1B": Config(
        128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 500000.0, tie_word_embeddings=True
    ),
    "tiny": Config(4096, 256, 704, 8, 4, 2, 64, 1024, tie_word_embeddings=True),
}


@dataclass(frozen=True)
class Scale:
    """The sizes of all measurements."""

    target: str = "8B"
    draft: str = "1B"
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    context: int = 1024  # tokens before those that are made
    count: int = 128
    prompt: int = 8192  # tokens of attention
    num_texts: int = 64  # together
    num_requests: int = 256
    longest: int = 1024
    megabytes: int = 4096  # to measure the bandwidth
    repeats: int = 50  # of a kernel
    turns: int = 3


QUICK = Scale("tiny", "tiny", "cpu", torch.float32, 24, 8, 48, 2, 4, 12, 4, 1, 1)


# ---- Parts ---------------------------------------------------------------------------------------


def device_seconds(run: Callable[[], object], scale: Scale) -> float:
    """Median seconds of `run()`; on a GPU of its recording, so that launches do not count."""
    on_gpu = scale.device == "cuda"
    if on_gpu:
        from gpu.graphs import record

        run()  # compiles its kernels
        run = record(run)

    def repeat() -> None:
        for _ in range(scale.repeats):
            run()
        if on_gpu:
            torch.cuda.synchronize()

    return median_seconds(repeat) / scale.repeats


def random_numbers(scale: Scale, *shape: int) -> Tensor:
    return torch.randn(shape, device=scale.device, dtype=scale.dtype)


def random_model(name: str, bits: Kind, scale: Scale) -> Llama:
    """A model with random weights, rounded to these bits."""
    llama = Llama(SHAPES[name], scale.device, scale.dtype)
    if bits != 16:
        config = SHAPES[name].quantized(Quantization(bits))
        tensors = llama.named_tensors()
        llama = Llama(config, scale.device, scale.dtype, seed=None)
        fill_model(llama, tensors.items())
    return llama.pack_weights()


def random_engine(llama: Llama, draft: Llama | None, max_len: int, max_batch: int) -> Engine:
    """An engine of models without a tokenizer."""
    model = Model(llama, SimpleNamespace(vocab_size=llama.config.vocab_size))
    drafts = Draft(draft, True, partial(ModelDrafter, draft)) if draft else None
    return Engine(model, drafts, max_len * max_batch, max_len, max_batch)


# ---- Kernels alone -------------------------------------------------------------------------------


Kernel = tuple[str, Callable[[], object], int]  # its name, a call, the bytes that it must read


def kernel_rows(scale: Scale, bandwidth: float) -> Iterator[Row]:
    ops = ops_for(scale.device)
    for name, run, read in (*attention_kernels(ops, scale), *product_kernels(ops, scale)):
        seconds = device_seconds(run, scale)
        share = read / seconds / bandwidth
        yield [name, f"{1e3 * seconds:.3g}", f"{share:.0%}"]


def attention_kernels(ops: Ops, scale: Scale) -> Iterator[Kernel]:
    """A prompt, beside PyTorch's attention, which need not store; and a query of many texts."""
    c = SHAPES[scale.target]
    G = c.num_key_value_heads
    n = scale.prompt
    q = random_numbers(scale, 1, c.num_attention_heads, n, c.head_dim)
    k = random_numbers(scale, 1, G, n, c.head_dim)
    call = partial(F.scaled_dot_product_attention, q, k, k, is_causal=True, enable_gqa=True)
    yield f"PyTorch's attention, a prompt of {n}", call, 2 * k.nbytes
    run = attention_call(ops, scale, 1, n, "16")
    yield f"attention, a prompt of {n}", run, 2 * k.nbytes
    for kv_bits, bits in WIDTHS.items():
        read = kv_bytes(1, G, c.head_dim, scale.num_texts * n, scale.dtype, bits)
        run = attention_call(ops, scale, scale.num_texts, 1, kv_bits)
        yield f"attention, {scale.num_texts} texts of {n}, KV {kv_bits}", run, read


def attention_call(
    ops: Ops, scale: Scale, num_texts: int, count: int, kv_bits: str
) -> Callable[[], Tensor]:
    """Attention of each text's newest `count` of `scale.prompt` tokens."""
    c = SHAPES[scale.target]
    G = c.num_key_value_heads
    num_blocks = num_texts * (scale.prompt // 16 + 1)
    cache = PagedCache(
        1,
        G,
        c.head_dim,
        num_blocks,
        device=scale.device,
        dtype=scale.dtype,
        bits=WIDTHS[kv_bits],
        ops=ops,
    )
    seqs = [cache.open([])[0] for _ in range(num_texts)]
    if count < scale.prompt:
        cache.extend([(seq, [0] * (scale.prompt - count)) for seq in seqs])
    metadata = cache.extend([(seq, [0] * count) for seq in seqs])
    q = random_numbers(scale, num_texts * count, c.num_attention_heads, c.head_dim)
    k = random_numbers(scale, num_texts * count, G, c.head_dim)
    return partial(ops.store_and_attend, q, k, k, metadata, 0)


def product_kernels(ops: Ops, scale: Scale) -> Iterator[Kernel]:
    """The gate and up product, whose weights no GPU's cache holds."""
    K = SHAPES[scale.target].hidden_size
    N = 2 * SHAPES[scale.target].intermediate_size
    plain = random_numbers(scale, N, K)
    for bits in (16, 8, 4):
        weight = plain if bits == 16 else quantize(plain, bits)
        layer = ops.pack_weight(Linear(weight), scale.dtype, "gate_up")
        for rows in (1, 8, 64):
            x = random_numbers(scale, rows, K)
            name = f"product, {rows} rows of {K} to {N}, {bits} bits"
            yield name, partial(ops.linear, x, layer), weight.nbytes


# ---- Whole models --------------------------------------------------------------------------------


def decode_rows(scale: Scale, bandwidth: float) -> Iterator[Row]:
    """One stream; the share of the bandwidth is that of the weights alone."""
    for name in (scale.target, scale.draft):
        for bits in (16, 8, 4):
            llama = random_model(name, bits, scale)
            engine = random_engine(llama, None, 2 * scale.context, 1)
            seconds = stream_seconds(engine, scale)
            share = weight_bytes(llama, read=True) / seconds / bandwidth
            yield [f"{name}, {bits} bits", f"{1 / seconds:.1f}", f"{share:.0%}"]


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


def speculation_rows(scale: Scale, bandwidth: float) -> Iterator[Row]:
    """The second model drafts for the first, with a fixed γ and with auto."""
    target = random_model(scale.target, 16, scale)
    draft = random_model(scale.draft, 16, scale)
    for num_texts, alpha in product((1, scale.num_texts), (0.5, 0.7, 0.9)):
        plain, *drafted = (
            biased_seconds(target, draft, alpha, gamma, num_texts, scale)
            for gamma in (0, 2, 4, None)
        )
        gains = [f"{plain / seconds:.2f}" for seconds in drafted]
        yield [f"α {alpha}, {num_texts} texts", *gains]


def biased_seconds(
    target: Llama, draft: Llama, alpha: float, gamma: int | None, num_texts: int, scale: Scale
) -> float:
    """Seconds a token of each text, where drafts are accepted with probability alpha."""
    drafter = None if gamma == 0 else draft
    engine = random_engine(target, drafter, 2 * scale.context, num_texts)
    engine.runner.make_coin = partial(BiasedCoin, alpha=alpha, draw=target.ops.pick)
    return stream_seconds(engine, scale, gamma, num_texts)


def serving_rows(scale: Scale, bandwidth: float) -> Iterator[Row]:
    """Many requests at once, prompts and answers of many lengths."""
    llama = random_model(scale.target, 16, scale)
    n = scale.num_requests
    lengths = log_spread(n, scale.longest)
    engine = random_engine(llama, None, 2 * scale.longest, n)
    for _ in range(2):  # the first one compiles and records
        requests = []
        for seed, length in enumerate(lengths):
            requests.append(random_request(length, lengths[-1 - seed], seed))
        served = serve_at_once(engine, requests)
    first = f"{1e3 * median(served.first_token):.3g}"
    yield [f"{n} requests", f"{served.tokens_per_second:.0f}", first]


# ---- The cases -----------------------------------------------------------------------------------

SHARE = "of the read bandwidth"
CASES = {  # -> headers, rows
    "kernels": (("a kernel", "ms", SHARE), kernel_rows),
    "decode": (("one stream", "tokens/s", SHARE), decode_rows),
    "speculation": (("times plain decoding", "γ = 2", "γ = 4", "auto"), speculation_rows),
    "serving": (("many requests", "tokens/s", "first token, median ms"), serving_rows),
}


@torch.inference_mode()
def run_case(name: str, quick: bool, store: Callable[[Results], None]) -> Results:
    """Run a case: print each row, and give all results so far to `store`."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not quick:
        raise UserError(
            f"--gpu {name} needs a GPU, and PyTorch finds none here: "
            "--quick runs it with toy shapes on the CPU"
        )
    scale = QUICK if quick else Scale()
    if on_gpu:
        scale = replace(scale, device="cuda")
    bandwidth = read_bandwidth(scale.megabytes, scale.device)
    headers, measure_rows = CASES[name]
    section: Results = {"title": f"{name}, {scale.target} shapes", "headers": headers, "rows": []}
    results = machine(bandwidth, on_gpu) | {"gpu": {name: section}}
    for row in measure_rows(scale, bandwidth):
        section["rows"].append(row)
        say("  ".join(row))
        store(results)
    return results
