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

At a launch Triton checks which pointers are multiples of 16 bytes, and reads 16 bytes at a time
through these. Here all pointers count as such, but for those in the kernel's
do_not_specialize_on_alignment; so do integers of type "…:16".

    types = {"x y": "*bf16", "bias": None, "n": "i32:16"}
    report = compile_for(kernel, types, {"BLOCK": 128}, num_warps=4)

None stands for a tensor that is not given. Under TRITON_INTERPRET kernels are Python and cannot be
compiled.
"""

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
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


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
        """Programs that a multiprocessor runs side by side, by its registers, shared memory and 64
        warps.
        """
        registers = 8 * triton.cdiv(self.registers, 8)  # of a thread: given out by eights
        by_registers = REGISTERS // (32 * self.num_warps * registers)
        by_shared = (SHARED[self.arch] + RESERVED) // (self.shared + RESERVED)
        return min(by_registers, by_shared, 64 // self.num_warps)

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
    """Compile for compute capability `arch`. Types and constants that the kernel has no parameter
    for are ignored. ValueError for a parameter without a type, RuntimeError under the interpreter.
    """
    if knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET is set, so kernels are not compiled: use a process without it"
        )
    types = {}
    for names, kind in signature.items():
        types |= dict.fromkeys(names.split(), kind)
    constants = {name: None for name, kind in types.items() if kind is None} | constexprs
    missing = [name for name in fn.arg_names if name not in types and name not in constants]
    if missing:
        raise ValueError(
            f"{fn.__name__} has no type for {', '.join(missing)}: "
            "each parameter is in the signature or among the constexprs"
        )
    parameters = {}
    attributes = {}
    for i, name in enumerate(fn.arg_names):
        kind = "constexpr" if name in constants else types[name]
        parameters[name] = kind.removesuffix(":16")
        pointer = kind.startswith("*") and name not in fn.do_not_specialize_on_alignment
        if pointer or kind.endswith(":16"):
            attributes[i,] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in constants.items() if name in parameters}
    kernel = triton.compile(
        ASTSource(fn, parameters, constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options=dict(num_warps=num_warps, num_stages=num_stages),
    )
    registers, spills = resources(kernel.asm["cubin"])
    return Report(
        registers=registers,
        spills=spills,
        shared=kernel.metadata.shared,
        ahead=copies_ahead(kernel.asm["ttgir"]),
        ptx=kernel.asm["ptx"],
        num_warps=num_warps,
        arch=arch,
    )


def copies_ahead(ttgir: str) -> int:
    """`Report.ahead` from Triton's intermediate code; 0 if no loop copies in the background."""
    waits = []
    for loop in re.finditer(r"(?ms)^( *)[^\n]*scf\.for .*?^\1\}", ttgir):
        waits += re.findall(r"async_wait.*num = (\d+)", loop[0])
    return min(map(int, waits), default=0)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as the binary says."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return int(numbers["REG"]), int(numbers["STACK"]) + int(numbers["LOCAL"])


def print_table(columns: str, rows: Iterable[Sequence[Any]]) -> None:
    """Print the names of the columns, then each row as soon as it is computed."""
    for first, *numbers in chain([columns.split()], rows):
        print(f"{first:24}", *(f"{number:>10}" for number in numbers), flush=True)
