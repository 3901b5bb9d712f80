"""The one exception whose message is meant for the person at the keyboard."""

import re
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


# Control characters but line and tab, what turns the direction of writing, halves of pairs.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return a text that a terminal shows as it is: control characters are spelled out (\x1b).

    What comes from outside, a file's name or a model's output, could else move the cursor, or make
    the terminal run a command.
    """
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
