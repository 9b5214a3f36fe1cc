"""One model on one process and on several: tokens a second, in turns (parallel.py).

    python bench.py     among others, two processes of this CPU, or one on each of its GPUs

Processes on one CPU share its cores and its memory: what is measured there is the cost of waiting
for each other.

Invariant: both sides make the same text.
Not covered: batches.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from measure.effort import OPENINGS, Effort

ROOT = Path(__file__).parent.parent


def tokens_per_second(target: str, n: int, count: int) -> float:
    """Of a text that n processes make. They say themselves why they fail."""
    flags = ["--target", target, "--tensor-parallel", str(n), "--max-tokens", str(count)]
    done = subprocess.run(
        [sys.executable, "generate.py", *flags, "--temperature", "0", "--json", OPENINGS[0]],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)["stats"]["tokens_per_second"]


def parallel(effort: Effort, target: str = "tiny") -> list[dict[str, Any]]:
    """A row: tokens a second of one process and of several, and the ratio."""
    n = max(2, torch.cuda.device_count())
    one = []
    many = []
    for _ in range(effort.turns):
        one.append(tokens_per_second(target, 1, effort.num_tokens))
        many.append(tokens_per_second(target, n, effort.num_tokens))
    ratio = median(b / a for a, b in zip(one, many))
    row = {"name": target, "processes": n, "one": median(one), "many": median(many)}
    return [row | {"ratio": ratio}]
