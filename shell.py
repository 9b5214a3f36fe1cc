"""What a program owes a shell: one line for what went wrong, and a status that says so.

    0      done
    1      done, but for what is named on the way (a bad line of `--prompts`)
    2      the user asked for what cannot be: `error: ` with the value, the rule and the way out, on standard error
    130    Ctrl-C

What is asked of standard output is all that goes there; everything else is said on standard error. Whatever is no user's mistake keeps its
traceback.
"""
import argparse
import sys
from collections.abc import Callable
from typing import NoReturn


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def refuse(message: str) -> int:
    """Say what is wrong -> the status."""
    say(f"error: {' '.join(message.split())}")
    return 2


class Parser(argparse.ArgumentParser):
    """Refuses in one line; a flag is written out."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        sys.exit(refuse(f"{message} (see --help)"))


def status(run: Callable[[], int | None], *mistakes: type[Exception], interrupted: str = "") -> int:
    """Run it -> its own status, if it has one. ValueError, OSError and `mistakes` are a user's. interrupted: what to say after Ctrl-C."""
    try:
        return run() or 0
    except (ValueError, OSError, *mistakes) as error:
        return refuse(str(error))
    except KeyboardInterrupt:
        if interrupted:
            say(interrupted)
        return 130
