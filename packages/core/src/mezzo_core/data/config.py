"""The configuration of a run's data: a frozen dataclass that builds its source of batches."""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from reprlib import repr as shorten
from typing import Protocol

from mezzo_core.config_json import check_fields, check_rules
from mezzo_core.data.batches import BatchSource, TextData
from mezzo_core.data.corpora import Corpus, open_corpus
from mezzo_core.data.streaming import StreamedText
from mezzo_core.data.text_stream import open_stream
from mezzo_core.data.tokenized_corpus import tokenize_corpus
from mezzo_core.data.tokenized_text import TokenizedText
from mezzo_core.data.tokenizer_files import load_tokenizer
from mezzo_core.data.tokenizers import keeps_line_breaks
from mezzo_core.errors import UserError

logger = logging.getLogger(__name__)


class SourceConfig(Protocol):
    """A frozen dataclass that describes the data of a run (a text or a task) and builds it."""

    def build(
        self, seq_len: int, cache_dir: Path | None, *, rank: int = 0, world_size: int = 1
    ) -> BatchSource:
        """Build the source for rows of `seq_len` tokens, as process `rank` of `world_size`.

        `cache_dir` is a folder for results that take long to compute, such as tokens. With None
        they stay in memory.

        Raises:
            UserError: if the source cannot be built.
        """
        ...


@dataclass(frozen=True)
class DataConfig:
    """A corpus, a tokenizer and how they become batches.

    Attributes:
        source: "embedded" (three novels, see `mezzo_core.data.embedded`); or a file, a folder or a
            glob of .txt, .jsonl, .json, .csv (all also .xz, .gz or .zst) or .parquet files (see
            `mezzo_core.data.find.find_files`); or "hub:OWNER/NAME" or "hub:OWNER/NAME:CONFIG".
        tokenizer: "byte", a path, or "hub:NAME": see `load_tokenizer`.
        text_column: the field with the text, in all but .txt files.
        validation_fraction: share of the tokens that is held out, in whole documents; 1 leaves
            nothing to train on; a stream holds out its first documents, whatever this says. See
            `StreamedText`.
        add_bos: let each document begin with the tokenizer's token for that, as Llama and Mistral
            know it.
        validation_source: another text to validate on; then nothing of `source` is held out.
        seed: seed of the split and of the training order.
        streaming: read the text on the fly, with `datasets`. This is for a corpus that is too
            large to be tokenized before training.
        mask_documents: keep documents from attending to each other. Batches then have
            `cu_seqlens`, and the first token of a document is not a target.
        skip_bad: leave out records without text, and say in the log which came first and how many
            they are. Without it the first one is an error.

    Raises:
        UserError: if a field has the wrong type or is out of range.
    """

    source: str = "embedded"
    tokenizer: str = "byte"
    text_column: str = "text"
    validation_fraction: float = 0.05
    seed: int = 0
    streaming: bool = False
    mask_documents: bool = False
    skip_bad: bool = False
    validation_source: str | None = None
    add_bos: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        texts = ("source", "tokenizer", "text_column", "validation_source")
        rules = {
            **{name: (getattr(self, name) != "", "text that is not empty") for name in texts},
            "validation_fraction": (0 < self.validation_fraction <= 1, "above 0, to 1"),
            "seed": (self.seed >= 0, "from 0 to 2^63 - 1"),
        }
        check_rules(self, rules)

    def build(
        self, seq_len: int, cache_dir: Path | None, *, rank: int = 0, world_size: int = 1
    ) -> TextData:
        """Read and tokenize the corpus, or open the stream.

        Args:
            seq_len: T, the tokens of a window.
            cache_dir: folder for the corpus's tokens; None keeps them in memory. A stream does not
                use it.
            rank: number of this process. Rank 0 checks the stored tokens while it builds its data,
                so processes that share `cache_dir` must wait until it has done so.
            world_size: number of processes, which a stream needs to choose its shard.

        Raises:
            UserError: if the corpus or the tokenizer cannot be used, or there is no text.
        """
        if type(seq_len) is not int or not 0 < seq_len < 2**31:
            raise UserError(f"seq_len must be from 1 to 2^31 - 1, got {shorten(seq_len)}")
        tokenizer = load_tokenizer(self.tokenizer, add_bos=self.add_bos)
        if rank == 0 and not keeps_line_breaks(tokenizer):
            logger.warning(
                "the tokenizer %r turns line breaks into spaces, or drops them: a model of its "
                "tokens neither sees nor writes any",
                self.tokenizer,
            )
        held_out = None
        if self.validation_source is not None:
            try:
                held_out = self._open(self.validation_source)
            except UserError as error:
                raise UserError(f"validation_source (--validation-data): {error}") from error
        if self.streaming:
            return StreamedText(
                open_stream(
                    self.source,
                    self.text_column,
                    held_out=held_out,
                    skip_bad=self.skip_bad,
                    rank=rank,
                    world_size=world_size,
                ),
                tokenizer,
                seq_len=seq_len,
                seed=self.seed,
                mask_documents=self.mask_documents,
            )
        # The other processes find tokens that the first process has just checked.
        tokenize = partial(
            tokenize_corpus, tokenizer=tokenizer, cache_dir=cache_dir, check=rank == 0
        )
        return TokenizedText(
            tokenize(self._open(self.source)),
            tokenizer,
            held_out=None if held_out is None else tokenize(held_out),
            seq_len=seq_len,
            validation_fraction=self.validation_fraction,
            seed=self.seed,
            mask_documents=self.mask_documents,
        )

    def _open(self, source: str) -> Corpus:
        return open_corpus(source, self.text_column, skip_bad=self.skip_bad)
