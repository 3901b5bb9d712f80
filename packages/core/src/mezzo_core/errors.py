"""The one exception whose message is meant for the person at the keyboard."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """Something that the user gave cannot be used; the message says what, and what can be.

    Command lines print the message alone, without a traceback, and exit with code 2.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean a, b?" with the known names like `name`, or all of them if few."""
    names = list(known)
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; there are {', '.join(names)}" if names else ""
