"""One model on one process and on several: the time of a token, in turns (parallel.py).

    python bench.py     among others, two processes on this CPU, or one on each of its GPUs

Each measurement is a program of its own, started by torch's launcher, so that its processes start
alike. Weights are random: a token costs the same. Processes on one CPU share its cores and its
memory: what is measured there is the cost of waiting for each other.

Invariant: both sides make the same step, one new token after `PAST` others.
Not covered: several machines; batches.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from checkpoint.config import Config
from measure.effort import Effort
from measure.steps import PAST, step_times
from model import Llama

ROOT = Path(__file__).parent.parent
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
LLAMA_1B = Config(
    128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 500000.0, tie_word_embeddings=True
)
SHAPES = {
    "8B": Config(128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 500000.0),
    "1B": LLAMA_1B,
    "two layers of 2048": replace(LLAMA_1B, vocab_size=4096, num_hidden_layers=2),
    "tiny": Config(4096, 256, 704, 8, 4, 2, 64, 1024, tie_word_embeddings=True),
}


def token_seconds(name: str, n: int, device: str, count: int) -> float:
    """The median over `count` tokens of n processes, which say themselves why they fail."""
    command = [sys.executable, *LAUNCH, str(n), "-m", "measure.shards", name, device, str(count)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def compare_processes(name: str, n: int, turns: int, device: str, count: int) -> dict[str, Any]:
    """Tokens a second of one process and of n, and the ratio, in turns."""
    seconds = []
    for _ in range(turns):
        seconds.append([token_seconds(name, each, device, count) for each in (1, n)])
    one, many = (1 / median(times) for times in zip(*seconds))
    ratio = median(a / b for a, b in seconds)
    return {"name": name, "processes": n, "one": one, "many": many, "ratio": ratio}


def parallel(effort: Effort) -> list[dict[str, Any]]:
    """All GPUs of this machine; or the shape of tiny, and wide layers, which have more to compute
    between two sums."""
    n = torch.cuda.device_count()
    if n > 1:
        return [compare_processes("8B", n, effort.turns, "cuda", effort.num_tokens)]
    names = ["tiny", "two layers of 2048"][: effort.turns]
    return [compare_processes(name, 2, effort.turns, "cpu", effort.num_tokens) for name in names]


def main(name: str, device: str, count: str) -> None:
    """In each process."""
    on_gpu = device == "cuda"
    dist.init_process_group()  # gloo on CPUs, NCCL on GPUs
    rank = dist.get_rank()
    if on_gpu:
        torch.cuda.set_device(rank)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    llama = Llama(SHAPES[name], device, dtype).pack_weights()
    times = step_times(llama, PAST, 1, int(count) + 3)
    if rank == 0:
        print(median(times[3:]))  # the first ones warm up
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
