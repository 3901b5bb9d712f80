"""Multi-query associative recall: rows of key-value pairs, then questions about their values.

    position   0  1  2  3 ... 2P-2 2P-1 | 2P ... T-1
    input      k1 v1 k2 v2 ... kP   vP  | 0 0 k2 0 k1 0 0 0 ... kP 0 ...
    target     .  .  .  .  ...  .    .  | . . v2 . v1 . . . ... vP . ...

Each of the P keys is asked for once, at an even place after the pairs that is drawn from a power
law: early ones are likelier. The places without questions hold 0, or random tokens. Source: Zoology
(Arora et al. 2023, arXiv 2312.04927); the draws come from numpy's legacy generator in the order of
its released code, so that a seed gives the same rows.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from mezzo_core.config_json import check_fields, check_rules
from mezzo_core.data import NO_TARGET, Rows, RowsData
from mezzo_core.errors import UserError
from numpy.typing import NDArray

TRAIN_SEED, TEST_SEED = 843828734, 3062119789
"""Seeds of the rows, which Zoology draws from its own seed 123."""


@dataclass(frozen=True)
class MQARConfig:
    """The task as a run's data: rows to train on, and other rows to test on.

    Attributes:
        vocab_size: token 0 is filler, keys are below half of it, values the rest.
        seq_len: T, tokens a row.
        num_pairs: P, keys and values a row.
        power: exponent of the law of the questions' places, p(i) ~ i^(power - 1), i = 1, 2, ...;
            at most 10.
        random_non_queries: put a random token of the vocabulary wherever 0 would be. It may be a
            key, so the model has to tell questions from other tokens.
        train_rows: drawn once, for all epochs.
        train_pairs: pairs of the rows to train on, in equal shares, because a model learns from
            rows of few pairs sooner; empty: `num_pairs`, as the test rows always have.
        test_rows: the validation part.
        seed: of the order of the rows in each epoch. The rows themselves are always the same.

    Raises:
        UserError: if a field is of another type, the row cannot hold the pairs and questions, or
            the vocabulary the tokens.
    """

    vocab_size: int = 8192
    seq_len: int = 512
    num_pairs: int = 64
    power: float = 0.01
    random_non_queries: bool = False
    train_rows: int = 100_000
    train_pairs: tuple[int, ...] = ()
    test_rows: int = 3_000
    seed: int = 123

    def __post_init__(self) -> None:
        check_fields(self)
        T, P, most = self.seq_len, self.num_pairs, self.seq_len // 4
        why, shares = "two tokens a pair, two a question", max(1, len(self.train_pairs))
        few = all(1 <= pairs <= P for pairs in self.train_pairs)
        rules = {
            "seq_len": (T % 2 == 0, "even"),
            "num_pairs": (1 <= P <= most, f"from 1 to seq_len / 4 = {most} ({why})"),
            "vocab_size": (self.vocab_size > T, f"above seq_len = {T}"),
            "power": (0 < self.power <= 10, "positive and at most 10"),  # far higher ones overflow
            "train_rows": (self.train_rows >= shares, f"at least {shares}"),
            "train_pairs": (few, f"from 1 to num_pairs = {P}"),
            "test_rows": (self.test_rows >= 1, "at least 1"),
            "seed": (self.seed >= 0, "0 or more"),
        }
        check_rules(self, rules)

    def build(
        self, seq_len: int, cache_dir: Path | None, *, rank: int = 0, world_size: int = 1
    ) -> RowsData:
        """Draw the rows, which every process holds in memory; `cache_dir` is not used.

        Raises:
            UserError: if `seq_len` is not the task's.
        """
        if seq_len != self.seq_len:
            raise UserError(f"seq_len must be that of the task, {self.seq_len}, got {seq_len}")
        train, test = self.parts
        return RowsData("mqar", train, test, vocab_size=self.vocab_size, seed=self.seed)

    @cached_property
    def parts(self) -> tuple[Rows, Rows]:
        """The rows to train on and those to test on, drawn once for all runs of this task."""
        shares = self.train_pairs or (self.num_pairs,)
        drawn = [
            replace(self, num_pairs=pairs, train_pairs=()).generate(
                (self.train_rows + i) // len(shares), TRAIN_SEED
            )
            for i, pairs in enumerate(shares)
        ]
        train = Rows(*(np.concatenate(part) for part in zip(*drawn, strict=True)))
        return train, self.generate(self.test_rows, TEST_SEED)

    def generate(self, num_rows: int, seed: int) -> Rows:
        """Draw rows from numpy's legacy generator; 100,000 usual ones take about ten seconds.

        Random tokens come from torch's generator, which the released code does not seed: here the
        rows' seed is its seed too.
        """
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
        if self.random_non_queries:
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(self.vocab_size, inputs.shape, generator=generator).numpy()
            inputs = np.where(inputs == 0, tokens, inputs)
        targets = np.full_like(inputs, NO_TARGET)
        np.put_along_axis(targets, positions, values, axis=1)
        return Rows(inputs, targets)


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
