"""What may be wrong where C is compiled: the compiler, the folder, what lies there, who else is at it, or ended."""

import fcntl
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest

from conftest import heard
from cpu import compiled

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or shutil.which("gcc") is None, reason="no gcc here"
)
SOURCE = "int more(int x) { return x + MORE; }"
HERE = Path(compiled.__file__).parent  # a module there, without its package, which imports PyTorch
PROGRAM = (
    f"import compiled; print(compiled.compile_library({SOURCE!r}, ['-O0', '-DMORE=1']).more(1))"
)


def more(n: int = 1, *linked: str) -> int:
    """What a library of two lines makes of 0."""
    return compiled.compile_library(SOURCE, ("-O0", f"-DMORE={n}"), linked).more(0)


def reason() -> str:
    """Why there is none: one line."""
    with pytest.raises(OSError) as error:
        more()
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def script(path: Path, compiling: str) -> str:
    """A compiler that does something else, or before, when it is to compile or to link; as CC names it."""
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "* | *" -shared "*) {compiling};; esac\nexec gcc "$@"\n'
    )
    os.chmod(path, 0o755)  # (beside another test, in which Path.chmod does nothing)
    return shlex.quote(str(path))


def kept(folder: Path) -> list[Path]:
    """All but the lock."""
    return sorted(path for path in folder.glob("*") if path.name != "lock")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries are kept; nothing of the user's is asked or touched."""
    for name in ("CC", "LLAMA_MARCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "cache" / "llama-native"


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is not asked twice for the same, where it is not what is tested."""
    asked, known = compiled._run, {}

    def run(command: list[str], seconds: float, given: str = "", **environment: str) -> str:
        path = Path(command[-1]) if command[-2] == "-o" else None
        words = command[:-1] if path else command
        key = (given, *(Path(word).read_bytes() if word.endswith(".o") else word for word in words))
        if key not in known:
            told = asked(command, seconds, given, **environment)
            known[key] = told, path and path.read_bytes()
        told, content = known[key]
        if path:
            path.write_bytes(content)
        return told

    monkeypatch.setattr(compiled, "_run", run)


def test_it_is_compiled_once_and_for_what_it_depends_on(folder, tmp_path, monkeypatch):
    before = os.umask(0o022)
    try:
        assert more() == 1
    finally:
        os.umask(before)
    (first,) = kept(folder)
    assert (
        stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(first.stat().st_mode) == 0o600
    )
    monkeypatch.setattr(compiled, "_made", mock.Mock(side_effect=compiled._made))
    assert more() == 1 and not compiled._made.called
    assert (
        str(folder) not in Path("/proc/self/maps").read_text()
    )  # a folder without execution would do
    same, compiler, asked = (
        nullcontext(),
        mock.patch.dict(os.environ, CC="env WITH=arguments gcc"),
        compiled._macros,
    )
    newer = mock.patch.object(
        compiled, "_macros", lambda command: [*asked(command), "#define NEWER 1"]
    )
    cpu = [mock.patch.dict(os.environ, LLAMA_MARCH="x86-64")] * (platform.machine() == "x86_64")
    for n, linked, changed in (
        (2, (), same),
        (2, ("-lm",), same),
        *((1, (), new) for new in (compiler, newer, *cpu)),
    ):
        before = len(kept(folder))
        with changed:
            assert more(n, *linked) == n and len(kept(folder)) == before + 1


def damage(other: bytes, outside: Path) -> list[Callable[[Path], object]]:
    """All that may have happened to a file that was kept."""
    cut = [lambda path, n=n: os.truncate(path, n) for n in (0, 20, 5000)]
    other_bytes = [
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
        lambda path: path.write_bytes(other),
        lambda path: path.write_bytes(b"?" + path.read_bytes()[1:]),
    ]
    others = [
        lambda path: path.chmod(0o620),
        lambda path: path.chmod(0o602),
        lambda path: os.geteuid() or os.chown(path, 12345, -1),
    ]
    no_file = [
        lambda path: (path.rename(outside), path.symlink_to(outside)),
        lambda path: (path.unlink(), os.mkfifo(path)),
    ]
    return [*cut, *other_bytes, *others, *no_file]


def test_what_is_not_whole_or_not_ours_is_compiled_anew(folder, tmp_path, remembered):
    assert more(2) == 2
    other = kept(folder)[0]
    assert more(1) == 1
    (path,) = set(kept(folder)) - {other}
    whole = path.read_bytes()
    for harm in damage(other.read_bytes(), tmp_path / "outside"):
        harm(path)
        assert more(1) == 1 and path.read_bytes() == whole and not path.is_symlink()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_uid == os.geteuid()
        assert len(kept(folder)) == 2
    path.unlink()
    path.mkdir()  # nothing can be put in its place
    assert more(1) == 1 and len(kept(tmp_path / "tmp" / f"llama-native-{os.geteuid()}")) == 1


def test_a_folder_is_nobody_elses_or_another_is_taken(folder, tmp_path, remembered, monkeypatch):
    beside, elsewhere = tmp_path / "tmp" / f"llama-native-{os.geteuid()}", tmp_path / "elsewhere"
    asked, home = os.posix_fallocate, tmp_path / "home" / ".cache" / "llama-native"
    elsewhere.mkdir()
    (tmp_path / "file").touch()

    def taken() -> Path:
        """The one folder of the three in which something was kept."""
        assert more() == 1
        (found,) = [path for path in (folder, home, beside) if kept(path)]
        shutil.rmtree(found)
        return found

    folder.mkdir(mode=0o777, parents=True)
    folder.chmod(0o777)
    with mock.patch.object(Path, "chmod"):  # which some file systems ignore
        assert taken() == beside
    assert (
        compiled._claim(folder) is None
        and stat.S_IMODE(folder.stat().st_mode) == 0o700
        and taken() == folder
    )
    folder.symlink_to(elsewhere)
    assert taken() == beside and not kept(elsewhere)
    for cache in (tmp_path / "file", "/proc", "/dev/null/x"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        assert taken() == beside
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(elsewhere)
    for cache in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert taken() == home and not kept(elsewhere)
    for none in ("/proc/none", "relative"):
        monkeypatch.setenv("HOME", none)
        assert taken() == beside and not kept(elsewhere)

    def full(descriptor: int, *room: int) -> None:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(beside)):
            raise OSError(28, "No space left on device")
        asked(descriptor, *room)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder.unlink()
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert taken() == beside and not kept(folder)
    beside.touch()
    assert (
        reason()
        == f"there is no place for a library: {folder}: No space left on device; {beside}: File exists"
    )


@pytest.mark.parametrize(
    "CC, told",
    [
        (
            "/no/such/compiler",
            "no C compiler: there is no /no/such/compiler (gcc, or what CC names)",
        ),
        ("gcc '", 'no C compiler: CC is "gcc \'" (No closing quotation)'),
        ("/usr", "no C compiler: there is no /usr"),
        ("true", "no C compiler: true is something else"),
        ("echo", "no C compiler: echo is something else"),
        ("false", "the C compiler failed: false ended with status 1"),
        ("gcc --no-such-flag", "the C compiler failed: unrecognized command-line option"),
    ],
)
def test_what_is_no_compiler_is_the_reason(CC, told, folder, monkeypatch):
    monkeypatch.setenv("CC", CC)
    assert reason().startswith(told) and not kept(folder)


@pytest.mark.parametrize(
    "compiling, told",
    [
        ("exit 0", "wrote nothing"),
        ("kill -9 $$", "ended with status -9"),
        ("echo >&2; exit 3", "ended with status 3"),
        ("echo error: $LC_ALL >&2; exit 1", "failed: C"),
    ],
)
def test_a_compiler_that_does_not_compile_is_the_reason(
    compiling, told, folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("CC", script(tmp_path / "compiler", compiling))
    assert (
        reason().startswith("the C compiler failed: ")
        and reason().endswith(told)
        and not kept(folder)
    )


def test_a_blank_name_is_no_name(monkeypatch):
    monkeypatch.setenv("CC", " ")
    assert more() == 1


@pytest.mark.parametrize(
    "source, told",
    [
        ("int f(", "expected"),
        ('#error "not this"', "not this"),
        ("#include <no/such.h>", "no/such.h: No such file"),
        ("int g(void); int f(void) { return g(); }", "undefined reference to `g'"),
    ],
)
def test_what_does_not_compile_says_why(source, told, folder):
    with pytest.raises(compiled.CompilerError, match=told) as error:
        compiled.compile_library(source, ("-O0",))
    assert str(error.value).startswith("the C compiler failed: ") and not kept(folder)


def gone(pid: int) -> bool:
    """Whether a process ends within a few seconds."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_a_compiler_that_hangs_ends_with_all_that_it_began(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "LIMIT", 0.3)
    monkeypatch.setenv(
        "CC", script(tmp_path / "compiler", f"sleep 60 & echo $! > {tmp_path / 'pid'}; wait")
    )
    assert reason().endswith("compiler took more than 0.3 s")
    assert gone(int((tmp_path / "pid").read_text())) and not kept(folder)
    (tmp_path / "compiler").write_text("#!/bin/sh\nsleep 60\n")  # not even a name
    monkeypatch.setattr(compiled, "ANSWER", 0.1)
    assert reason().endswith("compiler took more than 0.1 s")


def test_a_march_is_one_that_this_cpu_can_run(monkeypatch):
    if platform.machine() != "x86_64":
        pytest.skip("x86-64's names")
    monkeypatch.setenv("LLAMA_MARCH", "x86-64")
    macros = compiled.compile_library(
        "int avx(void) {\n#ifdef __AVX__\nreturn 1;\n#else\nreturn 0;\n#endif\n}"
    )
    assert macros.avx() == 0
    beyond = ["#define __AVX999__ 1", "#define __SGX__ 1"]  # the last is nothing that C becomes
    monkeypatch.setattr(
        compiled, "_macros", lambda command: ["#define __SSE__ 1"] + beyond * ("64" in command[-1])
    )
    assert reason() == "this CPU cannot run LLAMA_MARCH=x86-64: it has no AVX999"
    monkeypatch.undo()
    monkeypatch.setenv("LLAMA_MARCH", "no-such-cpu")
    assert reason().startswith("the C compiler failed: ")  # in the compiler's own words


def test_nobody_waits_for_ever(folder, monkeypatch):
    monkeypatch.setattr(compiled, "LIMIT", 0.5)
    with mock.patch.object(fcntl, "flock", side_effect=OSError(37, "No locks available")):
        assert more(1) == 1
    with open(folder / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert more(1) == 1 and more(2) == 2


# ---- Several processes --------------------------------------------------------------------------------------------


def begin(place: Path, compiler: str) -> "subprocess.Popen[str]":
    environment = os.environ | {
        "XDG_CACHE_HOME": str(place),
        "TMPDIR": str(place),
        "CC": compiler,
        "LLAMA_MARCH": "",
    }
    command, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
    return subprocess.Popen(
        command, cwd=HERE, env=environment, stdout=pipe, stderr=pipe, text=True, preexec_fn=heard
    )


def at_once(n: int) -> tuple[list[tuple[str, str]], int, int]:
    """What n processes say that start at once, how often they compiled or linked, and how many files that left."""
    with tempfile.TemporaryDirectory() as place:
        compiler = script(Path(place, "compiler"), f"echo once >> {place}/log; sleep 0.1")
        said = [
            process.communicate() for process in [begin(Path(place), compiler) for _ in range(n)]
        ]
        return (
            said,
            len(Path(place, "log").read_text().split()),
            len(kept(Path(place, "llama-native"))),
        )


@pytest.mark.meanwhile(at_once, 5)
def test_of_five_at_once_one_compiles(meanwhile):
    assert meanwhile() == ([("2\n", "")] * 5, 2, 1)


def ended(by: int) -> tuple[int, bool, list[str], list[str]]:
    """A process that is ended while it compiles: its status, whether its compiler went with it, what it left, and what
    of that the next one left, an hour later."""
    with tempfile.TemporaryDirectory() as place:
        pid, folder = Path(place, "pid"), Path(place, "llama-native")
        slow = (
            f"touch $TMPDIR/temporary; echo $$ > {place}/new; mv {place}/new {pid}; exec sleep 60"
        )
        process = begin(Path(place), script(Path(place, "compiler"), slow))
        while process.poll() is None and not pid.exists():
            time.sleep(0.01)
        process.send_signal(by)
        process.wait()
        with_it = by == signal.SIGINT and gone(int(pid.read_text()))
        if not with_it:
            os.killpg(int(pid.read_text()), signal.SIGKILL)
        left = [path.name[:9] for path in kept(folder)]
        for path in folder.glob("building-*"):
            os.utime(path, (0, 0))
        assert (
            begin(Path(place), "gcc").communicate() == ("2\n", "")
            and not Path(place, "temporary").exists()
        )
        return (
            process.returncode,
            with_it,
            left,
            [path.name[:9] for path in folder.glob("building-*")],
        )


@pytest.mark.meanwhile(ended, signal.SIGINT)
def test_after_an_interrupt_nothing_is_left(meanwhile):
    assert meanwhile() == (-signal.SIGINT, True, [], [])


@pytest.mark.meanwhile(ended, signal.SIGKILL)
def test_after_a_kill_the_next_compiles_and_some_day_tidies(meanwhile):
    assert meanwhile() == (-signal.SIGKILL, False, ["building-"], [])
