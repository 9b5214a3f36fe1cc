"""A user's mistake: one line that names the value, the rule and the fix, before anything changes.

`app/shell.py` turns a `UserError`, a file's OSError and a lack of memory into one line on standard
error and exit status 2. Any other exception, including ValueErrors of PyTorch and Python, is a bug
and keeps its traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """A request that cannot be carried out. The message says what to change. param: the setting or
    field at fault, if there is one."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class TooManyTokens(UserError):
    """A text has more tokens than fit. The rest of it may not have been read."""


def brief(value: object, limit: int = 400) -> str:
    """One printable line of at most about `limit` characters. The middle of a long text is left
    out."""
    text = str(value)
    if len(text) > 2 * limit:
        text = text[:limit] + text[-limit:]
    text = " ".join(text.split())
    if len(text) > limit:
        head = limit * 2 // 3
        tail = limit // 4
        beginning = text[:head]
        end = text[-tail:]
        text = f"{beginning} […] {end}"
    characters = []
    for character in text:
        if not character.isprintable():
            character = ascii(character)[1:-1]  # an escape sequence
        characters.append(character)
    return "".join(characters)


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that begins with this one or is most like it, if there is one."""
    known = [*known]
    begun = [other for other in known if other.startswith(name)]
    matches = begun or get_close_matches(name, known, n=1)
    if not matches:
        return ""
    return f" (did you mean {matches[0]}?)"


def check_names(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """UserError for an unknown name. The message lists the known ones."""
    known = [*known]
    for name in names:
        if name not in known:
            guess = nearest(name, known)
            raise UserError(f"{name!r} is no {what}{guess}: there are {', '.join(known)}")
