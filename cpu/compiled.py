"""C source in, a library out, or a reason why not.

C is compiled on the machine that runs it, for its CPU, when it is first needed. Later starts find it in the user's
cache folder:

    source, flags, the compiler's macros → name → bytes, if they were kept and are whole → a copy in memory, and loaded
                                                ↘ compiled by one process, and kept by a rename ↗

The name is a hash of all that a library depends on. The compiler's macros tell its version, the C library's, and what
`-march=native` means here. The bytes end with a hash of the name and themselves. A copy in memory is loaded: nobody can
change it after it was checked, and a folder in which nothing may be executed will do.

One process compiles, under a lock. The others wait as long as a compiler may take, and find the bytes. Without locks
all compile, and the last rename wins. A Ctrl-C leaves nothing behind; a SIGKILL leaves a compiler, which ends by
itself, and a folder `building-…`, which the first compilation an hour later removes.

    CC             the compiler, with arguments if need be: "ccache gcc". Default: gcc
    LLAMA_MARCH    a CPU in place of native: x86-64-v3 (AVX2), skylake-avx512 (no VNNI), if this one can run it

Invariant: what is loaded was compiled by this user, from this source, for this CPU.
Not covered: systems other than Linux; libraries that another user compiled; removing libraries of older sources.
"""

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

LIMIT, ANSWER = 120.0, 20.0  # seconds for a compilation, and for a compiler's macros
ROOM, STALE = 4 << 20, 3600  # bytes that a compilation may need; age of leftovers
UNASKED = re.compile(
    "__(S?SSE|AVX|AMX|FMA|XOP|F16C|BMI|LZCNT|POPCNT|MOVBE|ARM_FEATURE)"
)  # compilers use these


class CompilerError(OSError):
    """There is no compiler, or it failed: another folder would not help."""


def compile_library(
    source: str, flags: Sequence[str] = (), linked: Sequence[str] = ()
) -> ctypes.CDLL:
    """The compiled source. linked: libraries that it needs, -l… or files. OSError: why it cannot be had."""
    command, macros = _compiler()
    depends, refused = repr((source, command, macros, [*flags], [*linked])), list[str]()
    name = hashlib.sha256(depends.encode()).hexdigest()[:32]
    for folder in _folders():
        try:
            _claim(folder)
            return _loaded(
                _kept(folder / name) or _made(folder / name, source, command, flags, linked)
            )
        except CompilerError:
            raise
        except OSError as error:
            refused.append(f"{folder}: {error.strerror or error}")
    raise OSError(f"there is no place for a library: {'; '.join(refused)}")


def _compiler() -> tuple[list[str], list[str]]:
    """The command, with the CPU to compile for, and the macros that it then defines."""
    named, march = os.environ.get("CC", ""), os.environ.get("LLAMA_MARCH") or "native"
    try:
        command = shlex.split(named) or ["gcc"]
    except ValueError as error:
        raise CompilerError(f"no C compiler: CC is {named!r} ({error})") from None
    if shutil.which(command[0]) is None:
        raise CompilerError(f"no C compiler: there is no {command[0]} (gcc, or what CC names)")
    macros = [_macros([*command, f"-march={cpu}"]) for cpu in dict.fromkeys(("native", march))]
    has, used = ({line.split()[1] for line in lines} for lines in (macros[0], macros[-1]))
    if lacks := sorted(name.strip("_") for name in used - has if UNASKED.match(name)):
        raise CompilerError(
            f"this CPU cannot run LLAMA_MARCH={march}: it has no {', '.join(lacks)}"
        )
    return [*command, f"-march={march}"], macros[-1]


def _macros(command: list[str]) -> list[str]:
    told = _run(
        [*command, "-dM", "-E", "-x", "c", "-"], ANSWER, "#include <limits.h>\n"
    ).splitlines()
    if not told or not all(line.startswith("#define ") for line in told):
        raise CompilerError(
            f"no C compiler: {command[0]} is something else (gcc, or what CC names)"
        )
    return told


def _run(command: list[str], seconds: float, given: str = "", **environment: str) -> str:
    """What a command prints. When its time is over, or at a Ctrl-C, it ends, and so do all processes that it began."""
    env, pipe = os.environ | {"LC_ALL": "C"} | environment, subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True
    ) as process:
        try:
            out, errors = (
                told.decode(errors="replace")
                for told in process.communicate(given.encode(), seconds)
            )
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CompilerError(
                    f"the C compiler failed: {command[0]} took more than {seconds:g} s"
                ) from None
            raise
    if process.returncode:
        lines = [
            f"{command[0]} ended with status {process.returncode}",
            *filter(str.strip, errors.splitlines()),
        ]
        first = next(
            (line for line in lines if re.search("error: |undefined reference|cannot find", line)),
            lines[-1],
        )
        raise CompilerError(f"the C compiler failed: {first.split('error: ')[-1].strip()}")
    return out


def _folders() -> Iterator[Path]:
    """Where libraries may be kept, the best first."""
    caches = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")
    yield from [Path(cache, "llama-native") for cache in caches if os.path.isabs(cache)][:1]
    yield Path(tempfile.gettempdir(), f"llama-native-{os.geteuid()}")


def _claim(folder: Path) -> None:
    """Make the folder, for this user alone. OSError if another user can write there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.lstat(folder)
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if own and found.st_mode & 0o077:
        folder.chmod(0o700)
    if not own or os.lstat(folder).st_mode & 0o077:
        raise OSError("not a folder of this user's alone")


def _kept(path: Path) -> bytes | None:
    """A library that lies there whole, and was put there by this user."""
    try:
        with open(
            path, "rb", opener=lambda name, how: os.open(name, how | os.O_NOFOLLOW | os.O_NONBLOCK)
        ) as file:
            found, content = os.fstat(file.fileno()), file.read()
    except OSError:
        return None
    own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return content[:-32] if own and content[-32:] == _seal(path, content[:-32]) else None


def _seal(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + content).digest()


def _locked(folder: Path) -> BinaryIO:
    """Lock the folder until the file is closed. Waits at most LIMIT seconds, and not where locks do not work."""
    import fcntl  # not everywhere

    file, until = open(folder / "lock", "ab"), time.monotonic() + LIMIT
    while time.monotonic() < until:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            break
    return file


def _made(
    path: Path, source: str, command: list[str], flags: Sequence[str], linked: Sequence[str]
) -> bytes:
    """The library, compiled and kept, unless another process had it ready before."""
    with _locked(path.parent):
        if content := _kept(path):
            return content
        for old in path.parent.glob("building-*"):
            with suppress(OSError):
                if time.time() - old.stat().st_mtime > STALE:
                    shutil.rmtree(old)
        with tempfile.TemporaryDirectory(prefix="building-", dir=path.parent) as scratch:
            with tempfile.TemporaryFile(dir=scratch) as room:
                os.posix_fallocate(
                    room.fileno(), 0, ROOM
                )  # a full disk says so here, not in a compiler's words
            unlinked, made, sealed = (
                Path(scratch, f"library.{kind}") for kind in ("o", "so", "sealed")
            )
            _run(
                [*command, *flags, "-fPIC", "-x", "c", "-c", "-", "-o", str(unlinked)],
                LIMIT,
                source,
                TMPDIR=scratch,
            )
            # Without the flags: -fopenmp would add an OpenMP of the compiler's choice. "defs": what is missing says so.
            _run(
                [*command, "-shared", "-Wl,-z,defs", str(unlinked), *linked, "-o", str(made)],
                LIMIT,
                TMPDIR=scratch,
            )
            if not made.exists():
                raise CompilerError(f"the C compiler failed: {command[0]} wrote nothing")
            content = made.read_bytes()
            sealed.touch(mode=0o600)
            sealed.write_bytes(content + _seal(path, content))
            os.replace(sealed, path)
            return content


def _loaded(content: bytes) -> ctypes.CDLL:
    memory = os.memfd_create("library")  # never closed: what is loaded is known by this number
    with open(memory, "wb", closefd=False) as file:
        file.write(content)
    return ctypes.CDLL(f"/proc/self/fd/{memory}")
