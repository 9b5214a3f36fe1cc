"""The machine that measures: its name, its instruction set, and the file of its results.

Two CPUs of one name may have different instructions, which decide how fast products are: so the
instruction set is part of the file's name. results/amd-epyc-avx512-vnni.json is of an AMD EPYC with
AVX-512 and VNNI. Held down to an older CPU (LLAMA_MARCH, see cpu/compiled.py), a machine writes the
results of that CPU. Without C (no compiler, LLAMA_NATIVE=0 or LLAMA_PLAIN=1), its file is
results/<cpu>-no-c.json.
"""

import os
import platform
import re
import subprocess
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kernels import Ops, ops_for
from measure.clock import read_bandwidth

CPUINFO = Path("/proc/cpuinfo")
INSTRUCTIONS = {  # a flag of Linux, or a name for LLAMA_MARCH -> our name, the widest first
    "amx_int8": "amx",
    "sapphirerapids": "amx",
    "avx512_vnni": "avx512-vnni",
    "avx512f": "avx512",
    "skylake-avx512": "avx512",
    "avx_vnni": "avx-vnni",
    "alderlake": "avx-vnni",
    "avx2": "avx2",
    "x86-64-v3": "avx2",
    "asimddp": "neon-dotprod",
    "dotprod": "neon-dotprod",
    "asimd": "neon",
    "armv8-a": "neon",
}


def cpu_info(field: str) -> str:
    """The first value of this field in /proc/cpuinfo; empty where there is none."""
    if not CPUINFO.exists():
        return ""
    found = re.search(rf"^{field}\s*:\s*(.*\S)", CPUINFO.read_text(), re.MULTILINE)
    return found[1] if found else ""


def processor() -> str:
    """The CPU's name; on ARM Linux tells numbers only."""
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    numbers = [platform.machine(), cpu_info("CPU implementer"), cpu_info("CPU part")]
    return cpu_info("model name") or " ".join(filter(None, numbers))


def instructions() -> str:
    """The instructions that this CPU has, as Linux lists them, or the older CPU it is held to."""
    return os.environ.get("LLAMA_MARCH") or cpu_info("flags") or cpu_info("Features")


def has_bfloat16() -> bool:
    """Whether there are instructions for products of bfloat16: AMX's, AVX-512's or ARM's."""
    return re.search("bf16|sapphirerapids", instructions()) is not None


def has_c() -> bool:
    """Whether a CPU's products are those of C."""
    return type(ops_for("cpu")) is not Ops and import_module("cpu.native").library() is not None


def instruction_set() -> str:
    """The widest instructions that products use, or the kind of CPU."""
    if not has_c():
        return "no-c"
    known = re.split(r"[\s+]+", instructions())
    found = [name for flag, name in INSTRUCTIONS.items() if flag in known]
    return found[0] if found else platform.machine()


def identity(on_gpu: bool = False) -> dict[str, str]:
    if on_gpu:  # it is named alone
        return {"machine": torch.cuda.get_device_name(), "instructions": ""}
    return {"machine": processor(), "instructions": instruction_set()}


def results_file(results: dict[str, Any] | None = None) -> Path:
    """results/<machine>.json of these results, or of this CPU's, relative to the repository."""
    named = results or identity()
    words = f"{named['machine']} {named['instructions']}".lower()
    slug = re.sub(r"[^a-z0-9]+", "-", words).strip("-")
    return Path("results", f"{slug}.json")


def machine(bandwidth: float | None = None, on_gpu: bool = False) -> dict[str, Any]:
    """The machine, and its read bandwidth, measured now if it is not given."""
    return identity(on_gpu) | {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "read_bandwidth": bandwidth or read_bandwidth(),
    }
