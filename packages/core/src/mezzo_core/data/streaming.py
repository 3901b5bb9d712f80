"""Text that is read on the fly, with `datasets`, and that a resumed run continues to read.

The shuffle buffer of `datasets` is lost at a restart. Here documents are shuffled in blocks
instead: a resumed run reads its block again, and so sees exactly the same batches.
"""

import itertools
import json
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mezzo_core.data.batches import Batch, TextData, Windows, make_batch
from mezzo_core.data.corpora import Corpus, Piece, Records, pieces_of
from mezzo_core.data.text_stream import TextStream
from mezzo_core.data.tokenized_corpus import tokenize_corpus
from mezzo_core.data.tokenized_text import after_end_token, all_documents, target_bytes
from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.errors import UserError

# Documents that are shuffled together, or fewer if they have so many characters. A resumed run
# reads at most this much again.
BLOCK_DOCUMENTS, BLOCK_CHARACTERS = 1024, 1 << 24
# Documents that are tokenized together.
_TOKENIZED_DOCUMENTS = 32


@dataclass(frozen=True)
class _Cursor:
    """The place of a document in the shuffled stream, from which it can be read again."""

    epoch: int = 0
    block: int = 0
    index: int = 0  # in the shuffled block
    block_start: dict[str, Any] | None = None  # state of the data set; None at an epoch's start


class _Document(NamedTuple):
    cursor: _Cursor
    tokens: NDArray[Any]  # with the end token


class StreamedText(TextData):
    """A stream that is cut into windows while it is read, epoch after epoch.

    A document is a row of the data set, or a file (a file of more than `PIECE_CHARACTERS` counts as
    several documents). The held-out documents are those of a text of its own, if one is given. Else
    they are the first `text_stream.VALIDATION_DOCUMENTS`, or fewer if they are long: of the split
    "validation" of a hub data set if it has one, else of the stream itself. A stream that has no
    more documents than that holds out a tenth of them.

    The other documents are dealt out to the processes in turn (of a hub data set whole files, if
    there are as many for each process), and a process begins anew when it has read all of its own.
    With masked documents a window has at most T // 16 + 2 documents; if more would fit, the rest of
    the window is padding.

    Batches come in order: `train_batch` must be called for one step after the other, starting from
    step 0, or in a resumed run from the step at which `state_dict` was called. See `BatchSource`
    for several processes.

    The `fingerprint` is computed without reading the whole text: from the held-out documents, and
    for files from their names, sizes, beginnings and ends. It does not change if a long file
    changes in the middle and keeps its size, or if a hub data set changes beyond its held-out
    documents.
    """

    reads_shard = True
    num_train_tokens = None

    def __init__(
        self,
        stream: TextStream,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        seed: int,
        mask_documents: bool,
    ) -> None:
        """Tokenize the held-out documents; nothing else is read yet.

        Raises:
            UserError: if the held-out documents have no text.
        """
        self.tokenizer, self.seq_len = tokenizer, seq_len
        self._stream, self._seed = stream, seed
        pieces = [Piece(text, True) for text in stream.validation]
        held_out = Corpus(f"the validation documents of {stream.name}", "", lambda: iter(pieces))
        tokenized = tokenize_corpus(held_out, tokenizer, None)
        ranges = all_documents(tokenized.ends)
        self.validation = Windows(
            tokenized.tokens,
            after_end_token(ranges, tokenized.ends),
            seq_len=seq_len,
            pad=tokenizer.eos_token,
            mask_documents=mask_documents,
        )
        self.num_validation_bytes = target_bytes(tokenized, ranges, tokenizer, mask_documents)
        known = (stream.identity, *tokenized.checksums, tokenizer.identity)
        self.fingerprint = " ".join(("stream", *filter(None, known)))
        self._max_documents = seq_len // 16 + 2 if mask_documents else 0
        self._start(0, _Cursor(), 0)

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """Return this process's part of the next batch: batch_size / world_size windows.

        Raises:
            ValueError: if `step` is not the next one, or the number of processes does not divide
                `batch_size`.
            UserError: if a document cannot be read, or the shard has none.
        """
        if step != self._step:
            raise ValueError(f"a stream is read in order: step {self._step} is next, got {step}")
        num_rows, rest = divmod(batch_size, self._stream.world_size)
        if rest or num_rows == 0:
            raise ValueError(
                f"batch_size must be a multiple of the {self._stream.world_size} processes, "
                f"got {batch_size}"
            )
        windows = [self._window() for _ in range(num_rows)]
        self._step += 1
        rows, real, ends = (np.stack(parts) for parts in zip(*windows, strict=True))
        return make_batch(rows, real, ends, self._max_documents)

    def check_training(self, batch_size: int) -> None:
        """Read the first document to train on too; see `BatchSource`."""
        super().check_training(batch_size)
        self._look()

    def _look(self) -> None:
        """Read the next document, if none waits."""
        if not self._waiting:
            self._waiting.append(next(self._documents))

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next window, as a small dict of JSON values."""
        cursor = self._waiting[0].cursor if self._waiting else self._next
        state = {
            "step": self._step,
            "cursor": asdict(cursor),
            "used": self._used,
            "rank": self._stream.rank,
            "world_size": self._stream.world_size,
        }
        return {**state, "checksum": _checksum_of(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that the same process saved, among the same number of processes.

        Raises:
            UserError: if the state is of a run that did not stream, of another process or number
                of processes, or damaged, or if the text no longer has its place.
        """
        if state == {}:
            raise UserError(
                "this checkpoint is of a run that did not stream: set streaming=False "
                "(--no-streaming)"
            )
        place = {**state} if isinstance(state, dict) else {}
        checksum = place.pop("checksum", None)
        if checksum is None or checksum != _checksum_of(place):
            raise UserError("the checkpoint's place in the stream is damaged")
        mine = (self._stream.rank, self._stream.world_size)
        if (place["rank"], place["world_size"]) != mine:
            raise UserError(
                f"this place in the stream is of part {place['rank']} of "
                f"{place['world_size']}, and this process reads part {mine[0]} of {mine[1]}: "
                "a streamed run goes on with as many processes and the same context_parallel "
                "(--context-parallel) as it began with"
            )
        cursor, used = _Cursor(**place["cursor"]), place["used"]
        self._start(place["step"], cursor, used)
        self._look()
        first = self._waiting[0]
        found = first.cursor == cursor and used < len(first.tokens)
        if not found and (cursor, used) != (_Cursor(), 0):
            raise UserError(
                f"the checkpoint's place in {self._stream.name} is not there any more: the text "
                "has changed since"
            )

    def _start(self, step: int, cursor: _Cursor, used: int) -> None:
        self._step = step
        self._next = cursor
        self._documents = self._read(cursor)
        self._waiting: deque[_Document] = deque()
        self._used = used  # tokens of the first waiting document that earlier windows have used

    def _window(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the next T tokens and the one after them, which the next window starts with."""
        length = self.seq_len
        have = sum(len(document.tokens) for document in self._waiting) - self._used
        while have < length + 1:
            document = next(self._documents)
            self._waiting.append(document)
            have += len(document.tokens)
        row = np.full(length + 1, self.tokenizer.eos_token, dtype=np.int64)
        ends = np.zeros(length, dtype=bool)
        filled, begin, count = 0, self._used, 0
        for document in self._waiting:
            part = document.tokens[begin : begin + length + 1 - filled]
            row[filled : filled + len(part)] = part
            filled += len(part)
            done = begin + len(part) == len(document.tokens)
            begin = 0
            if not done or filled > length:
                continue
            ends[filled - 1] = True
            count += 1
            if count == self._max_documents - 1:  # the padding counts as the last document
                break
        self._advance(min(filled, length))
        return row, np.arange(length + 1) < filled, ends

    def _advance(self, count: int) -> None:
        self._used += count
        while self._waiting and self._used >= len(self._waiting[0].tokens):
            self._used -= len(self._waiting.popleft().tokens)

    def _read(self, start: _Cursor) -> Iterator[_Document]:
        """Yield the documents from a place on, epoch after epoch, without end."""
        epoch, empty = start.epoch, False
        while True:
            first = start if epoch == start.epoch else _Cursor(epoch)
            found = False
            for cursor, texts in self._blocks(first):
                for at in range(cursor.index, len(texts), _TOKENIZED_DOCUMENTS):
                    group = texts[at : at + _TOKENIZED_DOCUMENTS]
                    for i, tokens in enumerate(self.tokenizer.encode_batch(group)):
                        place = _Cursor(epoch, cursor.block, at + i, cursor.block_start)
                        if len(tokens):
                            found = True
                            begin, end = self.tokenizer.begin_tokens, self.tokenizer.eos_token
                            yield _Document(place, np.array([*begin, *tokens, end]))
            if not found and empty:
                others = " or fewer processes" if self._stream.world_size > 1 else ""
                raise UserError(
                    f"no training text in {self._stream.name} for process {self._stream.rank} of "
                    f"{self._stream.world_size}, beside the held-out documents: give more "
                    f"text{others}, a text of its own to validate on (--validation-data), or "
                    "streaming=False (--no-streaming)"
                )
            empty = not found
            epoch += 1

    def _blocks(self, start: _Cursor) -> Iterator[tuple[_Cursor, list[str]]]:
        """Yield the blocks of an epoch from a place on, each block's documents shuffled."""
        dataset = self._stream.dataset
        dataset.load_state_dict(start.block_start or {})
        # `set_epoch` is avoided because it makes datasets 5.2 distribute the shards differently, so
        # that other documents would be skipped than those held out. A block ends with a document of
        # this process, so the next block skips those of the others (`every - 1`) first.
        every = self._stream.every
        first = every - 1 if start.block_start else self._stream.skipped
        rows = itertools.islice(dataset, first, None, every)
        records = Records(self._stream.text_column, self._stream.skip_bad)
        texts = (piece.text for piece in pieces_of(rows, records, self._stream.name))
        number, block_start, index = start.block, start.block_start, start.index
        while block := _block(texts):
            after = dataset.state_dict()
            order = np.random.default_rng((self._seed, start.epoch, number)).permutation(len(block))
            yield _Cursor(start.epoch, number, index, block_start), [block[i] for i in order]
            number, block_start, index = number + 1, after, 0


def _block(texts: Iterator[str]) -> list[str]:
    """Return the next documents that are shuffled together."""
    block: list[str] = []
    characters = 0
    while len(block) < BLOCK_DOCUMENTS and characters < BLOCK_CHARACTERS:
        text = next(texts, None)
        if text is None:
            break
        block.append(text)
        characters += len(text)
    return block


def _checksum_of(state: dict[str, Any]) -> int | None:
    """Return the checksum of JSON values; None for other values, which no saved state has."""
    try:
        return zlib.crc32(json.dumps(state, sort_keys=True).encode())
    except (TypeError, ValueError, RecursionError):
        return None
