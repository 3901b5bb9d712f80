"""Batches, and what a source of them, a text or a task, offers to training and evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.errors import UserError
from mezzo_core.ops.linear_cross_entropy import NO_TARGET


class Batch(NamedTuple):
    """Rows of tokens, and what is to be predicted at each: of a text, the token that follows.

    Rows of a text are windows of T tokens. With masked documents they are laid end to end in one
    row of B*T, and `cu_seqlens` has the borders of the documents in it; a window's border is
    always one of them.
    """

    tokens: Tensor  # (B, T) int64, or (1, B*T)
    targets: Tensor  # the same shape, int64; -100 where there is no loss
    cu_seqlens: Tensor | None = None  # (fixed length,) int32 from 0 to B*T, the total repeated

    def part(self, index: int, count: int) -> "Batch":
        """Return one of `count` equal parts, by windows: for micro-batches and processes.

        `cu_seqlens` of the parts are all of one length too.

        Raises:
            ValueError: if the windows do not divide into `count`, or there is no such part.
        """
        if not 0 <= index < count:
            raise ValueError(f"index must be from 0 to below count = {count}, got {index}")
        if self.cu_seqlens is None:
            rows = len(self.tokens)
            if rows % count:
                raise ValueError(f"count must divide the {rows} windows, got {count}")
            chosen = slice(rows // count * index, rows // count * (index + 1))
            return Batch(self.tokens[chosen], self.targets[chosen])
        length = self.tokens.shape[1]
        size = length // count
        start = size * index
        slots = (len(self.cu_seqlens) - 1) // count + 1
        first, last = torch.searchsorted(
            self.cu_seqlens, self.cu_seqlens.new_tensor([start, start + size])
        ).tolist()
        whole = self.cu_seqlens[first] == start and self.cu_seqlens[last] == start + size
        if length % count or not whole or last - first >= slots:
            raise ValueError(f"count must divide the windows of the {length} tokens, got {count}")
        borders = self.cu_seqlens.new_full((slots,), size)
        borders[: last - first] = self.cu_seqlens[first:last] - start
        chosen = slice(start, start + size)
        return Batch(self.tokens[:, chosen], self.targets[:, chosen], borders)


def make_batch(
    rows: NDArray[np.int64],
    real: NDArray[np.bool_],
    ends: NDArray[np.bool_] | None,
    max_documents: int,
) -> Batch:
    """Cut windows into inputs and targets.

    Args:
        rows: (B, T + 1) tokens.
        real: (B, T + 1), False for padding, which is no target.
        ends: (B, T), True where a document's last token is; None without document masking.
        max_documents: the most documents, with padding as one more, in any window: a batch's
            `cu_seqlens` has B * max_documents + 1 entries.
    """
    tokens = torch.from_numpy(np.ascontiguousarray(rows[:, :-1]))
    wanted = real[:, 1:] if ends is None else real[:, 1:] & ~ends
    targets = torch.from_numpy(np.where(wanted, rows[:, 1:], NO_TARGET))
    if ends is None:
        return Batch(tokens, targets)
    breaks = ends.copy()
    breaks[:, -1] = True
    borders = np.full(len(rows) * max_documents + 1, breaks.size, dtype=np.int32)
    found = np.flatnonzero(breaks) + 1
    borders[0] = 0
    borders[1 : 1 + len(found)] = found
    return Batch(tokens.view(1, -1), targets.view(1, -1), torch.from_numpy(borders))


def check_batch_size(batch_size: int) -> None:
    """Refuse a batch of no windows.

    Raises:
        ValueError: naming what came.
    """
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number from 1 on, got {batch_size!r}")


class Windows:
    """Some ranges of a packed array as if they were one, cut into windows of T + 1 tokens.

    Window i starts at token i * T: the last token of one window is the first of the next, so that
    each token but the very first is the target of exactly one window.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        ranges: NDArray[np.int64],
        *,
        seq_len: int,
        pad: int,
        mask_documents: bool,
    ) -> None:
        """Lay the ranges end to end.

        Args:
            tokens: (num_tokens,), usually memory-mapped.
            ranges: (num_documents, 2), begin and end in `tokens`; none is empty.
            seq_len: T.
            pad: the token after the end.
            mask_documents: whether each range is a document that sees no other.
        """
        begins, ends = ranges[:, 0], ranges[:, 1]
        self._tokens = tokens
        self._borders = np.cumsum(ends - begins)
        places = self._borders - (ends - begins)
        shifts = begins - places
        runs = np.flatnonzero(np.diff(shifts, prepend=shifts[0] - 1))  # neighbours lie together
        self._run_places, self._run_shifts = places[runs], shifts[runs]
        self._seq_len, self._pad = seq_len, pad
        self.num_tokens = int(self._borders[-1])
        self.num_targets = self.num_tokens - 1
        self.max_documents = 0
        if mask_documents:
            self.num_targets -= len(ranges) - 1
            windows, places = np.divmod(self._borders - 1, seq_len)
            inside = windows[places != seq_len - 1]
            self.max_documents = 1 + int(np.bincount(inside).max(initial=0))

    @property
    def num_complete(self) -> int:
        """How many windows have all their T + 1 tokens."""
        return (self.num_tokens - 1) // self._seq_len

    @property
    def num_padded(self) -> int:
        """How many windows have at least one target."""
        return -(-(self.num_tokens - 1) // self._seq_len)

    def batch(self, windows: Sequence[int] | NDArray[np.int64]) -> Batch:
        """Return these windows as a batch; one beyond the last is all padding."""
        places = np.asarray(windows)[:, None] * self._seq_len + np.arange(self._seq_len + 1)
        real = places < self.num_tokens
        places = np.where(real, places, 0)
        runs = np.searchsorted(self._run_places, places, side="right") - 1
        rows = self._tokens[places + self._run_shifts[runs]].astype(np.int64)
        rows = np.where(real, rows, self._pad)
        ends = None
        if self.max_documents:
            after = places[:, :-1] + 1
            found = np.searchsorted(self._borders, after)
            ends = (self._borders[found] == after) & real[:, :-1]
        return make_batch(rows, real, ends, self.max_documents)


class BatchSource(ABC):
    """What training and evaluation read: a text or a task, with a training and a validation part.

    **Several processes.** Most sources give every process the same whole batch of `batch_size`
    rows, and the trainer takes its part with `Batch.part(rank, world)`. A source that reads a
    shard of its own in every process (`reads_shard=True`) is built with that process's `rank` and
    `world_size`: its `train_batch` takes the whole batch size too, and returns only this process's
    part, batch_size / world_size rows. Validation batches are the same, and whole, in every process
    in both cases.
    """

    seq_len: int
    """T, tokens a row."""
    vocab_size: int
    """Every token is below it."""
    fingerprint: str
    """Differs when what is learned from differs. A run is not resumed on another one."""
    reads_shard: bool = False
    num_train_tokens: int | None = None
    """Of an epoch; None if the source has no end, or one that is not known."""
    num_validation_bytes: int | None = None
    """Of validation text in UTF-8, for bits a byte; of a single document a share."""

    @abstractmethod
    def train_batch(self, step: int, batch_size: int) -> Batch:
        """Return the batch of a step (from 0).

        Args:
            step: the optimizer step.
            batch_size: rows a step, over all processes.

        Returns:
            Tokens and targets (batch_size, T), or (1, batch_size * T) with masked documents.

        Raises:
            ValueError: if there is no such step or batch.
        """

    @abstractmethod
    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the validation part, in order, each target once.

        Every batch has `batch_size` rows; where rows are missing, padding without targets stands
        in. Sum the losses, since the mean of a part that is all padding is NaN.

        Raises:
            ValueError: if `batch_size` is no positive number.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on, beside the step: JSON values.

        By default nothing: the step tells the batch.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was called.

        Raises:
            UserError: if the state is another source's.
        """
        if state != {}:
            raise UserError("this checkpoint is of a run on streamed data: set streaming=True")


class TextData(BatchSource):
    """A tokenized corpus, split into a training and a validation part.

    A packed corpus gives every process whole batches; a stream reads a shard in each. The
    fingerprint of packed text is made of all its tokens, so a file that was only moved or touched
    changes nothing; of a stream see `StreamedText`, which cannot see everything.
    """

    tokenizer: Tokenizer
    num_validation_bytes: int
    _validation: Windows

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        """The number of tokens of the tokenizer."""
        return self.tokenizer.vocab_size

    @property
    def num_validation_tokens(self) -> int:
        """How many targets the validation batches have: each document's tokens and its end.

        With masked documents the first token of each is no target.
        """
        return self._validation.num_targets

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the validation part, in order: each token is a target exactly once.

        An end token stands before the first document, to predict its first token from.
        """
        check_batch_size(batch_size)
        return (
            self._validation.batch(np.arange(first, first + batch_size))
            for first in range(0, self._validation.num_padded, batch_size)
        )
