"""What the synthetic tasks have in common: rows that MAD's seed determines, in batches.

Source of the six MAD tasks: Poli et al. 2024, arXiv 2403.17844. Rows are drawn from numpy's
generators in the order of its released code, so that they are the same rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mezzo_core.config_json import check_fields, check_rules
from mezzo_core.data import Rows, RowsData
from mezzo_core.errors import UserError

ROWS_SEED = 12345
"""MAD's own seed. The rows never depend on another one."""


class Draws(NamedTuple):
    """Where a task's random numbers come from."""

    new: np.random.Generator
    legacy: np.random.RandomState
    """MAD places the blanks of selective copying by numpy's legacy generator."""

    @classmethod
    def start(cls) -> "Draws":
        """Return both generators at their start."""
        return cls(np.random.default_rng(ROWS_SEED), np.random.RandomState(ROWS_SEED))

    def below(self, count: int) -> int:
        """Draw a whole number from 0 to below `count`."""
        return int(self.new.integers(count))


Row = tuple[list[int], list[int]]
"""The inputs and the targets of a row, equally many."""


@dataclass(frozen=True)
class AbstractTask(ABC):
    """A task as a source of data: rows to train on, and other rows to test on.

    Test rows are drawn after those to train on from the same generators, so they differ.

    Attributes:
        vocab_size: all tokens are below this number.
        seq_len: MAD's length of a row. The rows of some tasks have one token less: `num_tokens`.
        train_rows: drawn once, for all epochs.
        test_rows: the validation part.
        seed: of the order of the rows in each epoch; the rows themselves are always the same.

    Raises:
        UserError: if a field is of another type, or there can be no such rows.
    """

    vocab_size: int = 16
    seq_len: int = 128
    train_rows: int = 12_800
    test_rows: int = 1_280
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        counts = {
            "train_rows": (self.train_rows >= 1, "at least 1"),
            "test_rows": (self.test_rows >= 1, "at least 1"),
            "seed": (self.seed >= 0, "0 or more"),
        }
        check_rules(self, {**self.rules(), **counts})

    @property
    @abstractmethod
    def name(self) -> str:
        """MAD's name of the task."""

    @property
    def num_tokens(self) -> int:
        """T, the tokens of a row."""
        return self.seq_len

    @abstractmethod
    def rules(self) -> Mapping[str, tuple[bool, str]]:
        """Return, for fields with limits, whether these are met, and what is allowed."""

    @abstractmethod
    def rows(self, draws: Draws, *, is_test: bool) -> Iterator[Row]:
        """Yield rows without end, each drawn when it is asked for."""

    def build(
        self, seq_len: int, cache_dir: Path | None, *, rank: int = 0, world_size: int = 1
    ) -> RowsData:
        """Draw the rows, which every process holds in memory; `cache_dir` is not used.

        Raises:
            UserError: if `seq_len` is not the number of tokens of the task's rows.
        """
        if seq_len != self.num_tokens:
            raise UserError(f"seq_len must be that of the rows, {self.num_tokens}, got {seq_len}")
        train, test = _drawn(replace(self, seed=0))
        return RowsData(self.name, train, test, vocab_size=self.vocab_size, seed=self.seed)

    def draw(self, num_rows: int, draws: Draws, *, is_test: bool) -> Rows:
        """Draw some rows, to train on or to be tested on."""
        inputs = np.empty((num_rows, self.num_tokens), dtype=np.int64)
        targets = np.empty_like(inputs)
        rows = self.rows(draws, is_test=is_test)
        for i, row in zip(range(num_rows), rows, strict=False):
            inputs[i], targets[i] = row
        return Rows(inputs, targets)


@lru_cache(maxsize=2)  # the runs of a sweep have the same rows in orders of their own
def _drawn(task: AbstractTask) -> tuple[Rows, Rows]:
    draws = Draws.start()
    train = task.draw(task.train_rows, draws, is_test=False)
    return train, task.draw(task.test_rows, draws, is_test=True)
