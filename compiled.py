"""C source in, a library out, or a reason why not.

C is compiled on the machine that runs it, for its CPU, when it is first needed; later starts find it in the user's
cache folder. What may go wrong on the way is the subject here: compilers that fail or hang; processes that start at
once, or are killed half-way; files that are cut off, somebody else's, or made for another machine; folders that are
full, or read-only, or not there.

    source, flags, the compiler's macros → name → bytes, if they were kept and are whole → a copy in memory, and loaded
                                                ↘ compiled by one process, and kept by a rename ↗

The name says what a library depends on. The compiler is asked for its macros at each start (5 ms): they are its
version, the C library's, and what `-march=native` means here, for one home may serve many machines. The bytes end with
a hash of the name and themselves. Since a copy of what was checked is loaded, and no file, nobody can cut it short
afterwards, and a folder in which nothing may be executed will do.

Who compiles holds a lock. The others wait for it, as long as a compiler may take, and find the bytes: eight starts cost
one compilation, and each waits up to 50 ms too long. Where there are no locks all compile, and the last rename wins. A
Ctrl-C leaves nothing behind; a SIGKILL leaves a compiler, which ends by itself, and a folder `building-…`, which goes
with the first compilation an hour later.

    CC             the compiler, with arguments if need be: "ccache gcc". Default: gcc
    LLAMA_MARCH    a CPU in place of native, to see what others run: x86-64-v3 (AVX2), skylake-avx512 (no VNNI);
                   refused if this one cannot run it

Invariant: what is loaded was compiled by this user, from this source, for this CPU.

Not covered: other systems than Linux; libraries that another user compiled; throwing away what older sources left.
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
from contextlib import contextmanager, suppress
from pathlib import Path

LIMIT, ANSWER = 120.0, 20.0                             # seconds that a compiler may take, and to say what it is
ROOM, STALE = 4 << 20, 3600                             # bytes that a compilation may need; seconds that none takes
UNASKED = re.compile("__(S?SSE|AVX|AMX|FMA|XOP|F16C|BMI|LZCNT|POPCNT|MOVBE|ARM_FEATURE)")   # what any C may become


class CompilerError(OSError):
    """There is no compiler, or it failed: another folder would not help."""


def library(source: str, flags: Sequence[str] = (), linked: Sequence[str] = ()) -> ctypes.CDLL:
    """What the source becomes. linked: libraries that it needs, -l… or files. OSError: why it cannot be had."""
    command, macros = _compiler()
    depends, refused = repr((source, command, macros, [*flags], [*linked])), list[str]()
    name = hashlib.sha256(depends.encode()).hexdigest()[:32]
    for folder in _folders():
        try:
            _claim(folder)
            return _loaded(_kept(folder / name) or _made(folder / name, source, command, flags, linked))
        except CompilerError:
            raise
        except OSError as error:
            refused.append(f"{folder}: {error.strerror or error}")
    raise OSError(f"there is no place for a library: {'; '.join(refused)}")


# ---- The compiler -------------------------------------------------------------------------------------------------

def _compiler() -> tuple[list[str], list[str]]:
    """The command, with the CPU to compile for, and the macros that it then begins with."""
    named, march = os.environ.get("CC", ""), os.environ.get("LLAMA_MARCH") or "native"
    try:
        command = shlex.split(named) or ["gcc"]
    except ValueError as error:
        raise CompilerError(f"no C compiler: CC is {named!r} ({error})") from None
    if shutil.which(command[0]) is None:
        raise CompilerError(f"no C compiler: there is no {command[0]} (gcc, or what CC names)")
    macros = here = _macros([*command, "-march=native"])
    if march != "native":
        macros = _macros([*command, f"-march={march}"])
        used, has = ({line.split()[1] for line in lines} for lines in (macros, here))
        if lacks := sorted(name.strip("_") for name in used - has if UNASKED.match(name)):
            raise CompilerError(f"this CPU cannot run LLAMA_MARCH={march}: it has no {', '.join(lacks)}")
    return [*command, f"-march={march}"], macros


def _macros(command: list[str]) -> list[str]:
    told = _run([*command, "-dM", "-E", "-x", "c", "-"], ANSWER, "#include <limits.h>\n").splitlines()
    if not told or not all(line.startswith("#define ") for line in told):
        raise CompilerError(f"no C compiler: {command[0]} is something else (gcc, or what CC names)")
    return told


def _run(command: list[str], seconds: float, given: str = "", **environment: str) -> str:
    """What a command prints. When its time is over, or at a Ctrl-C, it ends, and so does all that it began."""
    env, pipe = os.environ | {"LC_ALL": "C"} | environment, subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True) as process:
        try:
            out, errors = (told.decode(errors="replace") for told in process.communicate(given.encode(), seconds))
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CompilerError(f"the C compiler failed: {command[0]} took more than {seconds:g} s") from None
            raise
    if process.returncode:
        lines = [f"{command[0]} ended with status {process.returncode}", *filter(str.strip, errors.splitlines())]
        first = next((line for line in lines if re.search("error: |undefined reference|cannot find", line)), lines[-1])
        raise CompilerError(f"the C compiler failed: {first.split('error: ')[-1].strip()}")
    return out


# ---- The folder ---------------------------------------------------------------------------------------------------

def _folders() -> Iterator[Path]:
    """Where libraries may be kept, the best first."""
    caches = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")
    yield from [Path(cache, "llama-native") for cache in caches if os.path.isabs(cache)][:1]
    yield Path(tempfile.gettempdir(), f"llama-native-{os.geteuid()}")


def _claim(folder: Path) -> None:
    """It is there, and nobody else writes in it."""
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
        with open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            found, content = os.fstat(file.fileno()), file.read()
    except OSError:
        return None
    own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return content[:-32] if own and content[-32:] == _seal(path, content[:-32]) else None


def _seal(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + content).digest()


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One process at a time; but nobody waits for ever, or where there are no locks."""
    import fcntl                                        # not everywhere
    with open(folder / "lock", "ab") as file:
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield


def _made(path: Path, source: str, command: list[str], flags: Sequence[str], linked: Sequence[str]) -> bytes:
    """The library, compiled and kept, unless somebody had it ready before it was our turn."""
    with _turn(path.parent):
        if content := _kept(path):
            return content
        for old in path.parent.glob("building-*"):
            with suppress(OSError):
                if time.time() - old.stat().st_mtime > STALE:
                    shutil.rmtree(old)
        with tempfile.TemporaryDirectory(prefix="building-", dir=path.parent) as scratch:
            with tempfile.TemporaryFile(dir=scratch) as room:
                os.posix_fallocate(room.fileno(), 0, ROOM)      # a full disk says so here, not in a compiler's words
            code, thing, made, sealed = (Path(scratch, f"library.{kind}") for kind in ("c", "o", "so", "sealed"))
            code.write_text(source, encoding="utf-8")
            _run([*command, *flags, "-fPIC", "-c", str(code), "-o", str(thing)], LIMIT, TMPDIR=scratch)
            # Without the flags: -fopenmp would add an OpenMP of the compiler's choice. "defs": what is missing says so.
            _run([*command, "-shared", "-Wl,-z,defs", str(thing), *linked, "-o", str(made)], LIMIT, TMPDIR=scratch)
            if not made.exists():
                raise CompilerError(f"the C compiler failed: {command[0]} wrote nothing")
            content = made.read_bytes()
            sealed.touch(mode=0o600)
            sealed.write_bytes(content + _seal(path, content))
            os.replace(sealed, path)
            return content


def _loaded(content: bytes) -> ctypes.CDLL:
    memory = os.memfd_create("library")                 # never closed: what is loaded is known by this number
    with open(memory, "wb", closefd=False) as file:
        file.write(content)
    return ctypes.CDLL(f"/proc/self/fd/{memory}")
