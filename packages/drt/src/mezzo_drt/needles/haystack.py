"""The text in which needles are hidden, and rows of it that are never written out as a whole."""

from typing import Any, NamedTuple

import numpy as np
from mezzo_core.data import NO_TARGET
from mezzo_core.data.stored_tokens import StoredTokens
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


class Haystack:
    """Text without an end: some ranges of a token array, over and over."""

    def __init__(self, tokens: NDArray[Any] | StoredTokens, ranges: NDArray[np.int64]) -> None:
        """Lay the ranges end to end.

        Args:
            tokens: (num_tokens,), usually in a file.
            ranges: (num_documents, 2), begin and end in `tokens`; no range is empty.
        """
        begins, ends = ranges[:, 0], ranges[:, 1]
        self._tokens = tokens
        self._borders = np.cumsum(ends - begins)
        self._shifts = ends - self._borders
        self.num_tokens = int(self._borders[-1])

    def read(self, start: int, count: int) -> Tokens:
        """Return `count` tokens from place `start` on, which may be beyond the first round."""
        places = (start + np.arange(count)) % self.num_tokens
        ranges = np.searchsorted(self._borders, places, side="right")
        return self._tokens[places + self._shifts[ranges]].astype(np.int64)


class Row(NamedTuple):
    """A row of T + 1 tokens: text, and parts that stand between it.

    It holds its parts alone, and reads the text where it is asked for, so that a row of any length
    takes no memory.
    """

    text: Haystack
    start: int
    """The place in the text of the row's first token of text."""
    parts: tuple[tuple[int, Tokens], ...]
    """Places in the row and the tokens there: in order, none over another."""
    answer: range
    """The places of the answer's tokens in the row."""

    def tokens(self, begin: int, end: int) -> Tokens:
        """Return the tokens from place `begin` to before `end`."""
        pieces, place, inserted = [], begin, 0
        for first, part in self.parts:
            if first >= end:
                break
            if first > place:
                pieces.append(self.text.read(self.start + place - inserted, first - place))
                place = first
            if first + len(part) > place:
                pieces.append(part[place - first : end - first])
                place = min(first + len(part), end)
            inserted += len(part)
        if place < end:
            pieces.append(self.text.read(self.start + place - inserted, end - place))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def segment(self, begin: int, end: int) -> tuple[Tokens, Tokens]:
        """Return inputs and targets of places `begin` to before `end`, (end - begin,) each.

        The targets are the answer's tokens, each at the place before its own.
        """
        tokens = self.tokens(begin, end + 1)
        inputs, targets = tokens[:-1], tokens[1:].copy()
        places = np.arange(begin + 1, end + 1)
        is_asked = (places >= self.answer.start) & (places < self.answer.stop)
        targets[~is_asked] = NO_TARGET
        return inputs, targets
