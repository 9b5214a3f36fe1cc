"""Exit status and streams of a program. A user's mistake is one line, never a traceback.

    0     done
    1     done, but for mistakes told on the way (a bad line of `--prompts`); or a bug's traceback
    2     a user's mistake: a `UserError`, an OSError of a file, or too little memory
    130   Ctrl-C (SIGINT);  143: SIGTERM;  129: SIGHUP, at the end of a terminal. All are
          exceptions, so results are printed before the end

Standard output carries results, standard error all messages. Every other exception, a ValueError of
PyTorch or Python too, is a bug and keeps its traceback.
"""

import argparse
import fcntl
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from errors import UserError, brief, nearest

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "size calculation overflowed")
MAX_MESSAGE = 1000  # characters
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: like Ctrl-C, but nothing goes on after it."""

    def __init__(self, number: int = signal.SIGTERM):
        self.number = number


# ---- Streams -----------------------------------------------------------------------------------


def begin() -> None:
    """Called by a program before slow imports: a signal now ends it silently."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.stdout is None:
        sys.exit(refuse("standard output is closed: open it, or send it to /dev/null"))
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    sys.stdout.reconfigure(errors="replace")
    warnings.showwarning = show_warning


def say(message: str) -> None:
    """To standard error; the program goes on if that fails."""
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def show_warning(message: Warning | str, *details: Any) -> None:
    """What Python shows of a warning: one line."""
    say(f"note: {message}")


def write(text: str) -> None:
    """To standard output, at once."""
    try:
        print(text, end="", flush=True)
    except OSError as error:  # EPIPE makes OSError a BrokenPipeError
        raise OSError(error.errno, error.strerror, "standard output") from None


def discard(stream: IO[str]) -> None:
    """Make a stream that fails /dev/null, which also takes the text in Python's buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# ---- Mistakes and exit status ------------------------------------------------------------------


def refuse(message: str) -> int:
    """Say what is wrong -> the status."""
    say(f"error: {brief(message, MAX_MESSAGE)}")
    return 2


def interruption(number: int) -> KeyboardInterrupt:
    """A signal as an exception."""
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)


def raise_signal(number: int, frame: Any) -> NoReturn:
    """A signal handler."""
    raise interruption(number)


@contextmanager
def handled(signals: Sequence[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle these signals in the block, but for those that the program's parent ignores."""
    heard = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def status(
    run: Callable[[], int | None],
    *,
    interrupted: str = "",
    handler: Callable[[int, Any], None] = raise_signal,
    signals: Sequence[int] = SIGNALS,
) -> int:
    """Run it -> the exit status. After a signal, say `interrupted`."""
    try:
        with handled(signals, handler):
            code = run() or 0
            write("")  # flush now, where an error can still be told
            return code
    except BrokenPipeError:  # the reader wants no more
        return 0
    except (UserError, OSError) as error:
        return refuse(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return refuse(
            "memory does not hold this: use a smaller model or fewer bits (--bits 8), "
            "shorter texts, or fewer"
        )
    except KeyboardInterrupt as error:
        if interrupted:
            say(interrupted)
        number = error.number if isinstance(error, Terminated) else signal.SIGINT
        return 128 + number
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            discard(sys.stdout)


def is_out_of_memory(error: Exception) -> bool:
    """torch.OutOfMemoryError is a GPU's only: on a CPU PyTorch raises a RuntimeError."""
    if isinstance(error, MemoryError):
        return True
    return any(words in str(error) for words in OUT_OF_MEMORY)


# ---- Flags and files ---------------------------------------------------------------------------


def flag(name: str) -> str:
    """The flag whose value argparse keeps under this name."""
    return f"--{name.replace('_', '-')}"


def number_or_word(text: str) -> float | str:
    """The value of a flag that takes a number or a word. Its own rule refuses what is wrong."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


class Help(argparse.RawDescriptionHelpFormatter):
    """Room for a flag and its value in one line with its help."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30)


class Parser(argparse.ArgumentParser):
    """Refuses in one line; no flag may be abbreviated. examples: lines after the flags."""

    def __init__(self, prog: str, description: str, examples: str = ""):
        super().__init__(
            prog=prog,
            description=description,
            epilog=examples,
            formatter_class=Help,
            allow_abbrev=False,
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self.explain(parsed, unknown))
        return parsed

    def explain(self, parsed: argparse.Namespace, unknown: list[str]) -> str:
        """What is wrong with these words: a mistyped flag, or a prompt without quotes."""
        message = f"unrecognized arguments: {' '.join(unknown)}"
        flags = [word for word in unknown if word.startswith("-")]
        if flags:
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            return message + nearest(flags[0].split("=")[0], known)
        prompt = getattr(parsed, "prompt", None)
        if prompt is None:
            return message
        whole = " ".join([prompt, *unknown])
        return f'{message}: put the prompt in quotes, "{whole}"'

    def error(self, message: str) -> NoReturn:
        sys.exit(refuse(f"{message} (see --help)"))

    def flags(self, args: argparse.Namespace) -> dict[str, str]:
        """The program, and the values of all its flags, as texts."""
        values = {"program": self.prog}
        for flag, action in self._option_string_actions.items():
            if hasattr(args, action.dest):
                values[flag] = str(getattr(args, action.dest))
        return values

    def empty(self, args: argparse.Namespace) -> None:
        """Refuse flags of no value, as "$MODEL" is where nobody has set it."""
        for name, value in vars(args).items():
            if value == "":
                self.error(f"{flag(name)} is empty: name one, or leave it out")

    def unused(self, args: argparse.Namespace, names: str, why: str) -> None:
        """Refuse the flags of these names, where they would do nothing."""
        for name in names.split():
            if getattr(args, name) != self.get_default(name):
                self.error(f"{flag(name)} has no use {why}: leave it out")


def check_folder(path: Path) -> None:
    """UserError if the folder can neither be made nor written to. Nothing changes."""
    path = path.resolve()
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(
            f"{path} is not a folder, or cannot be written: name one of yours, or a new one in it"
        )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder. UserError if another program holds it. (A file system without locks lets all
    in.)"""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(
            f"{folder} is written by another program now: wait for its end, or name another --out"
        ) from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(handle)
