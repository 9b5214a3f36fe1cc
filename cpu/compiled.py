"""A C source becomes a library: compiled once, kept in the user's cache folder, loaded.

    $XDG_CACHE_HOME/llama-native/<hash>.so      (~/.cache where that is not set)

The hash is of the source, the command and the CPU's features: `-march=native` compiles for them,
and unlike machines may share a home folder. A library is compiled under a temporary name in that
folder, then renamed: other processes see all of it or nothing. Processes that begin at once all
compile, and the last rename wins. Whoever can write to the folder can run code here, so it is this
user's alone.

    CC             the compiler, with arguments if need be: "ccache gcc". Default: gcc
    LLAMA_MARCH    the CPU to compile for, in place of this one: x86-64-v3 (AVX2), skylake-avx512
                   (no VNNI). This CPU must be able to run it

Invariant: what is loaded was compiled by this user, from this source, for this CPU.
Not covered: systems other than Linux; removing libraries of older sources, or what a killed
process left.
"""

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory


def compile_library(
    source: str, flags: Sequence[str] = (), linked: Sequence[str] = ()
) -> ctypes.CDLL:
    """The compiled source. linked: libraries that it needs, -l… or files. OSError: the reason."""
    march = os.environ.get("LLAMA_MARCH") or "native"
    compiler = os.environ.get("CC", "").split() or ["gcc"]
    command = [*compiler, f"-march={march}"]
    depends = repr((source, command, [*flags], [*linked], cpu_features()))
    name = hashlib.sha256(depends.encode()).hexdigest()[:32]
    library = private_folder() / f"{name}.so"
    if not library.exists():
        compile_to(library, source, command, flags, linked)
    return ctypes.CDLL(str(library))


def cpu_features() -> str:
    """The instructions that this CPU has, as Linux lists them."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return line
    return ""


def private_folder() -> Path:
    """The cache folder, made if need be. OSError if another user could write there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "llama-native")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    others = stat.S_IMODE(status.st_mode) & 0o077
    if others or status.st_uid != os.geteuid():
        raise OSError(f"{folder} is not this user's alone: remove it, or set XDG_CACHE_HOME")
    return folder


def compile_to(
    library: Path, source: str, command: list[str], flags: Sequence[str], linked: Sequence[str]
) -> None:
    """Compile the source to this file, which appears at once and complete."""
    with TemporaryDirectory(prefix="building-", dir=library.parent) as scratch:
        unlinked = f"{scratch}/library.o"
        finished = f"{scratch}/library.so"
        run_compiler([*command, *flags, "-fPIC", "-x", "c", "-c", "-", "-o", unlinked], source)
        # Without the flags: -fopenmp would link an OpenMP of the compiler's choice.
        run_compiler([*command, "-shared", "-Wl,-z,defs", unlinked, *linked, "-o", finished])
        os.replace(finished, library)


def run_compiler(command: list[str], source: str = "") -> None:
    """Run a compiler. OSError with its first error, in one line."""
    if shutil.which(command[0]) is None:
        raise OSError(f"no C compiler: there is no {command[0]} (gcc, or what CC names)")
    english = os.environ | {"LC_ALL": "C"}
    process = subprocess.run(
        command, input=source, env=english, capture_output=True, text=True, errors="replace"
    )
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if "error:" in line]
        lines.append(f"{command[0]} ended with status {process.returncode}")
        raise OSError(f"the C compiler failed: {lines[0].split('error: ')[-1].strip()}")
