"""A user's mistake: one line that names the value, the rule and the way out, before any change.

`app/shell.py` turns a `UserError`, and an OSError of a file, into one line on standard error and
exit status 2. Every other exception, PyTorch's and Python's own ValueErrors too, is a bug and keeps
its traceback.
"""


class UserError(ValueError):
    """What somebody asked for cannot be done. The message says what to change."""


def brief(value: object, limit: int = 400) -> str:
    """One printable line of about `limit` characters at most: a long middle is left out."""
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
