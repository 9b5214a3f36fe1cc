"""The stopwatch, and the roof: how fast this machine reads memory, measured in the same run as what it bounds."""

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
    """The result of `run()`, its seconds, and the bytes of memory that it took at its peak (0 unless on Linux)."""
    told, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    memory = lambda key: (
        1024 * int(told.read_text().split(key)[1].split()[0]) if reset.exists() else 0
    )
    if reset.exists():
        reset.write_text("5")  # resets the peak
    before, start = memory("VmRSS:"), time.perf_counter()
    return run(), time.perf_counter() - start, memory("VmHWM:") - before


def percentile(times: Sequence[float], percent: int) -> float:
    return sorted(times)[min(len(times) - 1, percent * len(times) // 100)]


def read_bandwidth(megabytes: int = 512) -> float:
    """The most bytes a second that this machine reads from memory, not from its caches: the roof of decoding."""
    data = torch.ones(
        megabytes * 2**17, dtype=torch.int64
    )  # adding takes a core less time than reading
    return data.nbytes / min(seconds(data.sum, repeats=1) for _ in range(9))
