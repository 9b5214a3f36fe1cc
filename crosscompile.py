"""Compiling Triton kernels for a GPU that is not there, and reading what the compiler made of them.

How fast a kernel is shows on the machine alone; much of why shows before. Compiled for sm_90 (H100, H200) or sm_80 (A100), a kernel tells

  - registers a thread: 65,536 of them a multiprocessor, 255 a thread at most. registers · threads decides how many programs run side by side
  - spills: bytes a thread keeps in memory because it ran out of registers. None is what a hot loop must have
  - shared memory a program: 227 KB at most on sm_90, 163 KB on sm_80. What `num_stages` tiles in flight take lies there
  - instructions: `wgmma`, the matrix product of four warps that reads shared memory (sm_90 only); `mma`, that of one warp; `cp.async`,
    copies from memory to shared memory that nobody waits for; loads and their width

A pointer that is known to be a multiple of 16 bytes is read 16 bytes at a time. At a launch Triton looks at the pointers themselves; here
they are promised: every pointer is taken for such a one, and of the whole numbers those whose type ends in ":16".

    report = compile_for(kernel, {"x": "*bf16", "y": "*fp32", "stride": "i32:16", "n": "i32"}, {"BLOCK": 128}, num_warps=4)

Parameters of the kernel that `constexprs` names need no entry in the signature. Triton keeps what it compiled in its cache: nothing is
compiled a second time. Under TRITON_INTERPRET kernels are Python and cannot be compiled: `apart` asks another process.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED = {90: 227 * 1024, 80: 163 * 1024}               # bytes of shared memory that one program may have
REGISTERS = 65536                                       # of a multiprocessor


class Report(NamedTuple):
    """What a compiled kernel needs."""
    registers: int                                      # of a thread
    spills: int                                         # bytes of a thread, in memory
    shared: int                                         # bytes of a program
    ptx: str
    num_warps: int = 4

    @property
    def wgmma(self) -> int:
        """How many matrix products of four warps there are in the code."""
        return self.ptx.count("wgmma.mma_async")

    @property
    def programs(self) -> int:
        """How many programs a multiprocessor's registers serve at once."""
        return REGISTERS // (32 * self.num_warps * -(-self.registers // 8) * 8)

    def count(self, instruction: str) -> int:
        """Occurrences of an instruction that begins so, such as "cp.async.cg"."""
        return len(re.findall(r"(?m)^\s*(?:@%\w+\s+)?" + re.escape(instruction), self.ptx))


def compile_for(fn: Any, signature: dict[str, str], constexprs: dict[str, Any], arch: int = 90, num_warps: int = 4, num_stages: int = 3) -> Report:
    """Compile a kernel for compute capability `arch`. ValueError for parameters that nobody gave, RuntimeError under the interpreter."""
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set, so kernels are not compiled: use crosscompile.apart, or a process without it")
    if missing := [name for name in fn.arg_names if name not in signature and name not in constexprs]:
        raise ValueError(f"{fn.__name__} has no type for {', '.join(missing)}: each parameter is in the signature or among the constexprs")
    types = {name: "constexpr" if name in constexprs else signature[name] for name in fn.arg_names}
    aligned = [i for i, kind in enumerate(types.values()) if kind.startswith("*") or kind.endswith(":16")]
    source = ASTSource(fn, {name: kind.removesuffix(":16") for name, kind in types.items()}, constexprs, {(i,): [["tt.divisibility", 16]] for i in aligned})
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(num_warps=num_warps, num_stages=num_stages))
    return Report(*resources(kernel.asm["cubin"]), kernel.metadata.shared, kernel.asm["ptx"], num_warps)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes that it keeps in memory, as the binary says."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        told = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", told)[1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def apart(module: str, function: str, *arguments: Any) -> Any:
    """What `module.function(*arguments)` returns in a process without the interpreter; arguments and result must be JSON."""
    code = f"import json, sys, {module}; print(json.dumps({module}.{function}(*json.loads(sys.argv[1]))))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code, json.dumps(arguments)], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{module}.{function} failed:\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: one row's sum of products, by tiles of 16 and of 128 rows: the same code, other instructions.

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
    table = []
    for arch in SHARED:
        for rows in (16, 128):
            report = compile_for(_product, {"a": "*bf16", "b": "*bf16", "out": "*fp32", "K": "i32:16"}, {"ROWS": rows, "N": 128}, arch)
            table.append([arch, rows, *report[:3], report.wgmma, report.count("mma.sync"), report.count("cp.async.cg")])
    return table


def main() -> None:
    print(f"{'arch':>6}{'rows':>6}{'registers':>11}{'spills':>8}{'shared':>9}{'wgmma':>7}{'mma':>5}{'cp.async':>10}")
    for arch, rows, registers, spills, shared, *instructions in demonstration():
        print(f" sm_{arch}{rows:6}{registers:11}{spills:8}{shared:9,}" + "{:7}{:5}{:10}".format(*instructions))


if __name__ == "__main__":
    main()
