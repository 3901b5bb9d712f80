"""Text that is tokenized once, before training: any step's batch can then be read directly."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mezzo_core.data.batches import Batch, TextData, Windows, check_batch
from mezzo_core.data.tokenized_corpus import TokenizedCorpus
from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.errors import UserError

# The seed is used for two independent draws, which differ by these numbers. The draw of an order
# also gets the epoch.
_SPLIT, _ORDER = 0, 1


class TokenizedText(TextData):
    """Windows of a tokenized corpus: each is read once an epoch, in a new random order.

    The last window, which is filled up with padding without targets, ends each epoch.
    """

    train: Windows
    validation: Windows

    def __init__(
        self,
        tokenized: TokenizedCorpus,
        tokenizer: Tokenizer,
        *,
        held_out: TokenizedCorpus | None = None,
        seq_len: int,
        validation_fraction: float,
        seed: int,
        mask_documents: bool,
    ) -> None:
        """Split the corpus, whose tokens the tokenizer made, or take another one to validate on.

        `validation_fraction` is the share of the tokens to hold out, 1 for all; with `held_out` it
        has no meaning. The seed draws the split and the order.
        """
        self.tokenizer, self.seq_len = tokenizer, seq_len
        # "packed" stays: runs on disk have it in their corpus.json.
        self.fingerprint = f"packed {' '.join(tokenized.checksums)} {tokenizer.identity}"
        if held_out is None:
            validated = tokenized
            train, validation = split_documents(tokenized.ends, validation_fraction, seed)
        else:
            validated = held_out
            self.fingerprint += f" {' '.join(held_out.checksums)}"
            train, validation = (all_documents(text.ends) for text in (tokenized, held_out))
        self.train, self.validation = (
            Windows(
                text.tokens,
                ranges,
                seq_len=seq_len,
                pad=tokenizer.eos_token,
                mask_documents=mask_documents,
            )
            for text, ranges in (
                (tokenized, train),
                (validated, after_end_token(validation, validated.ends)),
            )
        )
        self.num_train_tokens = self.train.num_tokens
        self.num_validation_bytes = target_bytes(validated, validation, tokenizer, mask_documents)
        self._seed = seed
        self._orders: dict[int, NDArray[np.int64]] = {}

    def check_training(self, batch_size: int) -> None:
        """Check that the training part fills a window too; see `BatchSource`."""
        super().check_training(batch_size)
        if self.train.num_complete == 0:
            raise UserError(
                f"the training part has {self.train.num_tokens} tokens, fewer than one window of "
                f"{self.seq_len + 1}: give more text or a shorter seq_len"
            )

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """Return the batch of a step: a function of seed, step and batch size alone."""
        check_batch(step, batch_size)
        samples = np.arange(step * batch_size, (step + 1) * batch_size)
        return self.train.batch(self.windows_at(samples))

    def windows_at(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which windows of `train` stand at these places of the order of training.

        Raises:
            ValueError: if there is nothing to train on.
        """
        num_windows = self.train.num_padded
        if num_windows == 0:
            raise ValueError(
                "validation_fraction = 1 holds out all of the text: nothing to train on"
            )
        epochs, places = np.divmod(samples, num_windows)
        chosen = np.empty_like(places)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            chosen[of_epoch] = self._order(int(epoch))[places[of_epoch]]
        return chosen

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            if len(self._orders) > 1:
                self._orders.clear()
            generator = np.random.default_rng((self._seed, _ORDER, epoch))
            complete, padded = self.train.num_complete, self.train.num_padded
            order = generator.permutation(complete)
            # The padded window comes last, so that runs of versions without it keep their order.
            self._orders[epoch] = np.append(order, np.arange(complete, padded))
        return self._orders[epoch]


def all_documents(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the (num_documents, 2) token ranges of documents that end at `ends`."""
    return np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)


def split_documents(
    ends: NDArray[np.int64], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw whole documents for validation, until the fraction of the tokens is reached.

    Documents are considered in an order drawn from the seed. A document that would take the
    validation part beyond `fraction` is skipped; if every document is skipped, the shortest one is
    taken. Both parts keep the corpus's order. A single document is split by position: its last
    tokens are for validation. A fraction of 1 holds out all. Document i ends at `ends[i]`.

    Returns:
        Two arrays (n, 2) of token ranges, for training and for validation, neither empty unless all
        is held out.
    """
    ranges = all_documents(ends)
    total = int(ends[-1])
    if fraction == 1:
        return ranges[:0], ranges
    if len(ends) == 1:
        cut = min(max(round(total * (1 - fraction)), 1), total - 1)
        return np.array([[0, cut]]), np.array([[cut, total]])
    lengths = ranges[:, 1] - ranges[:, 0]
    room = int(total * fraction)
    held_out = np.zeros(len(ends), dtype=bool)
    for document in np.random.default_rng((seed, _SPLIT)).permutation(len(ends)):
        if lengths[document] <= room:
            room -= int(lengths[document])
            held_out[document] = True
    if not held_out.any():
        held_out[np.argmin(lengths)] = True
    return ranges[~held_out], ranges[held_out]


def after_end_token(ranges: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Put an end token before the ranges, so that their first token also becomes a target."""
    return np.concatenate([[[ends[0] - 1, ends[0]]], ranges])


def target_bytes(
    tokenized: TokenizedCorpus,
    held_out: NDArray[np.int64],
    tokenizer: Tokenizer,
    mask_documents: bool,
) -> int:
    """Return the UTF-8 bytes of the held-out tokens that are targets.

    With masked documents the first token of each document is not a target. A part of a document has
    the share of its bytes that its tokens have in the bytes of all tokens: this is exact if the
    tokenizer keeps texts as they are.
    """
    is_part = len(tokenized.ends) == 1 and held_out[0, 0] > 0
    if is_part:
        begin, end = held_out[0].tolist()
        before = _count_bytes(tokenized.tokens, 0, begin, tokenizer)
        part = _count_bytes(tokenized.tokens, begin, end, tokenizer)
        num_bytes = round(float(tokenized.num_bytes[0]) * part / max(before + part, 1))
    else:
        documents = np.searchsorted(tokenized.ends, held_out[:, 1])
        num_bytes = int(tokenized.num_bytes[documents].sum())
    if not mask_documents:
        return num_bytes
    firsts, counts = np.unique(tokenized.tokens[held_out[:, 0]], return_counts=True)
    for token, count in zip(firsts.tolist(), counts.tolist(), strict=True):
        num_bytes -= count * tokenizer.token_bytes(token, first=not is_part)
    return num_bytes


def _count_bytes(tokens: Any, begin: int, end: int, tokenizer: Tokenizer) -> int:
    """Return the UTF-8 bytes of tokens within a text, a million at a time."""
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for first in range(begin, end, 2**20):
        part = tokens[np.arange(first, min(first + 2**20, end))]
        counts += np.bincount(part, minlength=len(counts))
    known = np.flatnonzero(counts).tolist()
    return sum(int(counts[token]) * tokenizer.token_bytes(token) for token in known)
