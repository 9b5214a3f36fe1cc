"""The measurements on a GPU: models of 1B and 8B shapes, with random weights made on the device.

    python bench.py --gpu smoke          is everything right? Run this first, and pytest gpu
    python bench.py --gpu kernels        attention and products alone
    python bench.py --gpu decode         one stream, in 16, 8 and 4 bits
    python bench.py --gpu speculation    1B shapes draft for 8B shapes
    python bench.py --gpu serving        many requests at a time
    python bench.py --gpu parallel       one model over all GPUs of this machine

Speed does not depend on the values of weights, so nothing is downloaded. Kernels are compiled and
passes recorded when a shape first occurs, which takes seconds, so every engine serves once before
it is measured. Shares are of the roof, the bytes that this GPU reads a second, measured first. Two
random models never agree, so in `speculation` a special coin accepts each draft with a fixed
probability α.

Invariant: a row is printed and stored as soon as it is measured.
Not covered: requests that arrive one after the other (traffic.py has them, on a CPU).
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
from checkpoint.formats import Quantization
from checkpoint.load import fill_model
from drafters import ModelDrafter
from errors import UserError
from generate import Draft, Engine, Model, load_draft
from kernels import Linear, Ops, ops_for
from kvcache import kv_bytes
from measure.clock import median_seconds
from measure.effort import SENTENCES
from measure.machine import machine
from measure.report import Results
from measure.serving import log_spread, random_request, serve_at_once, weight_bytes
from measure.shards import SHAPES, compare_processes
from model import Llama
from paged import PagedCache
from quant import WIDTHS, Kind, quantize
from request import Request, Settings
from sampling import Keyed

Row = list[str]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Scale:
    """The sizes of all measurements."""

    target: str = "8B"
    draft: str = "1B"
    device: torch.device = torch.device("cuda")
    dtype: torch.dtype = torch.bfloat16
    context: int = 1024  # tokens before those that are made
    count: int = 128
    prompt: int = 8192  # tokens of attention
    num_texts: int = 64  # together
    num_requests: int = 256
    longest: int = 1024
    read: int = 1 << 32  # bytes, to measure the bandwidth
    turns: int = 3


QUICK = Scale("tiny", "tiny", CPU, torch.float32, 24, 8, 48, 2, 4, 12, 1 << 22, 1)


# ---- Parts ---------------------------------------------------------------------------------------


def device_seconds(run: Callable[[], object], scale: Scale) -> float:
    """Median seconds of `run()`; on a GPU of its recording, so that launches do not count."""
    if scale.device.type == "cuda":
        from gpu.graphs import record

        run()  # compiles its kernels
        run = record(run)

    def repeat(times: int) -> None:
        for _ in range(times):
            run()
        if scale.device.type == "cuda":
            torch.cuda.synchronize()

    once = median_seconds(partial(repeat, 1), repeats=1)
    times = max(1, round(0.02 / once)) if scale.turns > 1 else 1
    return median_seconds(partial(repeat, times)) / times


def measure_bandwidth(scale: Scale) -> float:
    """Bytes read a second, by a sum over more than a cache holds."""
    data = torch.ones(scale.read // 4, device=scale.device)
    return data.nbytes / device_seconds(data.sum, scale)


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
    drafts = None
    if draft is not None:
        drafts = Draft(draft, True, partial(ModelDrafter, draft))
    return Engine(model, drafts, max_len * max_batch, max_len, max_batch)


# ---- Is everything right? ------------------------------------------------------------------------


def smoke_rows(scale: Scale, bandwidth: float) -> Iterator[Row]:
    """Greedy texts of the embedded model in float32 must be the CPU's, however they are made."""
    cases = [(bits, "16") for bits in (8, 4, "fp8", "nf4")]
    cases += [(16, kv_bits) for kv_bits in WIDTHS]
    for bits, kv_bits in cases:
        wanted = greedy_texts(CPU, bits, kv_bits, None, scale.count)
        for draft in (None, "tiny-draft"):
            texts = greedy_texts(scale.device, bits, kv_bits, draft, scale.count)
            verdict = "ok" if texts == wanted else "WRONG"
            yield [f"tiny in {bits} bits, KV {kv_bits}, {draft or 'no draft'}", verdict]


def greedy_texts(
    device: torch.device, bits: Kind, kv_bits: str, draft: str | None, count: int
) -> list[list[int]]:
    model = Model.load("tiny", device, torch.float32, bits)
    drafts = load_draft(draft, model, torch.float32)
    engine = Engine(model, drafts, 1000, 500, 2, kv_bits=kv_bits)
    settings = Settings(temperature=0.0, seed=0, max_tokens=count, gamma=3)
    requests = []
    for prompt in SENTENCES[:2]:
        requests.append(Request(model.encode(prompt), settings))
    return serve_at_once(engine, requests).texts


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
    H = c.num_attention_heads
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
    past = [0] * (scale.prompt - count)
    if past:
        cache.extend([(seq, past) for seq in seqs])
    metadata = cache.extend([(seq, [0] * count) for seq in seqs])
    qkv = random_numbers(scale, num_texts * count, H + 2 * G, c.head_dim)
    q, k, v = (x.contiguous() for x in qkv.split((H, G, G), dim=1))
    return partial(ops.store_and_attend, q, k, v, metadata, 0)


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
        requests = []
        for i in range(num_texts):
            seed = num_texts * turn + i
            requests.append(random_request(scale.context, scale.count, seed, gamma))
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
    engine.runner.coin = partial(BiasedCoin, alpha=alpha, pick=target.ops.pick)
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


def parallel_rows(scale: Scale, bandwidth: float) -> Iterator[Row]:
    """One stream over all GPUs of this machine (or two processes), beside one."""
    n = max(2, torch.cuda.device_count())
    row = compare_processes(scale.target, n, scale.turns, scale.device.type, scale.count)
    yield [f"{n} processes", f"{row['one']:.1f}", f"{row['many']:.1f}", f"{row['ratio']:.2f}"]


# ---- The cases -----------------------------------------------------------------------------------

SHARE = "of the read bandwidth"
CASES = {  # -> headers, rows
    "smoke": (("greedy texts are the CPU's", ""), smoke_rows),
    "kernels": (("a kernel", "ms", SHARE), kernel_rows),
    "decode": (("one stream", "tokens/s", SHARE), decode_rows),
    "speculation": (("times plain decoding", "γ = 2", "γ = 4", "auto"), speculation_rows),
    "serving": (("many requests", "tokens/s", "first token, median ms"), serving_rows),
    "parallel": (("one stream", "tokens/s of one", "of all", "ratio"), parallel_rows),
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
        scale = replace(scale, device=torch.device("cuda"))
    bandwidth = measure_bandwidth(scale)
    headers, measure_rows = CASES[name]
    section: Results = {"title": f"{name}, {scale.target} shapes", "headers": headers, "rows": []}
    results = machine(bandwidth) | {"gpu": {name: section}}
    for row in measure_rows(scale, bandwidth):
        section["rows"].append(row)
        say("  ".join(row))
        store(results)
    return results
