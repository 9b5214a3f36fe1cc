"""One model on one process and on several: what a token takes, in turns (parallel.py).

    python bench.py                    among others, two processes on this CPU
    python bench.py --gpu parallel     a process for each GPU

Each measurement is a program of its own (`python -m measure.shares`), so that its processes start alike. Weights are
random: a token costs the same. A process on the same CPU brings no core and no bandwidth of its own: what is measured
there is the cost of waiting for each other.

Invariant: both sides make the same step, one new token after `PAST` others.
Not covered: several machines; batches.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from app.launch import joined
from checkpoint.config import Config
from checkpoint.hub import find_folder
from kernels import find_device
from kvcache import KVCache
from measure.pair import Effort
from model import Llama
from parallel import traffic

PAST = 100  # tokens read before


def seconds_of_processes(config: Config, n: int, device: str, dtype: str, count: int) -> float:
    """Of n processes, the median of `count` tokens. RuntimeError with what the program said."""
    shape = json.dumps(asdict(config))
    done = subprocess.run(
        [sys.executable, "-m", "measure.shares", str(n), device, dtype, str(count), shape],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{n} processes: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout)


@torch.inference_mode()
def measure(config: Config, device: torch.device, dtype: torch.dtype, count: int) -> float:
    """In each process."""
    llama = Llama(config, device, dtype).prepare()
    cache, times, tokens = KVCache.of(llama, PAST + count + 3), [], [1] * PAST
    seq, _ = cache.open(())
    for _ in range(count + 3):  # the prompt, and two tokens that warm up
        logits = llama(
            torch.tensor(tokens, device=llama.device),
            cache.extend([(seq, tokens)]),
            rows=slice(-1, None),
        )
        tokens = [int(logits.argmax())]
        times.append(time.perf_counter())
    return median(b - a for a, b in zip(times[2:], times[3:]))


def compared(config: Config, n: int, turns: int, *how: Any) -> dict[str, Any]:
    """Tokens a second of one process and of n, the ratio of those measured in turns, and a token's bytes for others."""
    spent = [[seconds_of_processes(config, each, *how) for each in (1, n)] for _ in range(turns)]
    one, many = (1 / median(times) for times in zip(*spent))
    return dict(
        processes=n,
        one=one,
        many=many,
        ratio=median(a / b for a, b in spent),
        bytes=traffic(config, n, getattr(torch, how[1]).itemsize),
    )


def parallel(effort: Effort) -> list[dict[str, Any]]:
    """The shape of tiny, and, but for one turn, wide layers, which have more to compute between two sums."""
    tiny = Config.load(find_folder("tiny"))
    wide = replace(
        tiny,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    return [
        dict(name=name) | compared(config, 2, effort.turns, "cpu", "float32", effort.count)
        for name, config in (("tiny", tiny), ("two layers of 2048", wide))[: effort.turns]
    ]


def main() -> None:
    n, device, dtype, count, shape = sys.argv[1:]
    data = json.loads(shape)
    config = Config(**data | dict(eos_token_ids=tuple(data["eos_token_ids"])))
    with joined(int(n), find_device(device), main) as own:
        print(measure(config, own, getattr(torch, dtype), int(count)))


if __name__ == "__main__":
    main()
