"""Text that is packed once and read at any place: the step number tells the batch."""

import numpy as np
from numpy.typing import NDArray

from mezzo_core.data.batches import Batch, TextData, Windows, check_batch_size
from mezzo_core.data.packing import PackedCorpus
from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.errors import UserError

# The seed's independent uses; a third number is the epoch.
_SPLIT, _ORDER = 0, 1


class PackedText(TextData):
    """Windows of a packed corpus, each once an epoch, in an order drawn anew every epoch."""

    def __init__(
        self,
        packed: PackedCorpus,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        validation_fraction: float,
        seed: int,
        mask_documents: bool,
    ) -> None:
        """Split the corpus.

        Args:
            packed: the tokens.
            tokenizer: what made them.
            seq_len: T.
            validation_fraction: of the tokens, held out for validation.
            seed: of the split and of the order.
            mask_documents: whether documents are told apart.

        Raises:
            UserError: if the training part has no window of T + 1 tokens.
        """
        self.tokenizer, self.seq_len = tokenizer, seq_len
        self.fingerprint = f"packed {' '.join(packed.checksums)} {tokenizer.identity}"
        train, held_out = split_documents(packed.ends, validation_fraction, seed)
        self._train, self._validation = (
            Windows(
                packed.tokens,
                ranges,
                seq_len=seq_len,
                pad=tokenizer.eos_token,
                mask_documents=mask_documents,
            )
            for ranges in (train, after_end_token(held_out, packed.ends))
        )
        if self._train.num_complete == 0:
            raise UserError(
                f"the training part has {self._train.num_tokens} tokens, fewer than one window of "
                f"{seq_len + 1}: give more text or a shorter seq_len"
            )
        self.num_train_tokens = self._train.num_tokens
        self.num_validation_bytes = _bytes_of(packed, held_out)
        self._seed = seed
        self._orders: dict[int, NDArray[np.int64]] = {}

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """Return the batch of a step: a function of seed, step and batch size alone."""
        check_batch_size(batch_size)
        if step < 0:
            raise ValueError(f"step must be 0 or more, got {step}")
        num_windows = self._train.num_complete
        samples = np.arange(step * batch_size, (step + 1) * batch_size)
        epochs, places = np.divmod(samples, num_windows)
        chosen = np.empty_like(places)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            chosen[of_epoch] = self._order(int(epoch))[places[of_epoch]]
        return self._train.batch(chosen)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            if len(self._orders) > 1:
                self._orders.clear()
            generator = np.random.default_rng((self._seed, _ORDER, epoch))
            self._orders[epoch] = generator.permutation(self._train.num_complete)
        return self._orders[epoch]


def split_documents(
    ends: NDArray[np.int64], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw whole documents for validation, until the fraction of the tokens is reached.

    Documents are taken in an order drawn from the seed, passing over one that would take the part
    beyond `fraction`; if none fits, the shortest is taken. Both parts keep the corpus's order. A
    single document is split by position: its last tokens are for validation.

    Args:
        ends: (num_documents,), where each document ends.
        fraction: between 0 and 1, of the tokens.
        seed: of the draw.

    Returns:
        Two arrays of ranges (n, 2): for training and for validation; each has one at least.
    """
    begins = np.concatenate([[0], ends[:-1]])
    ranges = np.stack([begins, ends], axis=1)
    total = int(ends[-1])
    if len(ends) == 1:
        cut = min(max(round(total * (1 - fraction)), 1), total - 1)
        return np.array([[0, cut]]), np.array([[cut, total]])
    lengths = ends - begins
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
    """Put one end token before the ranges, so that their first token can be predicted too."""
    return np.concatenate([[[ends[0] - 1, ends[0]]], ranges])


def _bytes_of(packed: PackedCorpus, held_out: NDArray[np.int64]) -> int:
    if len(packed.ends) == 1:
        share = (held_out[0, 1] - held_out[0, 0]) / packed.ends[0]
        return round(float(packed.num_bytes[0] * share))
    return int(packed.num_bytes[np.searchsorted(packed.ends, held_out[:, 1])].sum())
