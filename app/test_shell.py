"""A mistake is one line on standard error and status 2; a bug keeps its traceback."""

import ast
import io
import os
import signal
import subprocess
import sys

import pytest
import torch

from app.shell import Parser, begin, handled, raise_signal, status, write
from errors import UserError
from testing.pages import PAGES, ROOT
from testing.programs import heard

PROGRAM = """
from app.shell import begin
begin()
import sys, time
from app.shell import say, status, write
def work():
    say("working")
    write("text so far\\n")
    sys.stdin.read()
    {work}
{before}
sys.exit(status(work, interrupted="stopped"))
"""


def raising(error: BaseException) -> None:
    raise error


def test_the_status_says_how_it_went(capsys):
    assert status(lambda: 3) == 3 and status(lambda: print("done")) == 0
    assert capsys.readouterr() == ("done\n", "")
    for error in (
        UserError("it is 3:\n  it must be 4"),
        FileNotFoundError(2, "No such file", "x"),
        RuntimeError("[enforce fail] can't allocate memory: you tried"),
        RuntimeError("Storage size calculation overflowed with sizes=[1000, 1000]"),
        torch.OutOfMemoryError("CUDA out of memory. Tried"),
        MemoryError(),
    ):
        assert status(lambda: raising(error)) == 2
        out, err = capsys.readouterr()
        assert not out and err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert status(lambda: raising(KeyboardInterrupt()), interrupted="stopped") == 130
    assert capsys.readouterr() == ("", "stopped\n")
    assert status(lambda: raising(KeyboardInterrupt())) == 130 and capsys.readouterr() == ("", "")
    for bug in (ValueError("x"), ZeroDivisionError(), RuntimeError("x"), KeyError("x")):
        with pytest.raises(type(bug)):
            status(lambda: raising(bug))


def test_what_the_parent_ignores_stays_ignored_and_any_text_can_be_shown(monkeypatch):
    """As in a shell's background, and where the locale is C."""
    stream = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(stream, "ascii"))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        begin()
        with handled([signal.SIGINT], raise_signal):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    write("größe")
    assert stream.getvalue() == b"gr??e"


def test_a_flag_that_is_not_there_is_one_line(capsys):
    parser = Parser("it.py", "Does it.")
    parser.add_argument("--count", type=int)
    assert parser.parse_args(["--count", "3"]).count == 3
    for flags in (["--count", "x"], ["--cou", "3"], ["more"]):
        with pytest.raises(SystemExit) as stop:
            parser.parse_args(flags)
        out, err = capsys.readouterr()
        assert (
            stop.value.code == 2
            and not out
            and err.startswith("error: ")
            and err.endswith("(see --help)\n")
        )
        assert err.count("\n") == 1


# ---- A program of its own, which imports nothing but this page


def started(redirect: str = "", before: str = "", work: str = "") -> subprocess.Popen[str]:
    """A small program, through a shell: PROGRAM, and where its streams go."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    source = PROGRAM.format(before=before, work=work)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        ["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, source],
        cwd=ROOT,
        env=buffered,
        encoding="utf-8",
        preexec_fn=heard,
        **pipes,
    )


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_program_without_a_traceback_whenever_it_comes(number, code):
    importing, working = started(before='say("working"); time.sleep(60)'), started()
    for process, told in ((importing, ""), (working, "stopped\n")):
        assert process.stderr.readline() == "working\n"
        if process is working:
            assert process.stdout.readline() == "text so far\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        # -number: 128 + number in a shell
        assert (out, err) == ("", told) and process.returncode == (
            -number if process is importing else code
        )


def test_every_program_begins_before_it_imports_what_takes_its_time():
    programs = {
        path: source
        for path in PAGES
        if "\n    sys.exit(main(" in (source := path.read_text(encoding="utf-8"))
    }
    assert "generate.py" in {path.name for path in programs}
    for path, source in programs.items():
        statements = ast.parse(source).body[1:]
        first = next(node for node in statements if getattr(node, "module", None) != "__future__")
        begun = "if __name__ == '__main__':\n    from app.shell import begin\n    begin()"
        assert ast.unparse(first).startswith(begun), path
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import app.shell, sys; print('torch' in sys.modules, 'numpy' in sys.modules)",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False False\n"


BAD_STREAMS = [  # where streams go; what the program does; status, output, messages
    ("<&-", "", 0, "text so far\n", "working\n"),
    ("2>&-", "", 0, "text so far\n", ""),
    ("2>/dev/full", "", 0, "text so far\n", ""),
    (
        ">&-",
        "",
        2,
        "",
        "error: standard output is closed: open it, or send it to /dev/null\n",
    ),
    (
        ">/dev/full",
        "",
        2,
        "",
        "working\nerror: [Errno 28] No space left on device: 'standard output'\n",
    ),
    (
        "",
        "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); print('late')",
        2,
        "text so far\n",
        "working\nerror: [Errno 28] No space left on device: 'standard output'\n",
    ),
    (
        "",
        "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1); print('late')",
        0,
        "text so far\n",
        "working\n",
    ),
    (
        "",
        "raise OSError('x' * 10**6 + chr(27) + chr(10) + chr(0xd800))",
        2,
        "text so far\n",
        f"working\nerror: {'x' * 666} […] {'x' * 247}\\x1b \\ud800\n",
    ),
]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_streams_that_are_closed_or_full_and_messages_that_are_not_fit_to_be_shown():
    running = [started(redirect, work=work) for redirect, work, *_ in BAD_STREAMS]
    for process, (redirect, work, code, out, err) in zip(running, BAD_STREAMS):
        assert process.communicate("", timeout=20) == (out, err), redirect or work
        assert process.returncode == code
