"""Exit status and streams of a program. A user's mistake is reported in one line, never as a
traceback.

    0     done
    1     done, except for mistakes reported on the way (a bad line of `--prompts`); or a bug, with
          its traceback
    2     a user's mistake: a `UserError`, a file's OSError, or too little memory
    130   Ctrl-C (SIGINT);  143: SIGTERM;  129: SIGHUP, when the terminal closes. They are raised
          as exceptions, so results are printed before the program ends

Results go to standard output, and all messages go to standard error. Any other exception, including
a ValueError from PyTorch or Python, is a bug and keeps its traceback.
"""

import argparse
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from errors import UserError, brief, nearest

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "size calculation overflowed")
MAX_MESSAGE = 1000  # characters
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: like Ctrl-C, but the program always ends."""

    def __init__(self, number: int = signal.SIGTERM):
        self.number = number


# ---- Streams -----------------------------------------------------------------------------------


def begin() -> None:
    """A program calls this before its slow imports. Until they are done, a signal ends it
    silently."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.stdout is None:
        sys.exit(refuse("standard output is closed: open it, or send it to /dev/null"))
    sys.stdin = sys.stdin or nowhere()
    sys.stderr = sys.stderr or nowhere()
    sys.stdout.reconfigure(errors="replace")
    warnings.showwarning = show_warning


def say(message: str) -> None:
    """Print to standard error. If that fails, the program continues."""
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = nowhere()


def show_warning(message: Warning | str, *details: Any) -> None:
    """Show a warning as one line."""
    say(f"note: {message}")


def write(text: str) -> None:
    """Write to standard output and flush it."""
    try:
        print(text, end="", flush=True)
    except OSError as error:  # EPIPE makes OSError a BrokenPipeError
        raise OSError(error.errno, error.strerror, "standard output") from None


def nowhere() -> IO[str]:
    """A stream to use instead of one that is closed or that fails."""
    return open(os.devnull, "r+", encoding="utf-8")


# ---- Mistakes and exit status ------------------------------------------------------------------


def refuse(message: str) -> int:
    """Print an error -> the exit status."""
    say(f"error: {brief(message, MAX_MESSAGE)}")
    return 2


def is_launched() -> bool:
    """Whether PyTorch's torchrun has started this process (launch.py)."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def interruption(number: int) -> KeyboardInterrupt:
    """A signal as an exception. Of several processes all end, so nothing goes on after Ctrl-C."""
    is_ctrl_c = number == signal.SIGINT and not is_launched()
    return KeyboardInterrupt() if is_ctrl_c else Terminated(number)


def raise_signal(number: int, frame: Any) -> NoReturn:
    """A signal handler."""
    raise interruption(number)


@contextmanager
def handled(signals: Sequence[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle these signals in the block, except those that the program's parent has set to be
    ignored."""
    heard = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def noted_signals(tell: Callable[[], Any] = lambda: None) -> Iterator[list[int]]:
    """In this block the first signal only goes into the list, and `tell` is called. A second one
    ends the program at once."""
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        if noted:
            os._exit(128 + number)
        noted.append(number)
        tell()

    with handled(SIGNALS, note):
        yield noted


@contextmanager
def waiting_signals() -> Iterator[None]:
    """A signal waits for the end of the block."""
    with noted_signals() as noted:
        yield
    for number in noted:
        raise interruption(number)


def status(
    run: Callable[[], int | None], *, interrupted: str = "", signals: Sequence[int] = SIGNALS
) -> int:
    """Call `run` -> the exit status. After a signal, print the message `interrupted`."""
    try:
        with handled(signals, raise_signal):
            code = run() or 0
            write("")  # flush now, while an error can still be reported
            return code
    except BrokenPipeError:  # the reader has closed the pipe
        return 0
    except (UserError, OSError) as error:
        return refuse(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return refuse(
            "there is too little memory: use a smaller model or lower precision (--bits 8), "
            "shorter texts, or fewer of them"
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
            sys.stdout = nowhere()


def is_out_of_memory(error: Exception) -> bool:
    """Only a GPU raises torch.OutOfMemoryError. On a CPU, PyTorch raises a RuntimeError."""
    if isinstance(error, MemoryError):
        return True
    return any(words in str(error) for words in OUT_OF_MEMORY)


# ---- Flags and files ---------------------------------------------------------------------------


def flag(name: str) -> str:
    """The flag whose value argparse stores under this name."""
    return f"--{name.replace('_', '-')}"


def number_or_word(text: str) -> float | str:
    """The value of a flag that takes a number or a word. The setting's rule refuses wrong
    values."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def version() -> str:
    """The project's version."""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^version = "(.+)"$', text, re.MULTILINE)[1]


class Parser(argparse.ArgumentParser):
    """Reports mistakes in one line, and does not accept abbreviated flags. examples: text that the
    help shows after the flags."""

    def __init__(self, prog: str, description: str, examples: str = ""):
        super().__init__(
            prog=prog,
            description=description,
            epilog=examples,
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=30),
            allow_abbrev=False,
        )
        self.add_argument("--version", action="version", version=version())

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self.explain(parsed, unknown))
        return parsed

    def explain(self, parsed: argparse.Namespace, unknown: list[str]) -> str:
        """Explain what is wrong with these words: a mistyped flag, or a prompt without quotes."""
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

    def empty(self, args: argparse.Namespace) -> None:
        """Refuse flags with an empty value, such as "$MODEL" if that variable is not set."""
        for name, value in vars(args).items():
            if value == "":
                self.error(f"{flag(name)} is empty: give a value, or leave it out")

    def unused(self, args: argparse.Namespace, names: str, why: str) -> None:
        """Refuse flags with these names where they would have no effect."""
        for name in names.split():
            if getattr(args, name) != self.get_default(name):
                self.error(f"{flag(name)} has no effect {why}: leave it out")


def check_folder(path: Path) -> None:
    """UserError if the folder cannot be created or written to. Changes nothing."""
    path = path.resolve()
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(
            f"{path} is not a folder, or cannot be written to: name one that you can write to"
        )
