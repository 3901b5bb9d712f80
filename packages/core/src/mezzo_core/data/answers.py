"""Supervised fine-tuning on prompts with answers: the model learns the answers alone."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mezzo_core.config_json import check_fields
from mezzo_core.data.batches import Batch, BatchSource, check_batch, check_batch_size, make_batch
from mezzo_core.data.config import DataConfig
from mezzo_core.data.continuations import Continuations
from mezzo_core.data.examples import encode_example, parse_example, read_examples
from mezzo_core.data.tokenizer_files import load_tokenizer
from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.errors import UserError

logger = logging.getLogger(__name__)
_SPLIT, _ORDER = 0, 1
Example = tuple[Sequence[int], Sequence[bool]]
"""Tokens, and which of them are learned."""


@dataclass(frozen=True)
class AnswersConfig:
    """Examples in .jsonl files, packed into rows; the targets are the answers' tokens alone.

    `mezzo_core.data.examples.parse_example` says what an example is. A row holds as many whole
    examples as fit, in the files' order, and none attends to another.

    Attributes:
        text: where the examples are and how they are read: `source`, `validation_source`,
            `tokenizer`, `add_bos`, `seed`, `skip_bad` (examples that are broken or too long are
            left out), and `validation_fraction`, the share of the examples that is held out.
    """

    text: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.text.streaming:
            raise UserError("streaming (--streaming) must be False: examples are read at once")
        if self.text.text_column != DataConfig.text_column:
            raise UserError(
                f"text_column is for texts, and examples name their fields, got "
                f"{self.text.text_column!r}"
            )

    @property
    def source(self) -> str:
        """Where the examples are, for messages."""
        return self.text.source

    def build(
        self, seq_len: int, cache_dir: Path | None, *, rank: int = 0, world_size: int = 1
    ) -> "AnswersData":
        """Read all examples; each process reads them all.

        Raises:
            UserError: if an example is broken or longer than a row (the message names its line), or
                there are too few.
        """
        text = self.text
        tokenizer = load_tokenizer(text.tokenizer, add_bos=text.add_bos)
        train = _read(text.source, tokenizer, seq_len, text.skip_bad)
        if text.validation_source is not None:
            held_out = _read(text.validation_source, tokenizer, seq_len, text.skip_bad)
        else:
            train, held_out = _split(train, text.validation_fraction, text.seed)
        if not held_out or (not train and text.validation_fraction < 1):
            raise UserError(
                f"{text.source}: a part to train on and one to validate on need an example each: "
                "give more examples, or those to validate on by --validation-data"
            )
        return AnswersData(train, held_out, tokenizer, seq_len=seq_len, seed=text.seed)


class _Packed(NamedTuple):
    tokens: NDArray[np.int32]  # (N, T + 1)
    learned: NDArray[np.bool_]  # (N, T + 1)
    ends: NDArray[np.bool_]  # (N, T), True at the last token of an example

    def batch(self, rows: NDArray[np.int64], max_documents: int) -> Batch:
        """Return these rows as a batch; one beyond the last has no targets."""
        is_real = rows < len(self.tokens)
        rows = np.where(is_real, rows, 0)
        learned = self.learned[rows] & is_real[:, None]
        tokens = self.tokens[rows].astype(np.int64)
        return make_batch(tokens, learned, self.ends[rows], max_documents)


class AnswersData(BatchSource):
    """Rows of examples; every process gets the whole batch, which the step alone determines.

    An epoch takes the rows in an order of its own.
    """

    def __init__(
        self, train: Sequence[Example], held_out: Sequence[Example], tokenizer: Tokenizer, *,
        seq_len: int, seed: int,
    ) -> None:  # fmt: skip
        """Pack the examples, each of at most T + 1 tokens."""
        self.tokenizer, self.seq_len, self._seed = tokenizer, seq_len, seed
        self.vocab_size = tokenizer.vocab_size
        self._train, self._test = (
            _pack(part, seq_len, tokenizer.eos_token) for part in (train, held_out)
        )
        ends = np.concatenate([self._train.ends, self._test.ends])
        self._max_documents = 1 + int(ends.sum(1).max())  # padding counts as a document too
        self.num_train_tokens = len(self._train.tokens) * seq_len
        digest = sha256()
        for tokens, learned in (*train, *held_out):
            digest.update(np.stack([tokens, learned]).astype(np.int64).data)
        self.fingerprint = f"answers {digest.hexdigest()} {tokenizer.identity}"

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """Return the batch of a step: a function of the seed, the step and the batch size alone."""
        check_batch(step, batch_size)
        num_rows = len(self._train.tokens)
        if not num_rows:
            raise ValueError("validation_fraction = 1 holds out all examples: nothing to train on")
        places = np.arange(step * batch_size, (step + 1) * batch_size)
        epochs, places = np.divmod(places, num_rows)
        orders = {
            epoch: np.random.default_rng((self._seed, _ORDER, epoch)).permutation(num_rows)
            for epoch in np.unique(epochs).tolist()
        }
        rows = [orders[epoch][place] for epoch, place in zip(epochs.tolist(), places, strict=True)]
        return self._train.batch(np.array(rows), self._max_documents)

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the held-out rows, in order; rows without targets complete the last batch."""
        check_batch_size(batch_size)
        for first in range(0, len(self._test.tokens), batch_size):
            yield self._test.batch(np.arange(first, first + batch_size), self._max_documents)


def _read(source: str, tokenizer: Tokenizer, seq_len: int, skip_bad: bool) -> list[Example]:
    """Return the examples of files, encoded."""
    continuations = Continuations(tokenizer)
    examples: list[Example] = []
    bad: list[str] = []
    for where, line in read_examples(source):
        try:
            tokens, learned = encode_example(parse_example(line, where), continuations)
            if len(tokens) > seq_len + 1:
                raise UserError(
                    f"{where}: an example of {len(tokens)} tokens does not fit into a row of "
                    f"seq_len + 1 = {seq_len + 1}"
                )
            if not any(learned[1:]):
                raise UserError(f"{where}: the prompt has no token for an answer to follow")
        except UserError as error:
            if not skip_bad:
                raise UserError(f"{error}; skip_bad (--skip-bad) leaves such lines out") from error
            bad.append(str(error))
        else:
            examples.append((tokens, learned))
    if bad:
        logger.warning("left out %d examples, the first: %s", len(bad), bad[0])
    if not examples:
        raise UserError(f"{source}: there is no example")
    return examples


def _split(
    examples: Sequence[Example], fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Draw examples to hold out, at least one; both parts keep the examples' order."""
    count = max(round(len(examples) * fraction), 1)
    order = np.random.default_rng((seed, _SPLIT)).permutation(len(examples))
    chosen = set(order[:count].tolist())
    parts: tuple[list[Example], list[Example]] = ([], [])
    for i, example in enumerate(examples):
        parts[i in chosen].append(example)
    return parts


def _pack(examples: Sequence[Example], seq_len: int, pad: int) -> _Packed:
    """Lay examples side by side in rows of T + 1 tokens, in their order."""
    rows: list[list[Example]] = []
    room = 0
    for example in examples:
        if len(example[0]) > room:
            rows.append([])
            room = seq_len + 1
        rows[-1].append(example)
        room -= len(example[0])
    tokens = np.full((len(rows), seq_len + 1), pad, np.int32)
    learned = np.zeros((len(rows), seq_len + 1), np.bool_)
    ends = np.zeros((len(rows), seq_len + 1), np.bool_)
    for i, row in enumerate(rows):
        place = 0
        for its, are_learned in row:
            after = place + len(its)
            tokens[i, place:after], learned[i, place:after] = its, are_learned
            ends[i, after - 1] = True
            place = after
    return _Packed(tokens, learned, ends[:, :-1])
