"""A mixture: several texts, each with its share of the rows to train on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mezzo_core.config_json import check_fields
from mezzo_core.data.batches import Batch, MixedWindows, TextData, check_batch, mixed_batch
from mezzo_core.data.config import DataConfig
from mezzo_core.data.tokenized_text import TokenizedText
from mezzo_core.errors import UserError

# In every block of so many rows, each text has exactly its share.
BLOCK_ROWS = 10_000
# The draw of a block also gets this number, which differs from those of `tokenized_text`.
_MIX = 2
_SHARED = ("tokenizer", "add_bos", "mask_documents")


@dataclass(frozen=True)
class MixtureConfig:
    """Several texts that are mixed by weights.

    Of every 10,000 rows of training, each text has its share, in an order drawn from the seed. Each
    text keeps its own order and its own epochs: the rows that it gives are those of a training on
    it alone, so a short text with a large weight is repeated. The validation part is that of all
    texts, each window once. Its loss is the mean over all targets, so there a text counts by what
    it holds out, not by its weight.

    Attributes:
        texts: the texts. Their tokenizer, add_bos and mask_documents are the same, and none is a
            stream.
        weights: one for each text, above 0 and below 2^63. Their ratios alone matter.
        seed: seed of the draw.

    Raises:
        UserError: if a field has the wrong type or is out of range, or the texts do not fit
            together.
    """

    texts: tuple[DataConfig, ...]
    weights: tuple[float, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.texts or len(self.weights) != len(self.texts):
            raise UserError(
                "weights must be as many as the texts, at least one, got "
                f"{len(self.weights)} for {len(self.texts)}"
            )
        if self.seed < 0:
            raise UserError(f"seed must be from 0 to 2^63 - 1, got {self.seed}")
        first = self.texts[0]
        for i, text in enumerate(self.texts):
            for name in _SHARED:
                here, there = getattr(text, name), getattr(first, name)
                if here != there:
                    raise UserError(f"texts[{i}].{name} must be texts[0]'s {there!r}, got {here!r}")
            if text.streaming:
                raise UserError(
                    f"texts[{i}].streaming (--streaming) must be False: a stream cannot be mixed"
                )
        for i, weight in enumerate(self.weights):
            if not 0 < weight < 2**63:
                raise UserError(
                    f"weights[{i}] (--data WEIGHT:TEXT) must be above 0 and below 2^63, "
                    f"got {weight}"
                )
        for i, count in enumerate(_rows_of_a_block(self.weights)):
            if count < 1:
                raise UserError(
                    f"weights[{i}] (--data WEIGHT:TEXT) must be at least 1 / {BLOCK_ROWS} of their "
                    f"sum, got {self.weights[i]} of {sum(self.weights)}"
                )

    @property
    def source(self) -> str:
        """The sources of all texts, for messages."""
        return " + ".join(text.source for text in self.texts)

    def build(
        self, seq_len: int, cache_dir: Path | None, *, rank: int = 0, world_size: int = 1
    ) -> "MixedText":
        """Read and tokenize the texts; the arguments are those of `DataConfig.build`.

        Raises:
            UserError: if a text or the tokenizer cannot be used.
        """
        names = [f"texts[{i}], {config.source!r}" for i, config in enumerate(self.texts)]
        built = []
        for name, config in zip(names, self.texts, strict=True):
            with _naming(name):
                text = config.build(seq_len, cache_dir, rank=rank, world_size=world_size)
            assert isinstance(text, TokenizedText)
            built.append(text)
        return MixedText(built, names, self.weights, seed=self.seed)


@contextmanager
def _naming(text: str) -> Iterator[None]:
    """Put a text's name before the message of an error."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{text}: {error}") from error


class MixedText(TextData):
    """Windows of several tokenized texts, mixed by weights as `MixtureConfig` says.

    The step alone determines the batch. An epoch of the mixture has no length, so
    `num_train_tokens` is None, or 0 if a text is held out as a whole.
    """

    def __init__(
        self,
        texts: Sequence[TokenizedText],
        names: Sequence[str],
        weights: Sequence[float],
        *,
        seed: int,
    ) -> None:
        """Mix the texts, which have the same tokenizer and seq_len; `names` are for messages."""
        self.tokenizer, self.seq_len = texts[0].tokenizer, texts[0].seq_len
        self.fingerprint = " ".join(("mixture", *(text.fingerprint for text in texts)))
        self.num_train_tokens = None if all(text.num_train_tokens for text in texts) else 0
        self.num_validation_bytes = sum(text.num_validation_bytes for text in texts)
        self.validation = MixedWindows([text.validation for text in texts])
        self._texts, self._names, self._seed = texts, names, seed
        self._counts = _rows_of_a_block(weights)

    def check_training(self, batch_size: int) -> None:
        """Check each text; see `BatchSource`."""
        for name, text in zip(self._names, self._texts, strict=True):
            with _naming(name):
                text.check_training(batch_size)

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """Return the batch of a step: a function of the seeds, step and batch size alone."""
        check_batch(step, batch_size)
        first = step * batch_size
        blocks = range(first // BLOCK_ROWS, (first + batch_size - 1) // BLOCK_ROWS + 1)
        drawn = np.concatenate([self._draw(block) for block in blocks], axis=1)
        begin = first % BLOCK_ROWS
        chosen, places = drawn[:, begin : begin + batch_size]
        for i in np.unique(chosen):
            mine = chosen == i
            places[mine] = self._texts[i].windows_at(places[mine])
        return mixed_batch([text.train for text in self._texts], chosen, places)

    def _draw(self, block: int) -> NDArray[np.int64]:
        """Return the text of each row of a block, and the row's place in that text's order."""
        texts = np.arange(len(self._counts))
        chosen = np.repeat(texts, self._counts)
        np.random.default_rng((self._seed, _MIX, block)).shuffle(chosen)
        places = np.empty_like(chosen)
        for i, count in enumerate(self._counts):
            places[chosen == i] = block * count + np.arange(count)
        return np.stack([chosen, places])


def _rows_of_a_block(weights: Sequence[float]) -> list[int]:
    """Return how many rows of a block each text has, `BLOCK_ROWS` in all."""
    borders = np.rint(np.cumsum(weights) / sum(weights) * BLOCK_ROWS).astype(np.int64)
    return np.diff(borders, prepend=0).tolist()
