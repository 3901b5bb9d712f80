"""What the needle tasks have in common: needles in a text, and a question at its end.

    text ... needle ... text ... needle ... text | question | cue answer | text
                                                            ^ a landmark, at a multiple of L

The last token of the cue predicts the first token of the answer. The text before the question is
cut so that the cue begins a chunk. So the landmark before the cue has seen the question, and every
token that predicts the answer can read what this landmark retrieves (the paper's appendix D: "the
landmark token can be inserted before 'is' in the question").
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from mezzo_core.config_json import check_fields, check_rules
from mezzo_core.data import NO_TARGET, Batch, BatchSource, DataConfig, Tokenizer, load_tokenizer
from mezzo_core.data.batches import check_batch, check_batch_size
from mezzo_core.data.corpora import open_corpus
from mezzo_core.data.tokenized_corpus import tokenize_corpus
from mezzo_core.data.tokenized_text import split_documents
from mezzo_core.errors import UserError

from mezzo_drt.needles.haystack import Haystack, Row, Tokens

_TRAIN, _TEST = 0, 1


class Riddle(NamedTuple):
    """What is hidden in a row, and what is asked about it."""

    needles: tuple[Tokens, ...]
    depths: Sequence[float]
    """Where each needle stands in the text: 0 at its beginning, 1 right before the question."""
    question: Tokens
    cue: Tokens
    """The words before the answer; they begin a chunk."""
    answer: Tokens


class Words:
    """Writes a riddle in tokens: words by the tokenizer, and names of random tokens."""

    def __init__(self, tokenizer: Tokenizer, draw: np.random.Generator) -> None:
        self.tokenizer, self.draw = tokenizer, draw

    def names(self, count: int, size: int) -> list[Tokens]:
        """Draw `count` names of `size` tokens each, no two alike: any tokens but the end token."""
        tokens = self.tokenizer.vocab_size - 1
        drawn = self.draw.integers(tokens, size=(count, size))
        while True:
            first = np.unique(drawn, axis=0, return_index=True)[1]
            if len(first) == count:
                return list(drawn + (drawn >= self.tokenizer.eos_token))
            # Redraw only the repeats: many names drawn at once are hardly ever all different.
            again = np.delete(np.arange(count), first)
            drawn[again] = self.draw.integers(tokens, size=(len(again), size))

    def write(self, *parts: str | Tokens) -> Tokens:
        """Join words and names."""
        return np.concatenate(
            [
                np.array(self.tokenizer.encode(part), np.int64) if isinstance(part, str) else part
                for part in parts
            ]
        )


@dataclass(frozen=True)
class AbstractNeedleConfig(ABC):
    """The data of a run: endless rows of text with needles, each drawn when it is needed.

    Attributes:
        text: the text around the needles. Its held-out part is used for the test rows.
        chunk_size: L; the cue begins at a multiple of it.
        test_rows: the number of rows to validate on.
        seed: row i depends on the seed, on its part (training or test), on i and on the length of
            the rows.

    Raises:
        UserError: if a field is of another type or out of range.
    """

    text: DataConfig = field(default_factory=DataConfig)
    chunk_size: int = 64
    test_rows: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        limits = {
            "text": (
                not (self.text.streaming or self.text.mask_documents or self.text.add_bos)
                and self.text.validation_fraction < 1,
                "tokenized before training (streaming=False), with a part to train on, and read "
                "across its documents (mask_documents=False, add_bos=False)",
            ),
            "chunk_size": (self.chunk_size >= 1, "at least 1"),
            "test_rows": (self.test_rows >= 1, "at least 1"),
            "seed": (self.seed >= 0, "0 or more"),
            **self.limits(),
        }
        check_rules(self, limits)

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the task."""

    @property
    @abstractmethod
    def names_needed(self) -> tuple[int, int]:
        """How many names a riddle has, and of how many tokens each."""

    @abstractmethod
    def limits(self) -> dict[str, tuple[bool, str]]:
        """Return, for the task's own fields, whether their limits are met, and what is allowed."""

    @abstractmethod
    def riddle(self, words: Words) -> Riddle:
        """Draw a row's riddle. All riddles of a task have the same sizes under one tokenizer."""

    def build(
        self, seq_len: int, cache_dir: Path | None, *, rank: int = 0, world_size: int = 1
    ) -> "NeedleData":
        """Tokenize the text; every process draws the same rows.

        Raises:
            UserError: if the text cannot be used, the vocabulary has too few names, `seq_len` is no
                int, or a row of `seq_len` tokens cannot hold the needles and the question.
        """
        if type(seq_len) is not int:
            raise UserError(f"seq_len must be an int, got {seq_len!r}")
        tokenizer = load_tokenizer(self.text.tokenizer)
        count, size = self.names_needed
        if (tokenizer.vocab_size - 1) ** size < 2 * count:
            raise UserError(
                f"the {tokenizer.vocab_size} tokens of {self.text.tokenizer!r} give too few names "
                f"of {size} tokens, {2 * count} are needed"
            )
        text = self.text
        corpus = open_corpus(text.source, text.text_column, skip_bad=text.skip_bad)
        tokenized = tokenize_corpus(corpus, tokenizer, cache_dir, check=rank == 0)
        parts = split_documents(tokenized.ends, self.text.validation_fraction, self.text.seed)
        train, test = (Haystack(tokenized.tokens, ranges) for ranges in parts)
        identity = f"{self.name} {' '.join(tokenized.checksums)} {tokenizer.identity}"
        return NeedleData(self, tokenizer, train, test, seq_len=seq_len, fingerprint=identity)


class NeedleData(BatchSource):
    """Rows of text with needles. Every process gets the whole batch, and no row is repeated."""

    tokenizer: Tokenizer

    def __init__(
        self,
        config: AbstractNeedleConfig,
        tokenizer: Tokenizer,
        train: Haystack,
        test: Haystack,
        *,
        seq_len: int,
        fingerprint: str,
    ) -> None:
        """Lay out rows of `seq_len` tokens around the texts of training and test.

        Raises:
            UserError: if a row cannot hold the needles and the question.
        """
        self.seq_len, self.vocab_size = seq_len, tokenizer.vocab_size
        self.fingerprint = fingerprint
        self.tokenizer = tokenizer
        self._config, self._texts = config, (train, test)
        riddle = config.riddle(Words(tokenizer, np.random.default_rng(0)))
        behind = len(riddle.cue) + len(riddle.answer)
        L = config.chunk_size
        # A row has T + 1 tokens; the last one is only a target.
        self._cue_place = max(seq_len + 1 - behind, 0) // L * L
        before = sum(map(len, riddle.needles)) + len(riddle.question)
        self._room = self._cue_place - before
        if self._room < 0:
            least = -(-before // L) * L + behind - 1
            raise UserError(
                f"seq_len must be at least {least} for {config.name} with chunks of {L}, "
                f"got {seq_len}"
            )

    def row(self, index: int, *, is_test: bool) -> Row:
        """Return row `index` of the training or the test part.

        Raises:
            ValueError: if there is no such row.
        """
        if index < 0:
            raise ValueError(f"index must be 0 or more, got {index}")
        part = _TEST if is_test else _TRAIN
        draw = np.random.default_rng((self._config.seed, part, index))
        text = self._texts[part]
        start = int(draw.integers(text.num_tokens))
        riddle = self._config.riddle(Words(self.tokenizer, draw))
        places = np.floor(np.asarray(riddle.depths) * (self._room + 1)).clip(max=self._room)
        parts, inserted = [], 0
        for i in np.argsort(places, kind="stable"):
            parts.append((int(places[i]) + inserted, riddle.needles[i]))
            inserted += len(riddle.needles[i])
        parts.append((self._cue_place - len(riddle.question), riddle.question))
        parts.append((self._cue_place, np.concatenate([riddle.cue, riddle.answer])))
        answer = self._cue_place + len(riddle.cue)
        return Row(text, start, tuple(parts), range(answer, answer + len(riddle.answer)))

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """Return the batch of a step: rows `step * batch_size` and those that follow.

        Raises:
            ValueError: if there is no such step or batch.
        """
        check_batch(step, batch_size)
        first = step * batch_size
        rows = [self.row(i, is_test=False) for i in range(first, first + batch_size)]
        return _batch(rows, 0, self.seq_len)

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the whole test rows; rows of zeros without targets fill the last batch."""
        return (next(pieces) for pieces in self.test_segments(self.seq_len, batch_size))

    def test_segments(self, segment_tokens: int, batch_size: int = 1) -> Iterator[Iterator[Batch]]:
        """Yield the test rows in pieces, `batch_size` rows at a time.

        Each item yields the consecutive segments of its rows, of `segment_tokens` tokens; the last
        one may be shorter. Only one segment is in memory, so rows may have any length.
        `mezzo_core.eval.evaluate.evaluate_segments` takes the items.

        Raises:
            ValueError: if a size is not a positive int.
        """
        check_batch_size(batch_size)
        if type(segment_tokens) is not int or segment_tokens < 1:
            raise ValueError(f"segment_tokens must be at least 1, got {segment_tokens!r}")
        return (
            self._segments(range(first, first + batch_size), segment_tokens)
            for first in range(0, self._config.test_rows, batch_size)
        )

    def _segments(self, indices: range, size: int) -> Iterator[Batch]:
        real = range(indices.start, min(indices.stop, self._config.test_rows))
        rows = [self.row(i, is_test=True) for i in real]
        missing = len(indices) - len(rows)
        for begin in range(0, self.seq_len, size):
            tokens, targets, *_ = _batch(rows, begin, min(begin + size, self.seq_len))
            padding = tokens.new_zeros(missing, tokens.shape[1])
            yield Batch(
                torch.cat([tokens, padding]),
                torch.cat([targets, torch.full_like(padding, NO_TARGET)]),
            )


def _batch(rows: Sequence[Row], begin: int, end: int) -> Batch:
    """Return places `begin` to `end` (exclusive) of some rows."""
    parts = [row.segment(begin, end) for row in rows]
    return Batch(*(torch.from_numpy(np.stack(part)) for part in zip(*parts, strict=True)))
