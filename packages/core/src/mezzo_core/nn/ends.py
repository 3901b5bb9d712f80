"""Decides where the continuation of each prompt ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mezzo_core.nn.sampler import NO_TOKEN

NO_NUMBERS = "the model's outputs are no numbers: its training diverged, or its weights are damaged"


@dataclass
class Ends:
    """Which rows go on, and their new tokens so far."""

    num_rows: int
    stop_tokens: frozenset[int]
    stop: Callable[[Sequence[int]], bool] | None

    def __post_init__(self) -> None:
        self.running = [True] * self.num_rows
        self.tokens: list[list[int]] = [[] for _ in range(self.num_rows)]

    def take(self, row: int, token: int) -> int | None:
        """Take the next token of a row; return it, or None if the row has ended.

        Raises:
            ValueError: if a row that goes on gets `NO_TOKEN`.
        """
        if not self.running[row]:
            return None
        if token == NO_TOKEN:
            raise ValueError(NO_NUMBERS)
        if token in self.stop_tokens:
            self.running[row] = False
            return None
        self.tokens[row].append(token)
        if self.stop is not None:
            self.running[row] = not self.stop(self.tokens[row])
        return token
