"""A library is compiled once, for what it depends on, in a folder of its own, all of it or
nothing."""

import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cpu import compiled

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or shutil.which("gcc") is None, reason="no gcc here"
)
SOURCE = "int more(int x) { return x + MORE; }"
PROGRAM = f"""
import compiled
try:
    print(compiled.compile_library([{SOURCE!r}], ("-O0", "-DMORE=1")).more(1))
except OSError as error:
    print(error)
"""
FRESH = dict(cwd=Path(compiled.__file__).parent, stdout=subprocess.PIPE, text=True)


def more(n: int = 1, *linked: str) -> int:
    """What a library of one function makes of 0."""
    return compiled.compile_library([SOURCE], ("-O0", f"-DMORE={n}"), linked).more(0)


def reason(source: str = SOURCE) -> str:
    """Why there is no library: one line."""
    with pytest.raises(OSError) as error:
        compiled.compile_library([source], ("-O0", "-DMORE=1"))
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder; nothing of the user's is touched."""
    for name in ("CC", "LLAMA_MARCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llama-native"


def test_a_library_is_compiled_once_and_for_what_it_depends_on(folder, monkeypatch):
    assert more() == 1
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "run_compiler", None)
        assert more() == 1 and len(files(folder)) == 1
    changes = [
        lambda: None,
        lambda: monkeypatch.setenv("CC", "env WITH=arguments gcc"),
        lambda: monkeypatch.setenv("LLAMA_MARCH", "x86-64"),
        lambda: monkeypatch.setattr(compiled, "cpu_features", lambda: "flags: another CPU"),
    ]
    for count, change in enumerate(changes[: 4 if platform.machine() == "x86_64" else 2], 2):
        change()
        assert more(2) == 2 and len(files(folder)) == count
    assert more(2, "-lm") == 2 and len(files(folder)) == count + 1
    assert compiled.cpu_features()


def test_a_march_is_the_one_that_is_asked_for(monkeypatch):
    if platform.machine() != "x86_64":
        pytest.skip("x86-64's names")
    monkeypatch.setenv("LLAMA_MARCH", "x86-64")
    source = "#ifdef __AVX__\n#error AVX\n#endif\nint one(void) { return 1; }"
    assert compiled.compile_library([source]).one() == 1


@pytest.mark.parametrize(
    "machine, system, features, march",
    [
        ("x86_64", "Linux", "flags : fpu avx2", "native"),
        ("aarch64", "Linux", "Features : fp asimd cpuid", "armv8-a"),  # Raspberry Pi 4
        ("aarch64", "Linux", "Features : fp asimd asimddp sve i8mm", "armv8.2-a+dotprod"),
        ("arm64", "Darwin", "", "armv8.2-a+dotprod"),
    ],
)
def test_on_arm_features_are_named(machine, system, features, march, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(compiled, "cpu_features", lambda: features)
    assert compiled.this_cpu() == march


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for nowhere in (tmp_path / "file", "/proc"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere))
        assert str(nowhere) in reason()
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert more() == 1 and len(files(tmp_path / ".cache" / "llama-native")) == 1
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)  # of nobody
    assert reason() == "this user has no home folder: set XDG_CACHE_HOME"


COMPILERS = {
    "/no/such/compiler": (
        "no C compiler: there is no /no/such/compiler (install it, or set CC to another)"
    ),
    "false": "the C compiler failed: false ended with status 1",
    "true": "No such file",
    "gcc --no-such-flag": "the C compiler failed: unrecognized command-line option",
}
SOURCES = {
    "int f(": "the C compiler failed: expected",
    '#error "not this"': "not this",
    "#include <no/such.h>": "no/such.h: No such file",
    "int g(void); int f(void) { return g(); }": "the C compiler failed: ",
}


def test_what_does_not_compile_is_one_line_and_leaves_nothing(folder, monkeypatch):
    for source, why in SOURCES.items():
        assert why in reason(source) and not files(folder)
    for compiler, why in COMPILERS.items():
        monkeypatch.setenv("CC", compiler)
        assert why in reason() and not files(folder)
    monkeypatch.setenv("CC", " ")  # a blank name is none
    assert more() == 1


def test_a_library_that_cannot_be_loaded_is_compiled_again(folder):
    assert more() == 1
    (library,) = files(folder)
    whole = library.read_bytes()
    for damaged in (b"", bytes(len(whole))):  # zeros: as after a power cut
        library.unlink()
        library.write_bytes(damaged)
        again = subprocess.run([sys.executable, "-c", PROGRAM], **FRESH)
        assert again.stdout == "2\n" and again.returncode == 0
        assert files(folder) == [library] and library.read_bytes() == whole


def compiler(path: Path, script: str) -> str:
    """A command that runs this script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


def test_sources_are_compiled_side_by_side(tmp_path, monkeypatch):
    """Here a compiler waits until another one has begun."""
    begun = tmp_path / "begun"
    script = f"""echo one >> {begun}
for i in $(seq 1000); do [ $(wc -l < {begun}) -gt 1 ] && exec gcc "$@"; sleep 0.01; done; exit 1"""
    monkeypatch.setenv("CC", compiler(tmp_path / "waiting", script))
    sources = [
        "int two(void); int more(int x) { return x + two(); }",
        "int two(void) { return 2; }",
    ]
    assert compiled.compile_library(sources, ["-O0"]).more(1) == 3


def test_processes_that_begin_at_once_leave_one_library_or_none(folder, tmp_path, monkeypatch):
    """None where there is no room: no half of a file either. Later there is."""
    for room in ("1", "unlimited"):
        script = f'ulimit -f {room}; exec gcc "$@"'
        monkeypatch.setenv("CC", compiler(tmp_path / "narrow", script))
        processes = [subprocess.Popen([sys.executable, "-c", PROGRAM], **FRESH) for _ in range(3)]
        printed = [process.communicate()[0] for process in processes]
        if room == "unlimited":
            assert printed == ["2\n"] * 3 and len(files(folder)) == 1
        else:
            assert not files(folder)
            for text in printed:
                assert text.startswith("the C compiler failed: ") and len(text.splitlines()) == 1
