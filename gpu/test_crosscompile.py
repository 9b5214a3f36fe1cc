"""What Triton makes of a kernel for a GPU is what `gpu/testing.py` reads in it."""

from functools import cache
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")
import torch
import triton
import triton.language as tl

from gpu.testing import SHARED, Report, apart, compile_launches, copies_ahead, is_shallow

pytestmark = pytest.mark.gpu_interpreter


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
