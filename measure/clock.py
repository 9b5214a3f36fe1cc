"""The stopwatch, and the roof: the bytes that this machine reads a second.

A decoding step reads every weight once, so no step is shorter than

    bytes of the weights / bytes read a second

and a figure is a share of that roof, measured in the same run.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

REPEATS = 9  # calls that are counted
RISING = 0.5  # seconds of work until a GPU's clocks have risen


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def median_seconds(run: Callable[[], object]) -> float:
    """Median seconds of `run()`, after one call that is not counted."""
    run()
    return median(seconds_of(run) for _ in range(REPEATS))


def in_turns(runs: Sequence[Callable[[], Any]], turns: int) -> list[list[Any]]:
    """A list for each of these runs: what it returned in each turn. In every turn all run."""
    results: list[list[Any]] = [[] for _ in runs]
    for _ in range(turns):
        for run, column in zip(runs, results):
            column.append(run())
    return results


def ratio(figures: Sequence[float], others: Sequence[float]) -> float:
    """The median over turns of figure / other."""
    return median(a / b for a, b in zip(figures, others))


def read_bandwidth(megabytes: int = 512, device: torch.device | str = "cpu") -> float:
    """The most bytes a second that this machine reads from memory, not from its caches."""
    # Adding whole numbers takes a core less time than reading them.
    data = torch.ones(megabytes * 2**17, dtype=torch.int64, device=device)
    if data.is_cuda:
        raise_clocks(data)

    def read() -> None:
        data.sum().item()  # waits for a GPU

    read()
    return data.nbytes / min(seconds_of(read) for _ in range(REPEATS))


def raise_clocks(data: Tensor) -> None:
    """Copy numbers until the clocks of their GPU have risen."""
    end = time.perf_counter() + RISING
    while time.perf_counter() < end:
        data.clone().sum().item()
