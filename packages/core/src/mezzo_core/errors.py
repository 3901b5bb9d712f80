"""The one exception whose message is meant for the person at the keyboard."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """Something that the user gave cannot be used; the message says what, and what can be.

    Command lines print the message alone, without a traceback, and exit with code 2.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean a, b?" with the known names most like `name`, or all if few."""
    names = list(known)
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    if not close and 0 < len(names) <= 12:
        return f"; there are {', '.join(names)}"
    close = close or get_close_matches(name, names, n=3, cutoff=0.0)
    return f"; did you mean {', '.join(close)}?" if close else ""
