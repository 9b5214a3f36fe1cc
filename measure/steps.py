"""Seconds of a model's steps and prompts in float32, INT8 and INT4, and the speed-up over float32.

    python bench.py --target NAME

Invariant: all widths run the same step, in turns; a ratio is the median over turns.
"""

import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvcache import KVCache
from measure.clock import in_turns, ratio
from measure.effort import Effort
from model import Llama

Rows = dict[str, dict[str, Any]]
WIDTHS = {"float32": 16, "INT8": 8, "INT4": 4}
ROWS = (1, 5, 16, 64, 256)  # of a step
PROMPTS = (128, 512, 1500)  # tokens
PAST = 100  # tokens before a step
SIZES = {f"rows{n}": (PAST, n) for n in ROWS}  # -> tokens before, new tokens
SIZES |= {f"prompt{n}": (0, n) for n in PROMPTS}


@torch.inference_mode()
def step_times(llama: Llama, past: int, new: int, repeats: int = 1) -> list[float]:
    """Seconds of a step of `new` tokens after `past` others, with all logits, again and again.

    past 0: of a prompt, with its last logits.
    """
    cache = KVCache(llama.kv_spec(), past + new)
    seq, _ = cache.open([])
    tokens = torch.arange(past + new, device=llama.device) % 1000
    old_tokens, new_tokens = tokens.split((past, new))
    last = slice(-1, None)
    if past:
        metadata = cache.extend([(seq, old_tokens.tolist())])
        llama(old_tokens, metadata, last)
    times = []
    for _ in range(repeats):
        metadata = cache.extend([(seq, new_tokens.tolist())])
        start = time.perf_counter()
        logits = llama(new_tokens, metadata, None if past else last)
        logits[-1].argmax().item()  # waits for a GPU
        times.append(time.perf_counter() - start)
        cache.truncate(seq, past)
    return times


def compare(
    models: dict[str, Llama], past: int, new: int, turns: int
) -> dict[str, tuple[float, float]]:
    """Median seconds of each model, and its speed-up over the first. One turn more warms up."""
    runs = [partial(step_times, llama, past, new) for llama in models.values()]
    columns = []
    for _, *counted in in_turns(runs, turns + 1):
        columns.append([seconds for (seconds,) in counted])
    result = {}
    for name, times in zip(models, columns):
        result[name] = (median(times), ratio(columns[0], times))
    return result


def load_widths(target: str) -> dict[str, Llama]:
    models = {}
    for name, bits in WIDTHS.items():
        models[name] = Llama.load(target, "cpu", torch.float32, bits=bits)
    return models


def label(target: str) -> str:
    """A model's name, without the folder that holds it on this machine."""
    return Path(target).absolute().name if Path(target).is_dir() else target


def steps(effort: Effort, target: str = "tiny") -> Rows:
    """A row for each width."""
    models = load_widths(target)
    max_len = models["float32"].config.max_position_embeddings
    rows: Rows = {}
    for name in WIDTHS:
        rows[name] = {"target": label(target), "width": name}
    for size, (past, new) in SIZES.items():
        if past + new > max_len:
            continue
        turns = effort.turns * (3 if past else 1)
        for name, (seconds, gain) in compare(models, past, new, turns).items():
            rows[name][size] = gain
            rows[name][f"{size}_seconds"] = seconds
    return {f"{label(target)}, {name}": row for name, row in rows.items()}
