"""The text in which needles are hidden, and rows of it that are never in memory as a whole."""

from typing import Any, NamedTuple

import numpy as np
from mezzo_core.data import NO_TARGET
from mezzo_core.data.stored_tokens import StoredTokens
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


class Haystack:
    """Endless text: ranges of a token array, repeated over and over."""

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
        """Return `count` tokens from place `start` on, counted over all repetitions."""
        places = (start + np.arange(count)) % self.num_tokens
        ranges = np.searchsorted(self._borders, places, side="right")
        return self._tokens[places + self._shifts[ranges]].astype(np.int64)


class Row(NamedTuple):
    """A row of T + 1 tokens: text, with parts inserted in it.

    It stores only the parts, and reads text when it is needed, so even a long row takes no memory.
    """

    text: Haystack
    start: int
    """The place in the text of the row's first token of text."""
    parts: tuple[tuple[int, Tokens], ...]
    """The place of each part in the row, and its tokens; in order, without overlap."""
    answer: range
    """The places of the answer's tokens in the row."""

    def tokens(self, begin: int, end: int) -> Tokens:
        """Return the tokens from place `begin` to `end` (exclusive)."""
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
        """Return inputs and targets of places `begin` to `end` (exclusive), (end - begin,) each.

        Only the answer's tokens are targets, each at the place before its own.
        """
        tokens = self.tokens(begin, end + 1)
        inputs, targets = tokens[:-1], tokens[1:].copy()
        places = np.arange(begin + 1, end + 1)
        is_asked = (places >= self.answer.start) & (places < self.answer.stop)
        targets[~is_asked] = NO_TARGET
        return inputs, targets
