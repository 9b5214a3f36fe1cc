"""C sources become a library: compiled once, kept in the user's cache folder, loaded.

    $XDG_CACHE_HOME/llama-native/<hash>.so      (~/.cache where that is not set)

The hash is of the sources, the command and the CPU's features: C is compiled for them, and unlike
machines may share a home folder. A first start waits for the compiler, so the sources are compiled
side by side. A library is made beside its place, and renamed: other processes see all of it or
nothing. Processes that begin at once all compile, and the last rename wins. A
library that cannot be loaded is compiled again.

    CC             the compiler, with arguments if need be: "ccache gcc". Default: gcc
    LLAMA_MARCH    the CPU to compile for, in place of this one: x86-64-v3 (AVX2), alderlake
                   (AVX-VNNI), skylake-avx512 (no VNNI), icelake-server (no AMX), armv8-a (no dot
                   product). This CPU must be able to run it

Invariant: what is loaded was compiled from these sources, for this CPU.
Not covered: systems other than Linux and macOS; a cache folder to which others can write, who can
run code here then; removing libraries of older sources, or what a killed process left.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory


def compile_library(
    sources: Sequence[str], flags: Sequence[str] = (), linked: Sequence[str] = ()
) -> ctypes.CDLL:
    """The library of these sources. linked: libraries that it needs, -l… or files. OSError: the
    reason."""
    march = os.environ.get("LLAMA_MARCH") or this_cpu()
    compiler = os.environ.get("CC", "").split() or ["gcc"]
    command = [*compiler, f"-march={march}"]
    depends = repr(([*sources], command, [*flags], [*linked], cpu_features()))
    name = hashlib.sha256(depends.encode()).hexdigest()[:32]
    folder = cache_folder()
    library = folder / f"{name}.so"
    with suppress(OSError):  # there is none, or it cannot be loaded
        return ctypes.CDLL(str(library))
    with TemporaryDirectory(prefix="building-", dir=folder) as scratch:
        objects = [f"{scratch}/{i}.o" for i in range(len(sources))]

        def compile_one(source: str, to: str) -> None:
            run_compiler([*command, *flags, "-fPIC", "-x", "c", "-c", "-", "-o", to], source)

        with ThreadPoolExecutor(len(sources)) as pool:
            for _ in pool.map(compile_one, sources, objects):  # raises what one of them raised
                pass
        finished = f"{scratch}/library.so"
        # Without the flags: -fopenmp would link an OpenMP of the compiler's choice.
        undefined = ["-undefined", "dynamic_lookup"] if is_mac() else ["-Wl,-z,defs"]
        run_compiler([*command, "-shared", *undefined, *objects, *linked, "-o", finished])
        os.replace(finished, library)
    return ctypes.CDLL(str(library))


def is_mac() -> bool:
    """What depends on this has never run: it was written by reading."""
    return platform.system() == "Darwin"


def this_cpu() -> str:
    """What the compiler calls this CPU. On ARM, where GCC knows few by name and GCC 12 miscompiles
    SVE, the features that C uses are named."""
    if platform.machine() not in ("aarch64", "arm64"):
        return "native"
    has_dot_product = is_mac() or "asimddp" in cpu_features().split()
    return "armv8.2-a+dotprod" if has_dot_product else "armv8-a"


def cpu_features() -> str:
    """The instructions that this CPU has, as Linux lists them; elsewhere empty."""
    if not os.path.exists("/proc/cpuinfo"):
        return ""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return line
    return ""


def cache_folder() -> Path:
    """The cache folder, made if need be. OSError if it cannot be made."""
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise OSError("this user has no home folder: set XDG_CACHE_HOME") from None
    folder = Path(caches, "llama-native")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def run_compiler(command: list[str], source: str = "") -> None:
    """Run a compiler. OSError with its first error, in one line."""
    if shutil.which(command[0]) is None:
        raise OSError(f"no C compiler: there is no {command[0]} (install it, or set CC to another)")
    english = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(
        command, input=source, env=english, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error:" in line]
        lines.append(f"{command[0]} ended with status {done.returncode}")
        raise OSError(f"the C compiler failed: {lines[0].split('error: ')[-1].strip()}")
