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
    sys.stdin = sys.stdin or nowhere()
    sys.stderr = sys.stderr or nowhere()
    sys.stdout.reconfigure(errors="replace")
    warnings.showwarning = show_warning


def say(message: str) -> None:
    """To standard error; the program goes on if that fails."""
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = nowhere()


def show_warning(message: Warning | str, *details: Any) -> None:
    """What Python shows of a warning: one line."""
    say(f"note: {message}")


def write(text: str) -> None:
    """To standard output, at once."""
    try:
        print(text, end="", flush=True)
    except OSError as error:  # EPIPE makes OSError a BrokenPipeError
        raise OSError(error.errno, error.strerror, "standard output") from None


def nowhere() -> IO[str]:
    """A stream in the place of one that is closed, or that fails."""
    return open(os.devnull, "r+", encoding="utf-8")


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
            sys.stdout = nowhere()


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


def version() -> str:
    """Of the project."""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^version = "(.+)"$', text, re.MULTILINE)[1]


class Parser(argparse.ArgumentParser):
    """Refuses in one line; no flag may be abbreviated. examples: lines after the flags."""

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
