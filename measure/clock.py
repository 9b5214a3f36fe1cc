"""The stopwatch, and the roof: how fast this machine reads memory, measured in the run that is compared with it."""
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch


def seconds(run: Callable[[], object], repeats: int = 9) -> float:
    """Median seconds of `run()`, after one call that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def spent(run: Callable[[], Any]) -> tuple[Any, float, int]:
    """What `run()` returns, its seconds, and the bytes of memory that it took at its peak, where Linux tells."""
    told, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    memory = lambda key: 1024 * int(told.read_text().split(key)[1].split()[0]) if reset.exists() else 0
    if reset.exists():
        reset.write_text("5")                           # the peak begins anew
    before, start = memory("VmRSS:"), time.perf_counter()
    return run(), time.perf_counter() - start, memory("VmHWM:") - before


def percentile(times: Sequence[float], percent: int) -> float:
    return sorted(times)[min(len(times) - 1, percent * len(times) // 100)]


def read_bandwidth(megabytes: int = 512) -> float:
    """Bytes a second at which this machine reads memory that is in no cache, at best: the roof of decoding."""
    data = torch.ones(megabytes * 2**17, dtype=torch.int64)         # their sum takes a core less time than reading them
    return data.nbytes / min(seconds(data.sum, repeats=1) for _ in range(9))
