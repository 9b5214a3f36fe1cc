"""The first ten minutes on a GPU: every step with what it should show, the simplest one first.

    python bench.py --gpu first

Each step is a case of bench.py, `python bench.py --gpu NAME`, in a process of its own: an illegal
address ends all that a process does on a GPU, and the next step must be clean. Its rows are stored
as they come. A step has a limit, and all of them have ten minutes, of which compiling takes most; a
step for which no time is left is named, and left out.

    machine      what it is
    recordings   CUDA graphs, made and dropped again
    resources    registers that the compiler here gave each kernel
    texts        greedy texts of the embedded model in float32: those of plain torch on the CPU

Two machines add in another order, so a near-tie may fall otherwise. Where the first other token of
a text is one that the CPU finds nearly as good as its own, that is named, and right.
"""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from app.shell import say
from generate import Engine, Model, load_draft
from kernels import Linear, Ops, free_memory, ops_for
from measure.effort import SENTENCES
from measure.gpu_parts import (
    SHAPES,
    WRONG,
    Row,
    Scale,
    judged,
    random_model,
    random_numbers,
    recording,
    relative_error,
)
from measure.launches import Launch, launching_by
from measure.serving import serve_at_once
from measure.smoke import ROUNDING
from paged import PagedCache
from quant import FORMATS, WIDTHS, Kind
from request import Request, Settings
from settings import Options

ROOT = Path(__file__).parent.parent
TIE = 1e-3  # of two logits
NUM_TOKENS = 40  # of a text


ALL_SECONDS = 580
STEPS = (  # a case, its seconds at most, what it should show
    ("machine", 40, "the GPU that you mean, and memory that nobody else uses"),
    ("recordings", 40, "ok three times; else no recording can be trusted"),
    ("resources", 150, "no spilled bytes, but for 8 where float64 is divided"),
    ("texts", 150, "ok in every row; a near-tie or two are possible"),
    ("smoke", 300, "ok in every row; the first wrong one says which kernel to look at"),
    ("kernels", 150, "for many texts, a large share of the bandwidth in all widths"),
    ("decode", 240, "tokens/s not far below those by the model"),
    ("speculation", 200, "above 1 where drafts are accepted, and auto not far below the best"),
    ("serving", 100, "many times the tokens/s of one stream"),
)


def run_first(options: list[str]) -> int:
    """Run all steps. options: of bench.py, for each -> 1 if a step went wrong, else 0."""
    end = time.monotonic() + ALL_SECONDS
    wrong = []
    for case, seconds, wanted in STEPS:
        command = ["bench.py", "--gpu", case, *options]
        say(f"\npython {' '.join(command)}\nshould show: {wanted}")
        left = end - time.monotonic()
        if left < 30:
            say(f"left out: {left:.0f} s are left")
            continue
        try:
            subprocess.run(
                [sys.executable, *command], cwd=ROOT, timeout=min(seconds, left), check=True
            )
        except subprocess.SubprocessError as error:  # its status, or the time
            say(str(error))
            wrong.append(case)
    say(f"\nwrong: {', '.join(wrong) or 'nothing'}")
    return 1 if wrong else 0


# ---- The machine, and what its compiler makes ----------------------------------------------------


def machine_row(scale: Scale, bandwidth: float, name: str) -> Row:
    gigabytes = free_memory(torch.device(scale.device)) / 1e9
    triton = version("triton") if find_spec("triton") else "none"
    return [f"{gigabytes:.1f}", torch.__version__, str(torch.version.cuda), triton]


def resource_row(scale: Scale, bandwidth: float, way: str, kv_bits: str) -> Row:
    """Of a warm-up, whose kernels are compiled here."""
    if not scale.on_gpu:
        return ["", "", "", "no compiler"]
    binaries = {}

    def collecting(run: Launch) -> Launch:
        def launch(kernel: Any, *args: Any, **options: Any) -> None:
            binaries[run(kernel, *args, **options)] = kernel.fn.__name__

        return launch

    llama = random_model(scale.layer, way, scale)
    cache = PagedCache(llama.kv_spec(bits=WIDTHS[kv_bits]), 100)
    begin = time.perf_counter()
    with launching_by(collecting):
        llama.ops.warm_up(llama, cache, llama.config.vocab_size)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    registers = max(binary.n_regs for binary in binaries)
    worst = max(binaries, key=lambda binary: binary.n_spills)
    spills = f"{worst.n_spills}, {binaries[worst]}"
    return [f"{seconds:.0f}", str(len(binaries)), str(registers), spills]


# ---- Recordings ----------------------------------------------------------------------------------


def recording_row(scale: Scale, bandwidth: float, number: int) -> Row:
    """Products of cuBLAS and norms of ours, which start early, in turns: launched, and replayed
    over another input. The recording is dropped at the end."""
    torch.cuda.empty_cache()
    size = SHAPES[scale.layer].hidden_size
    x = random_numbers(scale, size, size)
    weight = Linear(random_numbers(scale, size, size))
    out = torch.empty_like(x)

    def run(ops: Ops) -> None:
        y = x
        for _ in range(8):
            _, y = ops.add_norm(ops.linear(y, weight), y, x[0], 1e-5)
        out.copy_(y)

    launch = partial(run, ops_for(scale.device))
    replay = recording(launch, scale)
    x.normal_()
    results = []
    for call in (partial(run, Ops()), launch, replay):
        call()
        results.append(out.float())
    wanted, *others = results
    return judged([relative_error(other, wanted) for other in others], ROUNDING[scale.dtype])


# ---- Texts ---------------------------------------------------------------------------------------


def text_keys(scale: Scale) -> Iterator[tuple[Kind, str, str | None]]:
    for draft in (None, "tiny-draft"):
        yield from product((16,), WIDTHS, (draft,))
        yield from product(FORMATS, ("16",), (draft,))


def text_row(scale: Scale, bandwidth: float, bits: Kind, kv_bits: str, draft: str | None) -> Row:
    """Where the first other token of a text comes, and by how much the CPU preferred its own."""
    model = Model.load("tiny", scale.device, torch.float32, bits)
    texts = greedy_texts(model, kv_bits, draft)
    places = []
    largest = 0.0
    for prompt, text, wanted in zip(SENTENCES, texts, wanted_texts(bits, kv_bits)):
        same = [token == own for token, own in zip(text, wanted)]
        if all(same):
            continue
        place = same.index(False)
        logits = next_logits(bits, kv_bits, prompt, wanted[:place])
        margin = (logits[wanted[place]] - logits[text[place]]).item()
        places.append(f"{prompt} {place}: {margin:.1e}")
        largest = max(largest, margin)
    if largest >= TIE:
        return ["; ".join(places), WRONG]
    return ["; ".join(places), "ok: a near-tie" if places else "ok"]


@functools.cache
def plain_model(bits: Kind) -> Model:
    """On the CPU, in plain torch."""
    with mock.patch.dict(os.environ, LLAMA_PLAIN="1"):
        return Model.load("tiny", "cpu", torch.float32, bits)


@functools.cache
def wanted_texts(bits: Kind, kv_bits: str) -> list[list[int]]:
    return greedy_texts(plain_model(bits), kv_bits, None)


def greedy_texts(model: Model, kv_bits: str, draft: str | None) -> list[list[int]]:
    """The tokens after two prompts, in one batch."""
    engine = Engine(
        model,
        load_draft(draft, model, torch.float32),
        Options(max_len=500, max_batch=2, kv_bits=kv_bits),
        1000,
    )
    settings = Settings(temperature=0.0, seed=0, max_tokens=NUM_TOKENS, gamma=3)
    requests = [Request(model.encode(prompt), settings) for prompt in SENTENCES[:2]]
    return serve_at_once(engine, requests).texts


def next_logits(bits: Kind, kv_bits: str, prompt: str, text: list[int]) -> torch.Tensor:
    """Of the CPU, after a prompt and a text: float[V]."""
    model = plain_model(bits)
    tokens = model.encode(prompt) + text
    cache = PagedCache(model.llama.kv_spec(bits=WIDTHS[kv_bits]), len(tokens))
    seq, _ = cache.open(())
    return model.llama(torch.tensor(tokens), cache.extend([(seq, tokens)]))[-1]
