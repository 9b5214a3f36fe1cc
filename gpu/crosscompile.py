"""Compiling Triton kernels for a GPU that this machine lacks, and reading what resources they use.

Compiled for sm_90 (H100, H200) or sm_80 (A100), a kernel tells much of why it is fast or slow:

  - registers a thread: at most 255. A multiprocessor has 65,536, which limits how many programs run side by side
  - spills: bytes that a thread keeps in memory because it ran out of registers. A hot loop must have none
  - shared memory a program: at most 227 KB on sm_90, 163 KB on sm_80. It holds the `num_stages` tiles in flight
  - copies ahead: asynchronous copies (`cp.async`) in flight where a loop waits. With none, the loop waits for memory
  - instructions: `wgmma`, the matrix product of four warps (sm_90 only); `mma`, that of one warp

At a launch Triton checks which pointers are multiples of 16 bytes, and reads 16 bytes at a time through these. Here all
pointers count as such, but for those in the kernel's do_not_specialize_on_alignment; so do integers of type "…:16".

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
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED = {90: 227 * 1024, 80: 163 * 1024}  # by arch: the most bytes of shared memory of a program
RESERVED = 1024  # bytes more that each takes; a multiprocessor has as many more
REGISTERS = 65536  # of a multiprocessor
STORED = {
    16: ("*bf16", None, None),
    8: ("*i8", "*bf16", None),
    4: ("*u8", "*bf16", "*i16"),  # numbers, scales, zeros
    "fp8": ("*fp8e4nv", "*bf16", None),
}


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors (132, an H100's, where there is no GPU)."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 132
    )


class Report(NamedTuple):
    registers: int  # of a thread
    spills: int  # bytes of a thread, in memory
    shared: int  # bytes of a program
    ahead: int  # copies ahead: the fewest at any wait in a loop
    ptx: str
    num_warps: int
    arch: int

    @property
    def programs(self) -> int:
        """Programs that a multiprocessor runs side by side, by its registers, shared memory and 64 warps."""
        return min(
            REGISTERS // (32 * self.num_warps * -(-self.registers // 8) * 8),
            64 // self.num_warps,
            (SHARED[self.arch] + RESERVED) // (self.shared + RESERVED),
        )

    def count(self, instruction: str) -> int:
        """How often instructions with this beginning occur, such as "cp.async.cg"."""
        return len(re.findall(r"(?m)^\s*(?:@%\w+\s+)?" + re.escape(instruction), self.ptx))


def compile_for(
    fn: Any,
    signature: dict[str, str | None],
    constexprs: dict[str, Any],
    arch: int = 90,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Report:
    """Compile for compute capability `arch`. Types and constants that the kernel has no parameter for are ignored.
    ValueError for a parameter without a type, RuntimeError under the interpreter."""
    if knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET is set, so kernels are not compiled: use a process without it"
        )
    told = {name: kind for names, kind in signature.items() for name in names.split()}
    known = {name: None for name, kind in told.items() if kind is None} | constexprs
    if missing := [name for name in fn.arg_names if name not in told and name not in known]:
        raise ValueError(
            f"{fn.__name__} has no type for {', '.join(missing)}: "
            "each parameter is in the signature or among the constexprs"
        )
    types = {name: "constexpr" if name in known else told[name] for name in fn.arg_names}
    aligned = [
        i
        for i, (name, kind) in enumerate(types.items())
        if kind.endswith(":16")
        or kind.startswith("*")
        and name not in fn.do_not_specialize_on_alignment
    ]
    source = ASTSource(
        fn,
        {name: kind.removesuffix(":16") for name, kind in types.items()},
        {name: value for name, value in known.items() if name in types},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    kernel = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options=dict(num_warps=num_warps, num_stages=num_stages),
    )
    return Report(
        *resources(kernel.asm["cubin"]),
        kernel.metadata.shared,
        copies_ahead(kernel.asm["ttgir"]),
        kernel.asm["ptx"],
        num_warps,
        arch,
    )


def copies_ahead(ttgir: str) -> int:
    """`Report.ahead` from Triton's intermediate code; 0 if no loop copies in the background."""
    loops = re.finditer(r"(?ms)^( *)[^\n]*scf\.for .*?^\1\}", ttgir)
    return min(
        (int(n) for loop in loops for n in re.findall(r"async_wait.*num = (\d+)", loop[0])),
        default=0,
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as the binary says."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        int(re.search(rf"{name}:(\d+)", told)[1]) for name in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local


def print_table(columns: str, rows: Iterable[Sequence[Any]]) -> None:
    """Print the names of the columns, then each row as soon as it is computed."""
    for row in chain([columns.split()], rows):
        print(
            "".join(f"{cell:>11,}" if isinstance(cell, int) else f"{cell:>11}" for cell in row),
            flush=True,
        )


if __name__ == "__main__":  # RMSNorm of a row of 4,096 numbers, by more and more warps
    from gpu.fused import _add_norm

    types = {"x delta weight total y": "*bf16", "C": "i32:16", "eps": "fp32"}
    made = (
        (warps, compile_for(_add_norm, types, {"SIZE": 4096}, 90, warps))
        for warps in (1, 2, 4, 8, 16)
    )
    print_table(
        "warps registers spills shared programs",
        ([n, *report[:3], report.programs] for n, report in made),
    )
