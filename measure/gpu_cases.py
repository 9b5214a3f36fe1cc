"""The measurements on a GPU: models of 1B and 8B shapes, with random weights made on the device.

    python bench.py --gpu all            all of them
    python bench.py --gpu machine        what it is
    python bench.py --gpu decode         one stream, with weights in all ways
    python bench.py --gpu kernels        attention and products alone
    python bench.py --gpu peers          PyTorch and transformers, in turns with ours (gpu_peers.py)
    python bench.py --gpu profile        what each kernel takes of a token
    python bench.py --gpu speculation    1B shapes draft for 8B shapes; in few bits a CPU can, too
    python bench.py --gpu serving        many requests at a time

Speed does not depend on the values of weights, so nothing is downloaded. Kernels are compiled and
passes recorded when a shape first occurs, which takes seconds, so every engine serves once before
it is measured. Shares are of the roof, the bytes that this GPU reads a second, measured first. Two
random models never agree, so in `speculation` a special rng accepts each draft with a fixed
probability α. Whether results are right is another question: pytest -m gpu.

Invariant: a row is printed and stored as soon as it is measured, and an error ends its row only.
Not covered: requests that arrive one after the other.
"""

import os
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import profile

from app.shell import say
from checkpoint.weights import weight_bytes
from errors import UserError
from measure import gpu_peers
from measure.clock import read_bandwidth
from measure.gpu_parts import (
    WAYS,
    Row,
    attention_call,
    product_call,
    random_engine,
    random_model,
    random_numbers,
    stopwatch,
    stream_seconds,
    text_seconds,
)
from measure.machine import machine
from measure.report import Results
from measure.serving import log_spread, random_request, serve
from measure.sizes import CPU_SIZES, GPU_SIZES, QUICK, Sizes
from quant import WIDTHS
from sampling import Keyed

Key = tuple[Any, ...]  # which names a row
WRONG = "WRONG"  # the last cell of a row begins with it: an error
MOST_PROFILED = 16  # tokens


# ---- The machine ---------------------------------------------------------------------------------


def machine_row(sizes: Sizes, key: str) -> Row:
    size = sizes.prompt
    x = random_numbers(sizes, size, size)
    rate = 2 * size**3 / stopwatch(partial(torch.mm, x, x), sizes)() / 1e12
    triton = version("triton") if find_spec("triton") else "none"
    return [f"{rate:.3g}", driver_facts(), str(torch.version.cuda), triton]


def driver_facts() -> str:
    """By nvidia-smi, after some work; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    facts = "name,memory.free,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    command = ["nvidia-smi", f"--query-gpu={facts}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()


# ---- Kernels alone -------------------------------------------------------------------------------


def kernel_keys(sizes: Sizes) -> Iterator[Key]:
    """A prompt; a query of many texts; the gate and up product, whose weights no GPU's cache
    holds."""
    yield "attention", 1, sizes.prompt, "16"
    yield from product(("attention",), (sizes.num_texts,), (1,), WIDTHS)
    yield from product(("product",), WAYS, (1, 8, 64))


def kernel_row(sizes: Sizes, kind: str, *key: Any) -> Row:
    call = attention_call if kind == "attention" else product_call
    run, read = call(sizes, *key)
    seconds = stopwatch(run, sizes)()
    share = read / seconds / sizes.bandwidth
    return [f"{1e3 * seconds:.3g}", f"{share:.0%}"]


# ---- Whole models --------------------------------------------------------------------------------


def decode_keys(sizes: Sizes) -> Iterator[Key]:
    yield from product((sizes.target,), WAYS)
    yield sizes.draft, "16 bits"


def decode_row(sizes: Sizes, name: str, way: str) -> Row:
    """One stream; the share is that of the weights alone."""
    llama = random_model(name, way, sizes)
    seconds = stream_seconds(random_engine(llama, None, 2 * sizes.context, 1), sizes)
    share = weight_bytes(llama, read=True) / seconds / sizes.bandwidth
    return [f"{1 / seconds:.1f}", f"{share:.0%}"]


def profile_row(sizes: Sizes, way: str) -> Row:
    """The kernels of a token by the profiler, over a few looks of the host. Its time by the clock
    is decode's: the profiler slows down whatever runs after it in the same process."""
    llama = random_model(sizes.target, way, sizes)
    engine = random_engine(llama, None, 2 * sizes.context, 1)
    text_seconds(engine, sizes, 0)  # compiles and records
    request = random_request(sizes.context, sizes.count, 1)
    engine.batcher.add(request)
    while len(request.tokens) == sizes.context:  # the prompt
        engine.batcher.step()
    read = len(request.tokens)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no lines of PyTorch's own
    with profile() as trace:
        while engine.batcher.running and len(request.tokens) < read + MOST_PROFILED:
            engine.batcher.step()
    made = len(request.tokens) - read

    def micros(kernel: Any) -> float:
        return kernel.self_device_time_total / made

    kernels = [event for event in trace.key_averages() if event.device_type.name == "CUDA"]
    kernels.sort(key=micros, reverse=True)
    count = sum(kernel.count for kernel in kernels) / made
    longest = [f"{kernel.key.partition('(')[0]} {micros(kernel):.1f}" for kernel in kernels[:12]]
    total = sum(map(micros, kernels)) / 1e3
    return [f"{total:.3f}", f"{count:.0f}", ", ".join(longest)]


class BiasedRng(Keyed):
    """Accepts every draft with probability alpha, whatever p and q are, if all before it were
    accepted; never an absent draft."""

    def __init__(self, *keys: Any, alpha: float, **options: Any):
        super().__init__(*keys, **options)
        self.alpha = alpha

    def accept(self, prob: Tensor) -> Tensor:
        passed = super().accept(torch.where(prob > 0, self.alpha, 0.0))
        return passed.long().cumprod(1).bool()


def speculation_row(sizes: Sizes, target_way: str, draft_way: str, alpha: float) -> Row:
    """One stream: the second model drafts for the first, with a fixed γ and with auto."""
    target = random_model(sizes.target, target_way, sizes)
    draft = random_model(sizes.draft, draft_way, sizes)
    seconds = []
    for gamma in (0, 2, 4, None):
        engine = random_engine(target, None if gamma == 0 else draft, 2 * sizes.context, 1)
        rng = partial(BiasedRng, alpha=alpha, draw=target.ops.pick)
        engine.runner.drawing = engine.runner.drawing._replace(make_rng=rng)
        seconds.append(stream_seconds(engine, sizes, gamma))
    plain, *drafted = seconds
    return [f"{plain / each:.2f}" for each in drafted]


def serving_row(sizes: Sizes, n: int) -> Row:
    """n requests at once, with prompts and outputs of many lengths. Each turn has prompts of
    its own, because the prefix cache would hold those of the turn before."""
    llama = random_model(sizes.target, "16 bits", sizes)
    lengths = log_spread(n, sizes.longest)
    engine = random_engine(llama, None, 2 * sizes.longest, n)
    for turn in range(2):  # the first one compiles and records
        requests = []
        for i, length in enumerate(lengths):
            requests.append(random_request(length, lengths[-1 - i], n * turn + i))
        served = serve(engine, requests)
    first = f"{1e3 * median(served.first_token):.3g}"
    return [f"{served.tokens_per_second:.0f}", first]


# ---- The cases -----------------------------------------------------------------------------------

SHARE = "of the read bandwidth"


class Case(NamedTuple):
    """A table: for each key of `keys` a row, `row(sizes, *key)`."""

    headers: tuple[str, ...]  # the first one names the parts of a key
    keys: Callable[[Sizes], Iterable[Key]]
    row: Callable[..., Row]


CASES = {
    "machine": Case(
        ("machine", "TFLOP/s", "name, free memory, driver, clocks, watts", "CUDA", "Triton"),
        lambda sizes: [("this",)],
        machine_row,
    ),
    "decode": Case(("one stream", "tokens/s", SHARE), decode_keys, decode_row),
    "kernels": Case(
        ("attention: texts, new tokens, KV; product: weights, rows", "ms", SHARE),
        kernel_keys,
        kernel_row,
    ),
    "peers": Case(
        ("a peer", "its ms", "ours", "times as fast"),
        gpu_peers.peer_keys,
        gpu_peers.peer_row,
    ),
    "profile": Case(
        ("a token", "ms of kernels", "launches", "µs of each kernel"),
        lambda sizes: product(("16 bits", "INT4")),
        profile_row,
    ),
    "speculation": Case(
        ("times plain decoding: target, draft, α", "γ = 2", "γ = 4", "auto"),
        lambda sizes: [(*pair, 0.7) for pair in sizes.pairs],
        speculation_row,
    ),
    "serving": Case(
        ("requests", "tokens/s", "first token, median ms"),
        lambda sizes: [(sizes.num_requests,)],
        serving_row,
    ),
}


def sizes_of(name: str, quick: bool, on_gpu: bool) -> Sizes:
    """The sizes of a case. UserError if it needs a GPU, and there is none."""
    if quick:
        return replace(QUICK, device="cuda" if on_gpu else "cpu")
    if on_gpu:
        return GPU_SIZES
    if name == "speculation":
        return CPU_SIZES
    raise UserError(
        f"--gpu {name} needs a GPU, and PyTorch finds none here: "
        "--quick runs it with toy shapes on the CPU"
    )


@torch.inference_mode()
def run_cases(name: str, quick: bool, store: Callable[[Results], None]) -> Results:
    """Run this case, or "all": print each row, and give all results so far to `store`."""
    sizes = sizes_of(name, quick, torch.cuda.is_available())
    sizes = replace(sizes, bandwidth=read_bandwidth(sizes.megabytes, sizes.device))
    results = machine(sizes.bandwidth, sizes.on_gpu) | {"gpu": {}}
    for each in CASES if name == "all" else [name]:
        case = CASES[each]
        rows: list[Row] = []
        title = f"{each}, {sizes.target} shapes"
        results["gpu"][each] = {"title": title, "headers": case.headers, "rows": rows}
        for key in case.keys(sizes):
            rows.append(guarded_row(case, key, sizes))
            say("  ".join(rows[-1]))
            store(results)
    return results


def guarded_row(case: Case, key: Key, sizes: Sizes) -> Row:
    """The row of a key; after an error its first line, and the traceback is said."""
    try:
        return [row_name(key), *case.row(sizes, *key)]
    except Exception as error:
        say(traceback.format_exc())
        first_line, *_ = f"{type(error).__name__}: {error}".splitlines()
        empty = [""] * (len(case.headers) - 2)
        return [row_name(key), *empty, f"{WRONG}: {first_line}"]


def row_name(key: Key) -> str:
    return ", ".join(map(str, key))


def has_wrong_rows(results: Results) -> bool:
    """Whether a row of a GPU case is an error."""
    rows = [row for section in results.get("gpu", {}).values() for row in section["rows"]]
    return any(row[-1].startswith(WRONG) for row in rows)
