"""The stopwatch, and the roof: how fast this machine reads memory, measured in the run that is compared with it."""
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch


def seconds(run: Callable[[], object], repeats: int = 9) -> float:
    """Median seconds of `run()`, after one call that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def percentile(times: Sequence[float], percent: int) -> float:
    return sorted(times)[min(len(times) - 1, percent * len(times) // 100)]


def read_bandwidth(megabytes: int = 512) -> float:
    """Bytes a second at which this machine reads memory that is in no cache, at best: the roof of decoding."""
    data = torch.ones(megabytes * 2**17, dtype=torch.int64)         # their sum takes a core less time than reading them
    return data.nbytes / min(seconds(data.sum, repeats=1) for _ in range(9))
