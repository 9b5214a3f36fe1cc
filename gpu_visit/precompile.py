"""All kernels of `bench.py --gpu all` and of gpu/test_layer.py, compiled on all cores, without a GPU.

    cd PROJECT && TRITON_CACHE_DIR=DIR [LLAMA_GPU_OFF=…] python /…/precompile.py [part of a row's name …]

Every row runs over tensors on "meta", which have shapes and no numbers: a launch only compiles, for
sm_90. The host is told that all numbers are 0, and all conditions true. A model has one layer: the
others launch the same. A cache fits elsewhere if the commit, Triton's version and Python's are the
same, and the cache lies at the same place.
"""

import multiprocessing
import os
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.getcwd()]
os.environ.pop("TRITON_INTERPRET", None)
sys.modules.setdefault("conftest", types.ModuleType("conftest"))  # the true one turns the interpreter on
sys.modules["conftest"].examples = lambda count: lambda test: test
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpu import GPU, test_layer
from launchers import prepare
from measure.gpu_cases import CASES, WRONG, guarded_row
from measure.gpu_parts import SHAPES, open_texts, random_model
from measure.sizes import GPU_SIZES
from quant import WIDTHS

META = replace(  # the variants of a full run do not depend on these counts
    GPU_SIZES,
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
LAYER = "layer"
OPS = torch.ops.aten
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def tasks() -> list[tuple[str, list[Any]]]:
    found = [(LAYER, [kind]) for kind in test_layer.KINDS]
    for name, case in CASES.items():
        if name not in WITHOUT_KERNELS:
            for _, keys in groupby(case.keys(META), lambda key: key[:3]):
                found.append((name, list(keys)))
    return found


def layer(way: str, kv_bits: str, dtype: torch.dtype) -> None:
    with mock.patch.dict(SHAPES, {LAYER: test_layer.SHAPE}):
        llama = random_model(LAYER, way, META, dtype, GPU())
    for past, step in test_layer.CHECKED:
        metadata = open_texts(llama.kv_spec(bits=WIDTHS[kv_bits]), step, past)
        tokens = torch.zeros(metadata.positions.shape, dtype=torch.int64, device="meta")
        llama.forward(tokens, metadata, None)
        llama(tokens, metadata)


@torch.inference_mode()
def compile_rows(task: tuple[str, list[Any]]) -> tuple[int, int, list[str]]:
    """In a process of its own -> kernels compiled, kernels cached, rows that were not reached."""
    from triton import knobs

    name, keys = task
    torch.set_num_threads(1)
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **about: hits.append(cache_hit)
    wrong = []
    with launching_nothing():
        for key in keys:
            try:
                if name == LAYER:
                    layer(*key)
                    continue
                row = guarded_row(CASES[name], key, META)
                if row[-1].startswith(WRONG):
                    wrong.append(f"{name} {row[0]}: {row[-1]}")
            except Exception as error:
                wrong.append(f"{name} {key}: {type(error).__name__} {error}"[:300])
    return len(hits) - sum(hits), sum(hits), wrong


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

    build = prepare() if os.environ.get("LAUNCHERS") else None
    built = set()

    def compile_only(*args: Any, **how: Any) -> None:
        kernel = launch(*args, **how | {"warmup": True})
        if build is not None and kernel is not None and id(kernel) not in built:
            built.add(id(kernel))
            build(kernel)

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


if __name__ == "__main__":
    wanted = sys.argv[1:]  # parts of names, or all
    chosen = [task for task in tasks() if not wanted or any(w in str(task) for w in wanted)]
    with multiprocessing.get_context("fork").Pool(int(os.environ.get("JOBS", os.cpu_count()))) as pool:
        done = pool.map(compile_rows, chosen, chunksize=1)
    print(sum(n for n, _, _ in done), "kernels compiled;", sum(n for _, n, _ in done), "found")
    wrong = [row for _, _, rows in done for row in rows]
    print(*wrong, sep="\n")
    sys.exit(1 if wrong else 0)
