"""Compiling Triton kernels for a GPU that this machine lacks, and reading what resources they use.

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
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

pytestmark = pytest.mark.gpu
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


# ---- In another process

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


# ---- The tests


@triton.jit
def _product(a, b, out, K, ROWS: tl.constexpr, N: tl.constexpr):
    """out = a bᵀ. a: [ROWS, K], b: [N, K]."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, N)
    k = tl.arange(0, 64)
    total = tl.zeros((ROWS, N), tl.float32)
    for start in tl.range(0, K, 64):
        left = tl.load(a + rows * K + start + k[None, :])
        right = tl.load(b + columns[None, :] * K + start + k[:, None])
        total = tl.dot(left, right, total)
    tl.store(out + rows * N + columns[None, :], total)


def product(rows: int, K: int = 1024, **options: int) -> None:
    a = torch.empty(rows, K, dtype=torch.bfloat16, device="meta")
    b = torch.empty(128, K, dtype=torch.bfloat16, device="meta")
    out = torch.empty(rows, 128, device="meta")
    _product[1,](a, b, out, K, rows, 128, **options)


def compiled() -> list[Any]:
    """For each architecture and number of rows: the report, wgmma, mma, cp.async; then two more."""
    instructions = ("wgmma.mma", "mma.sync", "cp.async.cg")
    table = []
    for arch in SHARED:
        for rows in (16, 128):
            (report,) = compile_launches(lambda: product(rows), arch)
            table.append([rows, report, *map(report.count, instructions)])

    def squeezed() -> None:
        for num_warps in (4, 8, 8):
            product(128, 1023, num_warps=num_warps)

    return [table, compile_launches(squeezed, 80)]


@cache
def measured() -> list[Any]:
    return apart("gpu.test_crosscompile", "compiled")


def test_the_same_code_becomes_other_instructions():
    table, _ = measured()
    for rows, numbers, wgmma, mma, copies in table:
        report = Report(*numbers)
        assert 16 < report.registers <= 255 and report.spills == 0
        assert 0 < report.shared <= SHARED[report.arch] and report.ahead > 0 and copies > 0
        assert (wgmma > 0) == (report.arch == 90 and rows == 128)
        assert (mma > 0) != (wgmma > 0)


def test_spills_are_counted():
    _, squeezed = measured()
    four_warps, eight_warps = (Report(*numbers) for numbers in squeezed)
    assert four_warps.registers == 255
    assert four_warps.spills > 100  # 128 sums a thread, beside everything else
    assert eight_warps.spills == 0


def test_a_wait_for_copies_counts_in_loops_only():
    lines = [
        "  scf.for %i = a {",
        "    %1 = ttg.async_wait %0 {num = 2 : i32}",
        "    %2 = scf.for %j = b {",
        "      ttg.async_wait %1 {num = 1 : i32}",
        "    }",
        "  }",
        "  ttg.async_wait %3 {num = 0 : i32}",
    ]
    for count, ahead in ((1, 0), (2, 2), (4, 1)):
        assert copies_ahead("\n".join(lines[:count] + lines[5:])) == ahead
    assert copies_ahead("") == 0


def test_a_product_of_fewer_columns_than_four_threads_take_is_shallow():
    line = "%1 : tensor<{}x{}xf32, #ttg.dot_op<{{opIdx = {}, parent = #mma, kWidth = 8}}>>"
    for rows, columns, index, shallow in ((16, 32, 0, False), (16, 32, 1, True), (32, 16, 0, True)):
        assert is_shallow(line.format(rows, columns, index)) == shallow


def test_an_error_there_is_an_error_here():
    with pytest.raises(RuntimeError, match="json.gone failed:(.|\n)*has no attribute 'gone'"):
        apart("json", "gone")
