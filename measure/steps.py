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
def step_seconds(llama: Llama, past: int, new: int) -> float:
    """Seconds of a step of `new` tokens after `past` others, with all logits.

    past 0: of a prompt, with its last logits.
    """
    cache = KVCache(llama.kv_spec(), past + new)
    seq, _ = cache.open([])
    tokens = torch.arange(past + new, device=llama.device) % 1000
    old_tokens, new_tokens = tokens.split((past, new))
    last = slice(-1, None)
    wanted = None if past else last
    if past:
        metadata = cache.extend([(seq, old_tokens.tolist())])
        llama(old_tokens, metadata, last)
    metadata = cache.extend([(seq, new_tokens.tolist())])
    start = time.perf_counter()
    logits = llama(new_tokens, metadata, wanted)
    logits[-1].argmax().item()  # waits for a GPU
    return time.perf_counter() - start


def compare(
    models: dict[str, Llama], past: int, new: int, turns: int
) -> dict[str, tuple[float, float]]:
    """Median seconds of each model, and its speed-up over the first. One turn more warms up."""
    runs = [partial(step_seconds, llama, past, new) for llama in models.values()]
    columns = in_turns(runs, turns + 1)
    first = columns[0][1:]
    result = {}
    for name, (_, *seconds) in zip(models, columns):
        result[name] = (median(seconds), ratio(first, seconds))
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
