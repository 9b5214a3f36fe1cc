"""What a program owes a shell: one line for what went wrong, and a status that says so.

    0      done
    1      done, but for what is named on the way (a bad line of `--prompts`)
    2      the user asked for what cannot be: `error: ` with the value, the rule and the way out, on standard error
    130    Ctrl-C (SIGINT); 143: SIGTERM. What there is stays

What is asked of standard output is all that goes there; everything else is said on standard error. Whatever is no
user's mistake keeps its traceback. What goes to a file is there whole, or what was there before still is.

A signal ends a program at once, without a word, from `begin` on; while `status` runs it, it is an exception, so that
what there is can be kept; and after that at once again.
"""
import argparse
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|size calculation overflowed")      # PyTorch's words
MEMORY = "memory does not hold this: use a smaller model or fewer bits (--dtype bfloat16), shorter texts, or fewer"
LONGEST = 1000                                          # characters of a message


class Terminated(KeyboardInterrupt):
    """SIGTERM: like Ctrl-C, but nothing goes on after it."""


def begin(name: str) -> None:
    """A page calls this with its __name__ before it imports what takes its time; nothing happens but to a program.

    Standard input that is closed becomes empty, standard error unheard; standard output is refused.
    """
    if name != "__main__":
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    closed = sys.stdout is None
    for stream, way in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):      # each gets its own number: no file will
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.open(os.devnull, os.O_RDWR), way, encoding="utf-8"))
    if closed:
        sys.exit(refuse("standard output is closed, and what is made goes there: open it, or send it to /dev/null"))
    sys.stdout.reconfigure(errors="replace")


def _mute(stream: IO[str]) -> None:
    """What is written there goes nowhere from now on: also what Python still has of it, at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(message: str) -> None:
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:                                     # nobody listens: no reason to stop
        _mute(sys.stderr)


def write(text: str) -> None:
    """To standard output, at once."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


def line(message: str) -> str:
    """A message in one line that can be read: what steers a terminal spelled out, the middle of a long one left out."""
    text = " ".join(message.split())
    text = text if len(text) <= LONGEST else f"{text[:LONGEST // 2]} […] {text[-LONGEST // 2:]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def refuse(message: str) -> int:
    """Say what is wrong -> the status."""
    say(f"error: {line(message)}")
    return 2


class Parser(argparse.ArgumentParser):
    """Refuses in one line; a flag is written out."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        sys.exit(refuse(f"{message} (see --help)"))


def check_file(path: Path) -> None:
    """ValueError or OSError if no file can be written there. Nothing changes."""
    if path.exists() and not path.is_file():            # a device or a pipe would be replaced
        raise ValueError(f"{path} is not a file: name one, or a new one")
    if not path.parent.is_dir() or not os.access(path.resolve().parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: name a file in a folder that is there and yours")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A new file to write, which then takes the place of `path`: that holds all of it, or what it held."""
    check_file(path)
    path = path.resolve()                               # what a link leads to
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        yield (new := Path(folder, path.name))
        if not new.exists():
            raise OSError(f"{path} could not be written: is the disk full?")
        new.replace(path)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Inside, SIGINT raises KeyboardInterrupt and SIGTERM Terminated, unless they are ignored."""
    def stop(number: int, frame: Any) -> NoReturn:
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ():
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def status(run: Callable[[], int | None], *mistakes: type[Exception], interrupted: str = "") -> int:
    """Run it -> its own status, if it has one. ValueError, OSError and `mistakes` are a user's.

    interrupted: what to say after a signal.
    """
    try:
        with _stoppable():
            done = run() or 0
            write("")                                   # what is not written yet, while we can say so
            return done
    except BrokenPipeError:
        return 0                                        # whoever read the text has gone
    except (ValueError, OSError, *mistakes) as error:
        return refuse(str(error))
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        return refuse(MEMORY)
    except KeyboardInterrupt as stop:
        if interrupted:
            say(interrupted)
        return 143 if isinstance(stop, Terminated) else 130
    finally:
        with suppress(ValueError):                      # closed
            try:
                sys.stdout.flush()
            except OSError:
                _mute(sys.stdout)
