"""A C source becomes a library: compiled once, kept in the user's cache folder, loaded.

    $XDG_CACHE_HOME/llama-native/<hash>-<size>.so      (~/.cache where that is not set)

The hash is of the source, the command and the CPU's features: C is compiled for them, and unlike
machines may share a home folder. A library is compiled under a temporary name in that
folder, written to the disk, loaded, then renamed: other processes see all of it or nothing.
Processes that begin at once all compile, and the last rename wins. A library that was cut later
has not the size in its name: its first use would end the program (SIGBUS), so it is compiled again,
as is one that cannot be loaded. Whoever can write to the folder can run code here, so it is this
user's alone.

    CC             the compiler, with arguments if need be: "ccache gcc". Default: gcc
    LLAMA_MARCH    the CPU to compile for, in place of this one: x86-64-v3 (AVX2), alderlake
                   (AVX-VNNI), skylake-avx512 (no VNNI), icelake-server (no AMX), armv8-a (no dot
                   product). This CPU must be able to run it

Invariant: what is loaded was compiled by this user, from this source, for this CPU.
Not covered: systems other than Linux and macOS; removing libraries of older sources, or what a
killed process left.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import finalize

TIMEOUT = 120  # seconds for each of the compiler's two steps


def compile_library(
    source: str, flags: Sequence[str] = (), linked: Sequence[str] = ()
) -> ctypes.CDLL:
    """The compiled source. linked: libraries that it needs, -l… or files. OSError: the reason."""
    march = os.environ.get("LLAMA_MARCH") or this_cpu()
    compiler = os.environ.get("CC", "").split() or ["gcc"]
    command = [*compiler, f"-march={march}"]
    depends = repr((source, command, [*flags], [*linked], cpu_features()))
    name = hashlib.sha256(depends.encode()).hexdigest()[:32]
    folder = private_folder()
    for library in folder.glob(f"{name}-*.so"):
        with suppress(OSError):  # it cannot be loaded
            if library.name == f"{name}-{library.stat().st_size}.so":
                return ctypes.CDLL(str(library))
    return compile_into(folder, name, source, command, flags, linked)


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


def private_folder() -> Path:
    """The cache folder, made if need be. OSError if another user could write there."""
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise OSError("this user has no home folder: set XDG_CACHE_HOME") from None
    folder = Path(caches, "llama-native")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    others = stat.S_IMODE(status.st_mode) & 0o077
    if others or status.st_uid != os.geteuid():
        raise OSError(f"{folder} is not this user's alone: remove it, or set XDG_CACHE_HOME")
    return folder


def compile_into(
    folder: Path,
    name: str,
    source: str,
    command: list[str],
    flags: Sequence[str],
    linked: Sequence[str],
) -> ctypes.CDLL:
    """The compiled source, loaded, and kept under this name: its file appears at once, complete."""
    with TemporaryDirectory(prefix="building-", dir=folder) as scratch:
        unlinked = f"{scratch}/library.o"
        finished = f"{scratch}/library.so"
        compile_only = [*command, *flags, "-fPIC", "-x", "c", "-c", "-", "-o", unlinked]
        run_compiler(compile_only, scratch, source)
        # Without the flags: -fopenmp would link an OpenMP of the compiler's choice.
        undefined = ["-undefined", "dynamic_lookup"] if is_mac() else ["-Wl,-z,defs"]
        link = [*command, "-shared", *undefined, unlinked, *linked, "-o", finished]
        run_compiler(link, scratch)
        with open(finished, "rb") as file:
            os.fsync(file.fileno())  # a full disk may only be told here
        library = ctypes.CDLL(finished)
        size = os.stat(finished).st_size
        os.replace(finished, folder / f"{name}-{size}.so")
    return library


def run_compiler(command: list[str], scratch: str, source: str = "") -> None:
    """Run a compiler, whose temporary files go to `scratch`. OSError with its first error, in one
    line; or if it takes too long: then, and after Ctrl-C, the programs that it started end with it.
    """
    if shutil.which(command[0]) is None:
        raise OSError(f"no C compiler: there is no {command[0]} (install it, or set CC to another)")
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"LC_ALL": "C", "TMPDIR": scratch},
        text=True,
        errors="replace",
        start_new_session=True,  # a process group of its own
    )
    # Also when the program ends while a thread of it compiles.
    kill_all = finalize(process, os.killpg, process.pid, signal.SIGKILL)
    try:
        _, messages = process.communicate(source, TIMEOUT)
    except subprocess.TimeoutExpired:
        raise OSError(f"the C compiler has not ended after {TIMEOUT} seconds") from None
    finally:
        if process.returncode is None:
            kill_all()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=1)  # until all have ended
        kill_all.detach()
    if process.returncode:
        lines = [line for line in messages.splitlines() if "error:" in line]
        lines.append(f"{command[0]} ended with status {process.returncode}")
        raise OSError(f"the C compiler failed: {lines[0].split('error: ')[-1].strip()}")
