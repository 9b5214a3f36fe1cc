"""The device: which one, what is copied to it, and how much of its memory is free.

Invariant: only this page, kernels.py and the folders cpu/ and gpu/ ask what kind of device it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from errors import UserError
from parallel import group_for

KINDS = ("cpu", "cuda")
# All CUDA graphs: gpu/graphs.py adds them, runner.py counts them, and app/launch.py drops them
# before the program ends.
live_graphs: WeakSet[Any] = WeakSet()


def find_device(name: torch.device | str | None = None) -> torch.device:
    """The device of this name; None: a GPU, if there is one. UserError if it is not here."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    usable = "cpu or cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {str(name)!r} is unknown: use {usable}") from None
    if device.type not in KINDS:
        raise UserError(f"device {str(name)!r} is not supported: use {usable}")
    try:
        torch.empty(1, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(f"device {str(name)!r} is not on this machine: use {usable}") from None
    return device


def make_current(device: torch.device) -> None:
    """Let this thread launch kernels and graphs on this device."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def send(
    numbers: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Copy these numbers to the device, without waiting for what it still computes. dtype: of
    numbers that are no tensor yet."""
    x = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)  # PyTorch keeps it until it is copied
    return x.to(device)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device now; if several processes share the model, for each."""
    memory_info = Path("/proc/meminfo")
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    elif memory_info.exists():
        _, available = memory_info.read_text().split("MemAvailable:")
        free = 1024 * int(available.split()[0])
    else:
        page_size = os.sysconf("SC_PAGE_SIZE")
        free = page_size * os.sysconf("SC_PHYS_PAGES")  # macOS: all that there is
    return group_for(device).memory(free, device)  # the smallest share of all processes
