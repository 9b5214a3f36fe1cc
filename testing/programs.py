"""Programs in processes of their own: started, refused, measured, typed at."""

import json
import os
import pty
import resource
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from testing.folders import write_model
from testing.pages import ROOT


def told(table: str) -> list[tuple[str, str]]:
    """The lines of a table: what is given → what is said about it."""
    lines = [line.strip() for line in table.strip().split("\n")]
    return [tuple(line.split(" → ")) for line in lines]


def check_refusals(
    main: Callable[[list[str]], int],
    table: str,
    capsys: pytest.CaptureFixture[str],
    lines: int = 1,
    **places: object,
) -> None:
    """The mistakes in a table of flags → what is said: each ends with the status 2, with nothing on
    standard output, and with this in the last of at most so many lines. {name} stands for a
    place."""
    for flags, says in told(table):
        capsys.readouterr()
        try:
            status = main(shlex.split(flags.format(**places)))
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        assert (status, out) == (2, "") and 1 <= err.count("\n") <= lines, (flags, err)
        last = err.splitlines()[-1]
        assert last.startswith("error: ") and says in last, (flags, err)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """In the block no file can have more bytes: as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def heard() -> None:
    """In the new process: Ctrl-C counts, though it is ignored here, as in a shell's background; and
    the terminal's end, which nohup ignores."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def program(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """python ARGUMENTS, on one thread."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


PEAK = """
import sys, torch
from model import Llama
from loading import Model
def kilobytes(key):
    lines = open("/proc/self/status").readlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))
torch.set_num_threads(1)
folder, before, measured = sys.argv[1:]
exec(before)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
start = kilobytes("VmRSS")
exec(measured)
print(1024 * (kilobytes("VmHWM") - start))
"""


def peak(shape: str, before: str, measured: str) -> int:
    """Bytes that a line of code takes at its peak, on top of what was there after `before`.

    Both may use `folder`, a random model of this shape (JSON).
    """
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), **json.loads(shape))
        done = program("-c", PEAK, folder, before, measured)
        assert done.returncode == 0, done.stderr
    return int(done.stdout)


class Terminal:
    """generate.py at a pseudo-terminal."""

    def __init__(self, *flags: object):
        self.controller, end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "generate.py", *map(str, flags)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"},
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
            preexec_fn=heard,
        )
        os.close(end)
        self.unread = ""

    def read_until(self, text: str, seconds: float = 40.0) -> str:
        """What appears, up to this text."""
        deadline = time.monotonic() + seconds
        while text not in self.unread:
            ready, _, _ = select.select([self.controller], [], [], deadline - time.monotonic())
            assert ready, f"{text!r} does not appear in {self.unread!r}"
            self.unread += os.read(self.controller, 4096).decode(errors="replace")
        seen, self.unread = self.unread.split(text, 1)
        return seen + text

    def type(self, text: str, until: str = "> ") -> str:
        """Type a line -> what appears after it, up to the next prompt."""
        os.write(self.controller, f"{text}\n".encode())
        self.read_until("\n")  # the echo
        return self.read_until(until)

    def end(self) -> int:
        os.write(self.controller, b"\x04")  # Ctrl-D
        code = self.process.wait(timeout=60)
        os.close(self.controller)
        return code
