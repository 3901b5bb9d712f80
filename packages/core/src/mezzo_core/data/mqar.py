"""Multi-query associative recall: rows of key-value pairs, then questions about their values.

    position   0  1  2  3 ... 2P-2 2P-1 | 2P ... T-1
    input      k1 v1 k2 v2 ... kP   vP  | 0 0 k2 0 k1 0 0 0 ... kP 0 ...
    target     .  .  .  .  ...  .    .  | . . v2 . v1 . . . ... vP . ...

Each of the P keys is asked for once, at an even place after the pairs that is drawn from a power
law: early ones are likelier. Source: Zoology (Arora et al. 2023, arXiv 2312.04927); the draws come
from numpy's legacy generator in the order of its released code, so that a seed gives the same rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mezzo_core.errors import UserError


class MQARRows(NamedTuple):
    """Rows of the task; everything that is no question has no target.

    Attributes:
        inputs: (B, T) int64 tokens; 0 stands where there is neither pair nor question.
        positions: (B, P) int64, where each row's keys are asked for: the target of a question is at
            the question's own position.
        values: (B, P) int64, the token to answer there.
    """

    inputs: NDArray[np.int64]
    positions: NDArray[np.int64]
    values: NDArray[np.int64]

    def labels(self, ignore_index: int = -100) -> NDArray[np.int64]:
        """Return (B, T) targets, `ignore_index` wherever nothing is asked."""
        labels = np.full_like(self.inputs, ignore_index)
        np.put_along_axis(labels, self.positions, self.values, axis=1)
        return labels


@dataclass(frozen=True)
class MQARConfig:
    """The task's size.

    Attributes:
        vocab_size: token 0 is filler, keys are below half of it, values the rest.
        seq_len: T, tokens a row.
        num_pairs: P, keys and values a row.
        power: exponent of the law of the questions' places, p(i) ~ i^(power - 1), i = 1, 2, ...

    Raises:
        UserError: if the row cannot hold the pairs and questions, or the vocabulary the tokens.
    """

    vocab_size: int = 8192
    seq_len: int = 512
    num_pairs: int = 64
    power: float = 0.01

    def __post_init__(self) -> None:
        if self.num_pairs < 1:
            raise UserError(f"num_pairs must be at least 1, got {self.num_pairs}")
        if self.seq_len % 2:
            raise UserError(f"seq_len must be even, got {self.seq_len}")
        if 4 * self.num_pairs > self.seq_len:
            raise UserError(
                f"num_pairs must be at most seq_len / 4 = {self.seq_len // 4} (two tokens a pair, "
                f"two a question), got {self.num_pairs}"
            )
        if self.vocab_size <= self.seq_len:
            raise UserError(
                f"vocab_size must be above seq_len = {self.seq_len}, got {self.vocab_size}"
            )
        if not self.power > 0:
            raise UserError(f"power must be positive, got {self.power}")

    def generate(self, num_rows: int, seed: int) -> MQARRows:
        """Draw rows; 100,000 of the default size take about ten seconds.

        Args:
            num_rows: B.
            seed: from 0 to 2**32 - 1, of numpy's legacy generator.

        Raises:
            UserError: if an argument is out of its range.
        """
        if num_rows < 1:
            raise UserError(f"num_rows must be at least 1, got {num_rows}")
        if not 0 <= seed < 2**32:
            raise UserError(f"seed must be from 0 to 2**32 - 1, got {seed}")
        P, first_value = self.num_pairs, self.vocab_size // 2
        random = np.random.RandomState(seed)
        # The order of the draws is part of the task: all keys, all values, then all places.
        keys = _draw(random, np.arange(1, first_value), P, num_rows)
        values = _draw(random, np.arange(first_value, self.vocab_size), P, num_rows)
        places = np.arange((self.seq_len - 2 * P) // 2)
        law = self.power * (places + 1) ** (self.power - 1.0)
        positions = 2 * P + 2 * _draw(random, places, P, num_rows, law / law.sum())
        inputs = np.zeros((num_rows, self.seq_len), dtype=np.int64)
        inputs[:, 0 : 2 * P : 2] = keys
        inputs[:, 1 : 2 * P : 2] = values
        np.put_along_axis(inputs, positions, keys, axis=1)
        return MQARRows(inputs, positions, values)


def _draw(
    random: np.random.RandomState,
    choices: NDArray[np.int64],
    count: int,
    num_rows: int,
    weights: NDArray[np.float64] | None = None,
) -> NDArray[np.int64]:
    """Return (num_rows, count), each row `count` different choices."""
    rows = np.empty((num_rows, count), dtype=np.int64)
    for row in rows:
        row[:] = random.choice(choices, size=count, replace=False, p=weights)
    return rows
