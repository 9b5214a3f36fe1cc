"""All kernels of `--gpu first`, compiled on all cores before anything is launched.

    python bench.py --gpu compile        into $TRITON_CACHE_DIR; it needs no GPU

A kernel takes Triton a second, and there are about 300. Here every row of every step runs over
tensors on "meta", which have shapes and no numbers: so each kernel is launched with the kinds of
arguments that it will have, and a launch only compiles. The host is told that all numbers are 0,
and all conditions true. A model has one layer: the others launch the same.

Triton's key of a kernel holds its source and where that begins in its file, Triton's own files, and
the GPU's architecture. So a cache that was made elsewhere fits if the commit, Triton's version and
Python's (Triton's library is built for one) are the same; it must be at the same place, because
Triton stores absolute paths. Where Triton and the repository lie does not matter.

Not covered: GPUs other than sm_90 (H100, H200): their kernels are compiled as they are launched.
"""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from itertools import groupby
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.shell import say
from measure.gpu_cases import CASES, Key, guarded_row
from measure.gpu_parts import SHAPES, WRONG, Scale

META = Scale(  # the variants of a full run do not depend on these counts
    device="meta",
    context=300,
    count=9,
    num_texts=2,
    num_requests=70,
    longest=16,
    repeats=1,
    turns=1,
)
WITHOUT_KERNELS = {"machine", "peers"}  # or with those of other cases
OPS = torch.ops.aten
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


Task = tuple[str, list[Key]]  # a case, and rows of one kind
Done = tuple[int, int, list[str]]  # kernels compiled, kernels cached, rows that were not reached


def compile_kernels(seconds: float | None = None) -> list[str]:
    """Compile those of all cases -> the names of rows that could not be reached."""
    if not compiles():
        say("nothing is compiled: Triton is not installed, or interprets kernels")
        return []
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        try:
            done = pool.map_async(compile_rows, tasks(), chunksize=1).get(seconds)
        except multiprocessing.TimeoutError:
            return [f"stopped after {seconds:.0f} s"]
    num_compiled, num_cached, wrong = zip(*done)
    say(f"{sum(num_compiled)} kernels compiled; {sum(num_cached)} times, one was in the cache")
    return sum(wrong, [])


def tasks() -> list[Task]:
    found = []
    for name, case in CASES.items():
        if name not in WITHOUT_KERNELS:
            for _, keys in groupby(case.keys(META), lambda key: key[:3]):
                found.append((name, list(keys)))
    return found


def compiles() -> bool:
    """Whether Triton compiles kernels here."""
    if not find_spec("triton"):
        return False
    from triton import knobs

    return not knobs.runtime.interpret


@torch.inference_mode()
def compile_rows(task: Task) -> Done:
    """In a process of its own: it has another driver afterwards."""
    from triton import knobs

    case, keys = task
    torch.set_num_threads(1)
    hits = []
    knobs.compilation.listener = lambda *, cache_hit, **about: hits.append(cache_hit)
    with launching_nothing():
        rows = [guarded_row(CASES[case], key, META) for key in keys]
    wrong = [f"{case} {row[0]}" for row in rows if row[-1].startswith(f"{WRONG}:")]
    return len(hits) - sum(hits), sum(hits), wrong


# ---- A device without numbers --------------------------------------------------------------------


class NoNumbers(TorchDispatchMode):
    """Answers a host that asks "meta" tensors for numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose() and has_kernel(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        name = func.overloadpacket
        x = args[name is OPS.copy_] if args else None
        if isinstance(x, Tensor) and x.is_meta:
            if name is OPS._local_scalar_dense:
                return x.dtype == torch.bool
            if name is OPS._to_copy and kwargs.get("device") == torch.device("cpu"):
                dtype = kwargs.get("dtype") or x.dtype
                return torch.full(x.shape, x.dtype == torch.bool, dtype=dtype)
            if name is OPS.copy_ and not args[0].is_meta:
                return args[0]
        return func(*args, **kwargs)


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Within this context models on "meta" run by the kernels of gpu/, which are compiled only."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction
    from triton.runtime.driver import driver

    launch = JITFunction.run

    def compile_only(*args: Any, **how: Any) -> None:
        launch(*args, **how | {"warmup": True})

    one_layer = {name: replace(shape, num_hidden_layers=1) for name, shape in SHAPES.items()}
    target = GPUTarget("cuda", 90, 32)
    stand_in = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    driver.set_active(stand_in)
    with ExitStack() as changed:
        changed.enter_context(mock.patch.dict(SHAPES, one_layer))
        changed.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        changed.enter_context(mock.patch("gpu.graphs.record", lambda run: run))
        changed.enter_context(mock.patch.dict("kernels.BACKENDS", meta=("gpu",)))
        changed.enter_context(NoNumbers())
        yield
