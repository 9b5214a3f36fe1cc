"""What gpu/ launches, recorded on a tape, or compiled for a GPU that this machine lacks.

Compiled for sm_90 (H100, H200) or sm_80 (A100), a kernel tells much of why it is fast or slow:

  - registers a thread: at most 255. A multiprocessor has 65,536, which limits how many programs run
    side by side
  - spills: bytes that a thread keeps in memory because it ran out of registers. A hot loop must
    have none
  - shared memory a program: at most 227 KB on sm_90, 163 KB on sm_80. It holds the `num_stages`
    tiles in flight
  - copies ahead: asynchronous copies (`cp.async`) in flight where a loop waits. With none, the loop
    waits for memory
  - instructions: `wgmma`, the matrix product of four warps (sm_90 only); `mma`, that of one warp

A kernel is compiled for the arguments of a launch: at a launch Triton checks their types and which
are multiples of 16, and reads 16 bytes at a time through such pointers. So what is compiled here is
what a program launches, with tensors on the device "meta", which have no numbers:

    reports = compile_launches(lambda: kernel[grid](x, y, n, BLOCK=128, num_warps=4))

Under TRITON_INTERPRET kernels are Python and cannot be compiled.

The tests run the interpreter, so what is compiled here is compiled in another process (`apart`).
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from gpu import GPU, graphs
from kernels import Ops

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class Kernels(GPU):
    """Triton's attention and sampling.

    In the interpreter everything between two products is left to plain torch, which takes a
    fraction of the time; test_smoke.py has all of them together.
    """

    if DEVICE.type == "cpu":
        add_norm = Ops.add_norm
        swiglu = Ops.swiglu
        linear = Ops.linear


OPS = torch.ops.aten
WAITS = (
    OPS._local_scalar_dense,  # these ask the device,
    OPS.nonzero,
    OPS.masked_select,
    OPS.equal,
    OPS.lift_fresh,  # this brings numbers from the host
)
LAUNCH = InterpretedFunction.run


def refuse(what: object) -> None:
    raise RuntimeError(f"{what} cannot be recorded")


class Tape(TorchDispatchMode):
    """Every operation, to be done again on the same tensors; its results go to where they were."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = tree_leaves(args[1:2])
        masks = [x for x in indices if isinstance(x, Tensor) and x.dtype == torch.bool]
        if func.overloadpacket in WAITS or masks and "index" in func.name():
            refuse(func)
        results = func(*args, **(kwargs or {}))

        def again() -> None:
            for old, new in zip(tree_leaves(results), tree_leaves(func(*args, **(kwargs or {})))):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.actions.append(again)
        return results

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: to say so to torch._dynamo would import it, in seconds."""
        return False

    def launch(self, kernel: InterpretedFunction, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            LAUNCH(kernel, *args, **kwargs)
        self.actions.append(lambda: LAUNCH(kernel, *args, **kwargs))


def record(run: Callable[[], object]) -> Callable[[], None]:
    tape = Tape()

    def launch(*args: Any, **kwargs: Any) -> None:
        tape.launch(*args, **kwargs)

    with (
        mock.patch.object(InterpretedFunction, "run", launch),
        mock.patch.object(Tensor, "tolist", lambda x: refuse("tolist")),
        tape,
    ):
        run()

    def replay() -> None:
        for again in tape.actions:
            again()

    return replay


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """On a CPU passes are recorded by a tape. -> a list that grows with each recording."""
    recordings: list[Any] = []
    original = graphs.record if DEVICE.type == "cuda" else record

    def spy(run: Callable[[], object]) -> Callable[[], None]:
        recordings.append(original(run))
        return recordings[-1]

    with mock.patch.object(graphs, "record", spy):
        yield recordings


SHARED = {90: 227 * 1024, 80: 163 * 1024}  # by arch: the most bytes of shared memory of a program


class Report(NamedTuple):
    kernel: str
    constants: dict[str, Any]
    registers: int  # of a thread
    spills: int  # bytes of a thread, in memory
    shared: int  # bytes of a program
    ahead: int  # copies ahead: the fewest at any wait in a loop
    shallow: bool  # whether a product by `mma` has too few columns
    ptx: str
    arch: int

    def count(self, instruction: str) -> int:
        """How often instructions with this beginning occur, such as "cp.async.cg"."""
        return len(re.findall(r"(?m)^\s*(?:@%\w+\s+)?" + re.escape(instruction), self.ptx))


def compile_launches(run: Callable[[], object], arch: int = 90) -> list[Report]:
    """Compile what `run` launches, instead of launching it: a report for each variant of a kernel.

    RuntimeError under the interpreter.
    """
    if knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET is set, so kernels are not compiled: use a process without it"
        )
    backend = make_backend(GPUTarget("cuda", arch, 32))
    reports = {}

    def launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        arguments, kinds, options = bind(*args, **options)
        key = f"{kernel.__name__} {kinds} {options}"
        if key in reports:
            return
        packed = kernel._pack_args(backend, options, arguments, kinds, options)
        options, parameters, constexprs, attributes = packed
        source = ASTSource(kernel, parameters, constexprs, attributes)
        reports[key] = compile_source(source, options.__dict__, arch)

    original = JITFunction.run
    JITFunction.run = launch
    try:
        run()
    finally:
        JITFunction.run = original
    return list(reports.values())


def compile_source(source: ASTSource, options: dict[str, Any], arch: int) -> Report:
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spills = resources(kernel.asm["cubin"])
    names = source.fn.arg_names
    constants = {names[i]: value for (i,), value in source.constants.items()}
    return Report(
        kernel=source.fn.__name__,
        constants={name: value for name, value in constants.items() if isinstance(value, int)},
        registers=registers,
        spills=spills,
        shared=kernel.metadata.shared,
        ahead=copies_ahead(kernel.asm["ttgir"]),
        shallow=is_shallow(kernel.asm["ttgir"]),
        ptx=kernel.asm["ptx"],
        arch=arch,
    )


def copies_ahead(ttgir: str) -> int:
    """`Report.ahead` from Triton's intermediate code; 0 if no loop copies in the background."""
    waits = []
    for loop in re.finditer(r"(?ms)^( *)[^\n]*scf\.for .*?^\1\}", ttgir):
        waits += re.findall(r"async_wait.*num = (\d+)", loop[0])
    return min(map(int, waits), default=0)


def is_shallow(ttgir: str) -> bool:
    """Whether four threads have more columns of a product's operand than there are: then Triton
    gives two threads the same ones."""
    operand = r"tensor<(?:\d+x)?(\d+)x(\d+)x\w+, #ttg.dot_op<{opIdx = (\d), .*?kWidth = (\d+)}>"
    for rows, columns, index, width in re.findall(operand, ttgir):
        depth = columns if index == "0" else rows
        if int(depth) < 4 * int(width):
            return True
    return False


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as the binary says."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return int(numbers["REG"]), int(numbers["STACK"]) + int(numbers["LOCAL"])


CODE = """
import json, sys, triton, {module} as page
print(json.dumps(page.{function}(*json.loads(sys.argv[1]))))
"""


def apart(module: str, function: str, *arguments: Any) -> Any:
    """module.function(*arguments), all JSON, without the interpreter. RuntimeError if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = CODE.format(module=module, function=function)
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        cwd=Path(__file__).parent.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{module}.{function} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
