"""Batches, and the interface of their sources (texts and tasks) to training and evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mezzo_core.data.stored_tokens import StoredTokens
from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.errors import UserError
from mezzo_core.ops.linear_cross_entropy import NO_TARGET
from mezzo_core.ops.sizes import ceil_div


class Batch(NamedTuple):
    """Rows of tokens and the targets to predict at each token: in a text, the next token.

    Rows of a text are windows of T tokens. With masked documents the windows are laid end to end
    in one row of B*T tokens, and `cu_seqlens` has the borders of the documents. The border between
    two windows is always a border of documents too.
    """

    tokens: Tensor  # (B, T) int64, or (1, B*T)
    targets: Tensor  # the same shape, int64; NO_TARGET (-100) where there is nothing to predict
    cu_seqlens: Tensor | None = None  # int32 from 0 to B*T, padded with B*T to a fixed length
    places: Tensor | None = None  # (N,) int64, see `with_places`; None: all B*T

    def part(self, index: int, count: int) -> "Batch":
        """Return one of `count` parts with equally many windows, for micro-batches and processes.

        The `cu_seqlens` of all parts have the same length.

        Raises:
            ValueError: if `count` does not divide the windows, or there is no such part.
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


def with_places(parts: Sequence[Batch]) -> list[Batch]:
    """Return equally large batches with the places of their targets, where these are few.

    The head need not read other places. All batches get equally many: as many as the most targets,
    filled up to one eighth of all places, or two, and so on. So there are few shapes, which
    compiled and captured steps want.
    """
    masks = [(part.targets != NO_TARGET).flatten() for part in parts]
    size = masks[0].numel()
    eighth = ceil_div(size, 8)
    count = eighth * max(1, ceil_div(max(int(mask.sum()) for mask in masks), eighth))
    if count >= size:
        return [*parts]
    orders = (mask.argsort(descending=True, stable=True) for mask in masks)
    return [part._replace(places=order[:count]) for part, order in zip(parts, orders, strict=True)]


def make_batch(
    rows: NDArray[np.int64],
    real: NDArray[np.bool_],
    ends: NDArray[np.bool_],
    max_documents: int,
) -> Batch:
    """Cut windows into inputs and targets.

    Args:
        rows: (B, T + 1) tokens.
        real: (B, T + 1), False for padding, which is never a target.
        ends: (B, T), True at the last token of a document; not read without document masking.
        max_documents: the most documents in any window, where padding counts as a document. A
            batch's `cu_seqlens` has B * max_documents + 1 entries. 0 without document masking.
    """
    tokens = torch.from_numpy(np.ascontiguousarray(rows[:, :-1]))
    wanted = real[:, 1:] & ~ends if max_documents else real[:, 1:]
    targets = torch.from_numpy(np.where(wanted, rows[:, 1:], NO_TARGET))
    if not max_documents:
        return Batch(tokens, targets)
    breaks = ends.copy()
    breaks[:, -1] = True
    borders = np.full(len(rows) * max_documents + 1, breaks.size, dtype=np.int32)
    found = np.flatnonzero(breaks) + 1
    borders[0] = 0
    borders[1 : 1 + len(found)] = found
    return Batch(tokens.view(1, -1), targets.view(1, -1), torch.from_numpy(borders))


def check_batch(step: int, batch_size: int) -> None:
    """Check that there can be such a batch.

    Raises:
        ValueError: if `step` is negative, or `batch_size` is not a positive int.
    """
    check_batch_size(batch_size)
    if step < 0:
        raise ValueError(f"step must be 0 or more, got {step}")


def check_batch_size(batch_size: int) -> None:
    """Check that a batch has at least one window.

    Raises:
        ValueError: if `batch_size` is not a positive int.
    """
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number from 1 on, got {batch_size!r}")


class Windows:
    """Ranges of a token array, joined and cut into windows of T + 1 tokens.

    Window i starts at token i * T. So the last token of a window is the first of the next, and
    every token except the very first is a target in exactly one window.
    """

    def __init__(
        self,
        tokens: NDArray[Any] | StoredTokens,
        ranges: NDArray[np.int64],
        *,
        seq_len: int,
        pad: int,
        mask_documents: bool,
    ) -> None:
        """Lay the ranges end to end.

        Args:
            tokens: (num_tokens,), usually in a file.
            ranges: (num_documents, 2), begin and end in `tokens`; no range is empty, but there may
                be none.
            seq_len: T.
            pad: the token that fills the last window.
            mask_documents: whether each range is a document that must not attend to another.
        """
        begins, ends = ranges[:, 0], ranges[:, 1]
        self._tokens = tokens
        self._borders = np.cumsum(ends - begins)
        places = self._borders - (ends - begins)
        shifts = begins - places
        # Ranges that are adjacent in `tokens` have the same shift and are read as one run.
        runs = np.flatnonzero(np.diff(shifts, prepend=shifts[:1] - 1))
        self._run_places, self._run_shifts = places[runs], shifts[runs]
        self._seq_len, self._pad = seq_len, pad
        self.num_tokens = int((ends - begins).sum())
        # The first token of all, or of each document, is no target.
        self.num_targets = self.num_tokens - len(ranges if mask_documents else ranges[:1])
        self.max_documents = 0
        if mask_documents:
            windows, places = np.divmod(self._borders - 1, seq_len)
            inside = windows[places != seq_len - 1]
            self.max_documents = 1 + int(np.bincount(inside).max(initial=0))

    @property
    def num_complete(self) -> int:
        """How many windows have all T + 1 tokens."""
        return max(self.num_tokens - 1, 0) // self._seq_len

    @property
    def num_padded(self) -> int:
        """How many windows have at least one target."""
        return ceil_div(max(self.num_tokens - 1, 0), self._seq_len)

    def batch(self, windows: Sequence[int] | NDArray[np.int64]) -> Batch:
        """Return these windows as a batch. A window beyond the last one is all padding."""
        return make_batch(*self.read(windows), self.max_documents)

    def read(
        self, windows: Sequence[int] | NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the rows, what is real and the ends of documents, as `make_batch` takes them."""
        places = np.asarray(windows)[:, None] * self._seq_len + np.arange(self._seq_len + 1)
        real = places < self.num_tokens
        places = np.where(real, places, 0)
        runs = np.searchsorted(self._run_places, places, side="right") - 1
        rows = self._tokens[places + self._run_shifts[runs]].astype(np.int64)
        rows = np.where(real, rows, self._pad)
        ends = np.zeros((len(rows), self._seq_len), dtype=bool)
        if self.max_documents:
            after = places[:, :-1] + 1
            found = np.searchsorted(self._borders, after)
            ends = (self._borders[found] == after) & real[:, :-1]
        return rows, real, ends


def mixed_batch(
    texts: Sequence[Windows], chosen: NDArray[np.int64], windows: NDArray[np.int64]
) -> Batch:
    """Return a batch of several texts: row i is window `windows[i]` of text `chosen[i]`."""
    parts = [texts[i].read(windows[chosen == i]) for i in np.unique(chosen)]
    back = np.argsort(np.argsort(chosen, kind="stable"))
    rows, real, ends = (np.concatenate(arrays)[back] for arrays in zip(*parts, strict=True))
    return make_batch(rows, real, ends, max(text.max_documents for text in texts))


class MixedWindows:
    """All windows of several texts, spread evenly: the first n have each text's share of them."""

    def __init__(self, texts: Sequence[Windows]) -> None:
        """Order the windows of the texts."""
        self._texts = texts
        self.num_targets = sum(text.num_targets for text in texts)
        places = [np.arange(text.num_padded) for text in texts]
        shares = np.concatenate([(place + 0.5) / len(place) for place in places])
        order = np.argsort(shares, kind="stable")
        self.num_padded = len(order)
        chosen = np.repeat(np.arange(len(texts)), [len(place) for place in places])
        # The last entry stands for every window beyond the end: it is padding of the first text.
        self._chosen = np.append(chosen[order], 0)
        self._windows = np.append(np.concatenate(places)[order], len(places[0]))

    def batch(self, windows: NDArray[np.int64]) -> Batch:
        """Return these windows as a batch. A window beyond the last one is all padding."""
        found = np.minimum(windows, self.num_padded)
        return mixed_batch(self._texts, self._chosen[found], self._windows[found])


class BatchSource(ABC):
    """The data of training and evaluation: a text or a task, with training and validation parts.

    **Several processes.** Most sources give every process the same whole batch of `batch_size`
    rows, and the trainer takes this process's part with `Batch.part(rank, world)`. A source with
    `reads_shard=True` instead reads a different shard in every process, and is built with that
    process's `rank` and `world_size`. Its `train_batch` is also given the whole batch size, but
    returns only this process's part, batch_size / world_size rows. In both cases the validation
    batches are whole, and the same in every process.
    """

    seq_len: int
    """T, the tokens of a row."""
    vocab_size: int
    """All tokens are below this number."""
    fingerprint: str
    """Identifies the training data. A run is not resumed on data with another fingerprint."""
    reads_shard: bool = False
    """Whether each process reads a shard of its own; see above."""
    num_train_tokens: int | None = None
    """Training tokens of an epoch; None if the source is endless, or its length unknown."""
    tokenizer: Tokenizer | None = None
    """The tokenizer of the text; None for a task."""
    num_validation_bytes: int | None = None
    """UTF-8 bytes of the validation targets, for bits a byte; None for a task."""

    @abstractmethod
    def train_batch(self, step: int, batch_size: int) -> Batch:
        """Return the batch of a step (from 0).

        Args:
            step: the optimizer step.
            batch_size: rows of a step, summed over all processes.

        Returns:
            Tokens and targets (batch_size, T), or (1, batch_size * T) with masked documents.

        Raises:
            ValueError: if there is no such step or batch.
        """

    @abstractmethod
    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the validation part in order, with each target once.

        Every batch has `batch_size` rows; the last one is filled up with padding, which has no
        targets. Sum the losses rather than average them: the mean over a part that is all padding
        is NaN.

        Raises:
            ValueError: if `batch_size` is not a positive int.
        """

    def check_training(self, batch_size: int) -> None:
        """Check that there is data for a run, before it changes its folder.

        Raises:
            UserError: if there is no batch to train on or nothing to validate on, or it cannot be
                read.
        """
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs besides the step, as JSON values.

        By default there is none, because the step determines the batch.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the place where `state_dict` was called.

        Raises:
            UserError: if the state belongs to another kind of source.
        """
        if state != {}:
            raise UserError(
                "this checkpoint is of a run on streamed data: set streaming=True (--streaming)"
            )


class TextData(BatchSource):
    """A text as tokens, split into a training and a validation part.

    A corpus that is tokenized before training (`TokenizedText`), or a mixture of several
    (`MixedText`), gives every process whole batches. Its fingerprint is computed from all tokens,
    so it stays the same if a file is only moved or touched. A stream (`StreamedText`) reads a shard
    in each process, and its fingerprint covers only a part of the text.
    """

    tokenizer: Tokenizer
    num_validation_bytes: int
    validation: Windows | MixedWindows

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        """The number of tokens of the tokenizer."""
        return self.tokenizer.vocab_size

    def check_training(self, batch_size: int) -> None:
        """Check that the validation part has targets; see `BatchSource`."""
        if self.validation.num_targets == 0:
            raise UserError(
                "the held-out part has no target: give more text, a larger validation_fraction or "
                "a text of its own to validate on (--validation-data)"
            )

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the validation part in order, with each token as a target exactly once.

        An end token is put before the first document, so that its first token can be predicted.
        """
        check_batch_size(batch_size)
        return (
            self.validation.batch(np.arange(first, first + batch_size))
            for first in range(0, self.validation.num_padded, batch_size)
        )
