"""`UserError`, the exception whose message is meant for the user, and helpers for messages."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class UserError(ValueError):
    """The user gave something that cannot be used; the message says what, and what is allowed.

    Command lines print only the message, without a traceback, and exit with code 2.
    """


class FailedRunError(UserError):
    """A training diverged, or an op computed a wrong result, by no fault of the user.

    A report of many runs notes it and goes on.
    """


@contextmanager
def values_of_the_user() -> Iterator[None]:
    """Turn a ValueError into a `UserError`, where it can only be about an option's value."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the known names most similar to it.

    If none is similar and there are few known names, all of them are listed.
    """
    names = list(known)
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    if not close and 0 < len(names) <= 12:
        return f"; there are {', '.join(names)}"
    close = close or get_close_matches(name, names, n=3, cutoff=0.0)
    return f"; did you mean {', '.join(close)}?" if close else ""


# Control characters (except line feed and tab), changes of the writing direction, and surrogates.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return a text with control characters spelled out (\x1b), which is safe for a terminal.

    Otherwise a file's name or a model's output could move the cursor, or make the terminal run a
    command.
    """
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
