"""What the programs beside this one share: a check, which tells what holds."""

import sys


def require(holds: bool, what: str) -> None:
    print(("ok    " if holds else "WRONG ") + what, flush=True)
    if not holds:
        sys.exit(1)
