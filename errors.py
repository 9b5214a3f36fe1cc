"""A user's mistake: one line that names the value, the rule and the way out, said before anything has changed.

`app/shell.py` turns a `UserError`, and nothing else, into one line on standard error and exit status 2. Every other
exception, PyTorch's and Python's own ValueErrors too, is a bug and keeps its traceback.
"""


class UserError(ValueError):
    """What somebody asked for cannot be done. The message says what to change."""


def brief(value: object, limit: int = 400) -> str:
    """One printable line of at most about `limit` characters: a long middle is left out, control characters escaped."""
    text = str(value)
    if len(text) > 2 * limit:
        text = text[:limit] + text[-limit:]
    text = " ".join(text.split())
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3]} […] {text[-limit // 4 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
