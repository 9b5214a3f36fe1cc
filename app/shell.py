"""Exit status and streams of a program: a mistake is one line on standard error, never a traceback.

Status 0: done; 1: done, but for mistakes reported on the way (a bad line of `--prompts`); 2: a user's mistake, with the
value, the rule and the way out; 130: Ctrl-C (SIGINT); 143: SIGTERM, both as exceptions, so that results are kept.
Standard output carries results, standard error all messages. A bug keeps its traceback.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "size calculation overflowed",
)  # PyTorch's words
MEMORY = "memory does not hold this: use a smaller model or fewer bits (--bits 8), shorter texts, or fewer"
LONGEST = 1000  # characters of a message


class Terminated(KeyboardInterrupt):
    """SIGTERM: like Ctrl-C, but nothing goes on after it."""


def begin() -> None:
    """Called by a program before slow imports: a signal now ends it silently."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.stdout is None:
        sys.exit(
            refuse(
                "standard output is closed, and what is made goes there: open it, or send it to /dev/null"
            )
        )
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # closed: reads as empty,
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # and takes messages
    sys.stdout.reconfigure(errors="replace")


def _offer(stream: IO[str], text: str = "") -> None:
    """Write and flush. A stream that fails becomes /dev/null, which also takes the text in Python's buffer."""
    try:
        print(text, end="", file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(message: str) -> None:
    """To standard error; the program goes on if that fails."""
    _offer(sys.stderr, message + "\n")


def write(text: str) -> None:
    """To standard output, at once."""
    try:
        print(text, end="", flush=True)
    except OSError as error:  # EPIPE makes OSError a BrokenPipeError
        raise OSError(error.errno, error.strerror, "standard output") from None


def brief(said: object, limit: int = 400) -> str:
    """One printable line of about `limit` characters at most: the middle left out, control characters escaped."""
    text = str(said)
    text = " ".join((text if len(text) <= 2 * limit else text[:limit] + text[-limit:]).split())
    text = text if len(text) <= limit else f"{text[: limit * 2 // 3]} […] {text[-limit // 4 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def refuse(message: str) -> int:
    """Say what is wrong -> the status."""
    say(f"error: {brief(message, LONGEST)}")
    return 2


def number_or_word(text: str) -> int | str:
    """The value of a flag that takes a number or a word. Other words are refused where the value is used."""
    return int(text) if text.isdecimal() else text


class Parser(argparse.ArgumentParser):
    """Refuses in one line; no flag may be abbreviated."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        sys.exit(refuse(f"{message} (see --help)"))

    def unused(self, args: argparse.Namespace, names: str, why: str) -> None:
        """Refuse the flags of these names, where they would do nothing."""
        for name in names.split():
            if getattr(args, name) != self.get_default(name):
                self.error(f"--{name.replace('_', '-')} has no use {why}: leave it out")


def check_file(path: Path) -> None:
    """ValueError or OSError if no file can be written there. Nothing changes."""
    replaced = path.exists() and not path.is_file()  # a device or a pipe
    if replaced or not path.parent.is_dir() or not os.access(path.resolve().parent, os.W_OK):
        raise ValueError(
            f"{path} is not a file, or cannot be written: name one, or a new one, in a folder of yours"
        )


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A new file to write, which replaces `path` once it is complete; after an error `path` is as before."""
    check_file(path)
    path = path.resolve()  # a link stays, its target is replaced
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        yield (new := Path(folder, path.name))
        if not new.exists():
            raise OSError(f"{path} could not be written: is the disk full?")
        new.replace(path)


def status(run: Callable[[], int | None], *mistakes: type[Exception], interrupted: str = "") -> int:
    """Run it -> the exit status. ValueError, OSError and `mistakes` are a user's; after a signal, say `interrupted`."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    try:
        with ExitStack() as restore:
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    restore.callback(signal.signal, number, signal.signal(number, stop))
            done = run() or 0
            write("")  # flush now, where an error can still be reported
            return done
    except (ValueError, OSError, *mistakes) as error:  # a broken pipe: the reader wants no more
        return 0 if isinstance(error, BrokenPipeError) else refuse(str(error))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
            return refuse(MEMORY)
        raise
    except KeyboardInterrupt as signalled:
        if interrupted:
            say(interrupted)
        return 143 if isinstance(signalled, Terminated) else 130
    finally:
        _offer(sys.stdout)
