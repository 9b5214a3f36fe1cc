"""Compiling Triton kernels for a GPU that is not there, and reading what the compiler made of them.

Compiled for sm_90 (H100, H200) or sm_80 (A100), a kernel tells much of why it is fast or slow:

  - registers a thread: at most 255. A multiprocessor has 65,536, which limits how many programs run side by side
  - spills: bytes that a thread keeps in memory because it ran out of registers. A hot loop must have none
  - shared memory a program: at most 227 KB on sm_90, 163 KB on sm_80. The `num_stages` tiles in flight lie there
  - instructions: `wgmma`, the matrix product of four warps (sm_90 only); `mma`, that of one warp; `cp.async`, copies

At a launch Triton looks which pointers are multiples of 16, and reads 16 bytes at a time. Here all are promised to be,
and integers with a type that ends in ":16".

    report = compile_for(kernel, {"x y": "*bf16", "bias": None, "n": "i32:16"}, {"BLOCK": 128}, num_warps=4)

None stands for a tensor that is not given. Under TRITON_INTERPRET kernels are Python and cannot be compiled."""
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED = {90: 227 * 1024, 80: 163 * 1024}               # bytes of shared memory that one program may have
REGISTERS = 65536                                       # of a multiprocessor
STORED = {16: ("*bf16", None, None), 8: ("*i8", "*bf16", None), 4: ("*u8", "*bf16", "*i16")}    # numbers, scales, zeros


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors (132, an H100's, where there is no GPU)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class Report(NamedTuple):
    registers: int                                      # of a thread
    spills: int                                         # bytes of a thread, in memory
    shared: int                                         # bytes of a program
    ptx: str
    num_warps: int

    @property
    def wgmma(self) -> int:
        return self.ptx.count("wgmma.mma_async")

    @property
    def programs(self) -> int:
        """Programs that a multiprocessor's registers serve at once."""
        return REGISTERS // (32 * self.num_warps * -(-self.registers // 8) * 8)

    def count(self, instruction: str) -> int:
        """Occurrences of an instruction that begins so, such as "cp.async.cg"."""
        return len(re.findall(r"(?m)^\s*(?:@%\w+\s+)?" + re.escape(instruction), self.ptx))


def compile_for(fn: Any, signature: dict[str, str | None], constexprs: dict[str, Any], arch: int = 90,
                num_warps: int = 4, num_stages: int = 3) -> Report:
    """Compile for compute capability `arch`. Types and constants that the kernel has no parameter for are ignored.
    ValueError for a parameter without a type, RuntimeError under the interpreter."""
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set, so kernels are not compiled: "
                           "use gpu.crosscompile.apart, or a process without it")
    told = {name: kind for names, kind in signature.items() for name in names.split()}
    known = {name: None for name, kind in told.items() if kind is None} | constexprs
    if missing := [name for name in fn.arg_names if name not in told and name not in known]:
        raise ValueError(f"{fn.__name__} has no type for {', '.join(missing)}: "
                         "each parameter is in the signature or among the constexprs")
    types = {name: "constexpr" if name in known else told[name] for name in fn.arg_names}
    aligned = [i for i, kind in enumerate(types.values()) if kind.startswith("*") or kind.endswith(":16")]
    source = ASTSource(fn, {name: kind.removesuffix(":16") for name, kind in types.items()},
                       {name: value for name, value in known.items() if name in types},
                       {(i,): [["tt.divisibility", 16]] for i in aligned})
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32),
                            options=dict(num_warps=num_warps, num_stages=num_stages))
    return Report(*resources(kernel.asm["cubin"]), kernel.metadata.shared, kernel.asm["ptx"], num_warps)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and its bytes in memory, as the binary says."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", told)[1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def print_table(columns: str, rows: Iterable[Sequence[Any]]) -> None:
    """Each row when it is known, under the names of the columns."""
    for row in chain([columns.split()], rows):
        print("".join(f"{cell:>11,}" if isinstance(cell, int) else f"{cell:>11}" for cell in row), flush=True)


# ---- The demonstration: the same product by tiles of 16 and of 128 rows becomes other instructions -------------------

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


def demonstration() -> list[list[int]]:
    """For each architecture and number of rows: registers, spills, shared memory, wgmma, mma, cp.async."""
    table, types = [], {"a b": "*bf16", "out": "*fp32", "K": "i32:16"}
    for arch, rows in [(arch, rows) for arch in SHARED for rows in (16, 128)]:
        report = compile_for(_product, types, {"ROWS": rows, "N": 128}, arch)
        table.append([arch, rows, *report[:3], report.wgmma, report.count("mma.sync"), report.count("cp.async.cg")])
    return table


if __name__ == "__main__":
    print_table("sm rows registers spills shared wgmma mma cp.async", demonstration())
