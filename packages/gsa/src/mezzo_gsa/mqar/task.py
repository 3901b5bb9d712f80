"""Multi-query associative recall: rows of key-value pairs, then questions about their values.

    position   0  1  2  3 ... 2P-2 2P-1 | 2P ... T-1
    input      k1 v1 k2 v2 ... kP   vP  | 0 0 k2 0 k1 0 0 0 ... kP 0 ...
    target     .  .  .  .  ...  .    .  | . . v2 . v1 . . . ... vP . ...

Each of the P keys is asked for once, at an even place after the pairs that is drawn from a power
law: early ones are likelier. Source: Zoology (Arora et al. 2023, arXiv 2312.04927); the draws come
from numpy's legacy generator in the order of its released code, so that a seed gives the same rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from mezzo_core.config_json import check_fields
from mezzo_core.data import NO_TARGET, Batch, BatchSource
from mezzo_core.data.batches import check_batch_size
from mezzo_core.errors import UserError
from numpy.typing import NDArray

TRAIN_SEED, TEST_SEED = 843828734, 3062119789
"""Of the rows: what Zoology draws from its own seed 123."""


class MQARRows(NamedTuple):
    """Rows of the task, int64."""

    inputs: NDArray[np.int64]  # (B, T); 0 where there is neither pair nor question
    targets: NDArray[np.int64]  # (B, T); at each question the value, everywhere else -100


@dataclass(frozen=True)
class MQARConfig:
    """The task, as what a run reads: rows to train on, and other rows to be tested on.

    Attributes:
        vocab_size: token 0 is filler, keys are below half of it, values the rest.
        seq_len: T, tokens a row.
        num_pairs: P, keys and values a row.
        power: exponent of the law of the questions' places, p(i) ~ i^(power - 1), i = 1, 2, ...
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
            "power": (self.power > 0, "positive"),
            "train_rows": (self.train_rows >= shares, f"at least {shares}"),
            "train_pairs": (few, f"from 1 to num_pairs = {P}"),
            "test_rows": (self.test_rows >= 1, "at least 1"),
            "seed": (self.seed >= 0, "0 or more"),
        }
        for name, (is_met, allowed) in rules.items():
            if not is_met:
                raise UserError(f"{name} must be {allowed}, got {getattr(self, name)}")

    def build(
        self, seq_len: int, cache_dir: Path | None, *, rank: int = 0, world_size: int = 1
    ) -> "MQARData":
        """Draw the rows, which every process holds in memory; `cache_dir` is not used.

        Raises:
            UserError: if `seq_len` is not the task's.
        """
        if seq_len != self.seq_len:
            raise UserError(f"seq_len must be that of the task, {self.seq_len}, got {seq_len}")
        return MQARData(self)

    @cached_property
    def parts(self) -> tuple[MQARRows, MQARRows]:
        """The rows to train on and those to test on, drawn once for all runs of this task."""
        shares = self.train_pairs or (self.num_pairs,)
        drawn = [
            replace(self, num_pairs=pairs, train_pairs=()).generate(
                (self.train_rows + i) // len(shares), TRAIN_SEED
            )
            for i, pairs in enumerate(shares)
        ]
        train = MQARRows(*(np.concatenate(part) for part in zip(*drawn, strict=True)))
        return train, self.generate(self.test_rows, TEST_SEED)

    def generate(self, num_rows: int, seed: int) -> MQARRows:
        """Draw rows from numpy's legacy generator; 100,000 usual ones take about ten seconds."""
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
        targets = np.full_like(inputs, NO_TARGET)
        np.put_along_axis(targets, positions, values, axis=1)
        return MQARRows(inputs, targets)


class MQARData(BatchSource):
    """The rows of a task in batches; every process gets the whole batch.

    An epoch takes the rows in an order of its own, and leaves out those that do not fill a batch.
    """

    def __init__(self, config: MQARConfig) -> None:
        self.seq_len, self.vocab_size = config.seq_len, config.vocab_size
        self._train, self._test = config.parts
        self.num_train_tokens = self._train.inputs.size
        digest = sha256(self._train.inputs.data)
        digest.update(self._train.targets.data)
        self.fingerprint = f"mqar {digest.hexdigest()}"
        self._seed = config.seed
        self._order = (-1, np.empty(0, dtype=np.int64))  # an epoch and its order

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """Return the batch of a step: a function of the seed, the step and the batch size alone.

        Raises:
            ValueError: if there is no such step, or the rows do not fill a batch.
        """
        check_batch_size(batch_size)
        num_rows = len(self._train.inputs)
        if step < 0:
            raise ValueError(f"step must be 0 or more, got {step}")
        if batch_size > num_rows:
            raise ValueError(f"batch_size must be at most the {num_rows} rows, got {batch_size}")
        epoch, place = divmod(step, num_rows // batch_size)
        if self._order[0] != epoch:
            generator = np.random.default_rng((self._seed, epoch))
            self._order = (epoch, generator.permutation(num_rows))
        chosen = self._order[1][place * batch_size : (place + 1) * batch_size]
        return Batch(*(torch.from_numpy(part[chosen]) for part in self._train))

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the test rows, in order; rows of filler without targets complete the last batch."""
        check_batch_size(batch_size)
        inputs, targets = self._test
        missing = ((0, -len(inputs) % batch_size), (0, 0))
        parts = (np.pad(inputs, missing), np.pad(targets, missing, constant_values=NO_TARGET))
        batches = (torch.from_numpy(part).split(batch_size) for part in parts)
        return map(Batch, *batches)


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
