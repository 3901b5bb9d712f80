"""Tasks whose rows are drawn once and held in memory."""

from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mezzo_core.data.batches import Batch, BatchSource, check_batch, check_batch_size
from mezzo_core.errors import UserError
from mezzo_core.ops.linear_cross_entropy import NO_TARGET


class Rows(NamedTuple):
    """Rows of a task, int64."""

    inputs: NDArray[np.int64]  # (B, T)
    targets: NDArray[np.int64]  # (B, T); NO_TARGET (-100) where nothing is asked for


class RowsData(BatchSource):
    """The rows of a task in batches; every process gets the whole batch.

    An epoch takes the rows in an order of its own, and leaves out those that do not fill a batch.
    """

    def __init__(self, name: str, train: Rows, test: Rows, *, vocab_size: int, seed: int) -> None:
        """Keep the rows; the name is a part of the fingerprint, the seed that of the order."""
        self.seq_len, self.vocab_size = train.inputs.shape[1], vocab_size
        self._train, self._test = train, test
        self.num_train_tokens = train.inputs.size
        digest = sha256()
        for part in train:
            digest.update(np.ascontiguousarray(part).data)
        self.fingerprint = f"{name} {digest.hexdigest()}"
        self._seed = seed
        self._order = (-1, np.empty(0, dtype=np.int64))  # an epoch and its order

    def check_training(self, batch_size: int) -> None:
        """Check that the rows fill a batch; see `BatchSource`."""
        num_rows = len(self._train.inputs)
        if batch_size > num_rows:
            raise UserError(f"batch_size must be at most the {num_rows} rows, got {batch_size}")

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """Return the batch of a step: a function of the seed, the step and the batch size alone.

        Raises:
            ValueError: if there is no such step, or the rows do not fill a batch.
        """
        check_batch(step, batch_size)
        num_rows = len(self._train.inputs)
        self.check_training(batch_size)
        epoch, place = divmod(step, num_rows // batch_size)
        if self._order[0] != epoch:
            generator = np.random.default_rng((self._seed, epoch))
            self._order = (epoch, generator.permutation(num_rows))
        chosen = self._order[1][place * batch_size : (place + 1) * batch_size]
        return Batch(*(torch.from_numpy(part[chosen]) for part in self._train))

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the test rows, in order; rows of zeros without targets complete the last batch."""
        check_batch_size(batch_size)
        inputs, targets = self._test
        missing = ((0, -len(inputs) % batch_size), (0, 0))
        parts = (np.pad(inputs, missing), np.pad(targets, missing, constant_values=NO_TARGET))
        batches = (torch.from_numpy(part).split(batch_size) for part in parts)
        return map(Batch, *batches)
