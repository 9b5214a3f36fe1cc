"""Seconds of a model's steps and prompts in float32, INT8 and INT4, and the speed-up over float32.

    python bench.py --target NAME       with LLAMA_MARCH and ATEN_CPU_CAPABILITY: like an older CPU, in separate rows

Invariant: all widths run the same step, in turns; a ratio is the median over turns.
"""

import os
import time
from statistics import median
from typing import Any

import torch

from kvcache import KVCache
from measure.pair import Effort
from model import Llama

WIDTHS = {"float32": 16, "INT8": 8, "INT4": 4}
ROWS, LENGTHS = (1, 2, 4, 5, 8, 16, 64, 256), (32, 128, 512, 1500)  # of a step, and of prompts
SIZES = {f"rows{n}": (100, n) for n in ROWS} | {
    f"prompt{n}": (0, n) for n in LENGTHS
}  # tokens before, new tokens


def machine_code() -> str:
    """The CPU that C was compiled for, and the instruction set that PyTorch uses."""
    c = (
        "no C"
        if os.environ.get("LLAMA_NATIVE") == "0"
        else os.environ.get("LLAMA_MARCH") or "its own"
    )
    return f"{c}, {torch.backends.cpu.get_cpu_capability()}"


@torch.inference_mode()
def step_seconds(llama: Llama, past: int, new: int) -> float:
    """Seconds of a step of `new` tokens after `past` others, with all logits; if past is 0, a prompt's last logits."""
    cache, tokens = KVCache.of(llama, past + new), torch.arange(past + new) % 1000
    seq, _ = cache.open(())
    if past:
        llama(tokens[:past], cache.extend([(seq, tokens[:past].tolist())]), rows=slice(-1, None))
    step = cache.extend([(seq, tokens[past:].tolist())])
    start = time.perf_counter()
    llama(tokens[past:], step, rows=None if past else slice(-1, None))
    return time.perf_counter() - start


def compare(
    models: dict[str, Llama], past: int, new: int, turns: int
) -> dict[str, tuple[float, float]]:
    """For each model: median seconds, and its speed-up over the first model. One turn more warms up."""
    spent = [
        [step_seconds(llama, past, new) for llama in models.values()] for _ in range(turns + 1)
    ][1:]
    return {
        name: (median(own), median(turn[0] / now for turn, now in zip(spent, own)))
        for name, own in zip(models, zip(*spent))
    }


def of_all_widths(target: str) -> dict[str, Llama]:
    return {
        name: Llama.load(target, "cpu", torch.float32, bits=bits) for name, bits in WIDTHS.items()
    }


def steps(effort: Effort, target: str, label: str) -> dict[str, dict[str, Any]]:
    models = of_all_widths(target)
    kept = dict.fromkeys(
        ["float32"], str(models["float32"].weight_dtype)[6:]
    )  # bfloat16 if stored so
    told = {
        name: dict(target=label, code=machine_code(), width=kept.get(name, name)) for name in WIDTHS
    }
    for size, (past, new) in SIZES.items():
        if past + new <= models["float32"].config.max_position_embeddings:
            found = compare(models, past, new, effort.turns * (3 if past else 1))
            for name, (seconds, gain) in found.items():
                told[name] |= {f"{size}_seconds": seconds, size: gain}
    return {f"{label}, {machine_code()}, {name}": row for name, row in told.items()}
