"""What the compiler says of a kernel, read from another process: this one may run kernels in the interpreter."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")
import triton
import triton.language as tl

from gpu.crosscompile import SHARED, compile_for, copies_ahead


def apart(module: str, function: str, *arguments: Any) -> Any:
    """module.function(*arguments), JSON all, in a process without the interpreter. RuntimeError if it fails."""
    code = f"import json, sys, triton, {module} as page; print(json.dumps(page.{function}(*json.loads(sys.argv[1]))))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
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


def several(*calls: list[Any]) -> list[Any]:
    """module.function(*arguments) of each, in one process."""
    return [
        getattr(import_module(module), function)(*arguments)
        for module, function, *arguments in calls
    ]


@triton.jit
def _product(a, b, out, K, ROWS: tl.constexpr, N: tl.constexpr):
    """out = a bᵀ. a: [ROWS, K], b: [N, K]."""
    rows, columns, at = tl.arange(0, ROWS)[:, None], tl.arange(0, N), tl.arange(0, 64)
    total = tl.zeros((ROWS, N), tl.float32)
    for start in tl.range(0, K, 64):
        left = tl.load(a + rows * K + start + at[None, :])
        right = tl.load(b + columns[None, :] * K + start + at[:, None])
        total = tl.dot(left, right, total)
    tl.store(out + rows * N + columns[None, :], total)


def instructions() -> list[list[int]]:
    """For each architecture and number of rows: `Report`'s first four, wgmma, mma, cp.async."""
    table, types = [], {"a b": "*bf16", "out": "*fp32", "K": "i32:16"}
    for arch, rows in [(arch, rows) for arch in SHARED for rows in (16, 128)]:
        report = compile_for(_product, types, {"ROWS": rows, "N": 128}, arch)
        table.append(
            [arch, rows, *report[:4], *map(report.count, ("wgmma.mma", "mma.sync", "cp.async.cg"))]
        )
    return table


def compiled() -> list[list[list[int]]]:
    return [instructions(), squeezed(4, 8)]


HERE = apart, "gpu.test_crosscompile", "compiled"


@pytest.mark.meanwhile(*HERE)
def test_the_same_code_becomes_other_instructions(meanwhile):
    for arch, rows, registers, spills, shared, ahead, wgmma, mma, copies in meanwhile()[0]:
        assert (
            16 < registers <= 255
            and spills == 0
            and 0 < shared <= SHARED[arch]
            and ahead > 0
            and copies > 0
        )
        assert (wgmma > 0) == (arch == 90 and rows == 128) and (mma > 0) != (wgmma > 0)


def squeezed(*warps: int) -> list[list[int]]:
    signature = {"a": "*bf16", "b": "*bf16", "out": "*fp32", "K": "i32"}
    with pytest.raises(ValueError, match="_product has no type for out, K: "):
        compile_for(_product, {"a": "*bf16", "b": "*bf16"}, {"ROWS": 16, "N": 16})
    reports = [
        compile_for(_product, signature, {"ROWS": 128, "N": 128}, 80, num_warps)
        for num_warps in warps
    ]
    return [[report.registers, report.spills, report.programs] for report in reports]


@pytest.mark.meanwhile(*HERE)
def test_spills_are_seen_programs_counted_and_types_asked_for(meanwhile):
    (registers, spills, programs), eight = meanwhile()[1]
    assert (registers, programs) == (
        255,
        2,
    ) and spills > 100  # 128 sums a thread, beside everything else
    assert eight[1:] == [0, 1]


def test_a_wait_for_all_copies_is_seen_in_loops_only():
    lines = [
        "  scf.for %i = a {",
        "    %1 = ttg.async_wait %0 {num = 2 : i32}",
        "    %2 = scf.for %j = b {",
        "      ttg.async_wait %1 {num = 1 : i32}",
        "    }",
        "  }",
        "  ttg.async_wait %3 {num = 0 : i32}",
    ]
    assert [copies_ahead("\n".join(lines[:n] + lines[5:])) for n in (1, 2, 4)] == [
        0,
        2,
        1,
    ] and copies_ahead("") == 0


@pytest.mark.meanwhile(apart, "json", "gone")
def test_what_goes_wrong_there_is_told_here(meanwhile):
    with pytest.raises(RuntimeError, match="json.gone failed:(.|\n)*has no attribute 'gone'"):
        meanwhile()
