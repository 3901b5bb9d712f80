"""What a run reads: a frozen dataclass that builds its source of batches."""

from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shorten
from typing import Protocol

from mezzo_core.config_json import check_fields
from mezzo_core.data.batches import BatchSource, TextData
from mezzo_core.data.corpora import open_corpus
from mezzo_core.data.packed import PackedText
from mezzo_core.data.packing import pack_corpus
from mezzo_core.data.streaming import StreamedText, open_stream
from mezzo_core.data.tokenizers import load_tokenizer
from mezzo_core.errors import UserError


class SourceConfig(Protocol):
    """A frozen dataclass that describes what a run reads, a text or a task, and builds it."""

    def build(
        self, seq_len: int, cache_dir: Path | None, *, rank: int = 0, world_size: int = 1
    ) -> BatchSource:
        """Build the source for rows of `seq_len` tokens, as process `rank` of `world_size`.

        `cache_dir` is a folder for what takes long to make; None keeps it in memory.

        Raises:
            UserError: if there can be no such source.
        """
        ...


@dataclass(frozen=True)
class DataConfig:
    """A corpus, a tokenizer and how they become batches.

    Attributes:
        source: "embedded" (three novels, see `mezzo_core.data.embedded`); a file, a folder or a
            glob of .txt, .jsonl (both also .xz or .gz) or .parquet, see
            `mezzo_core.data.find.find_files`; "hub:NAME", "hub:NAME:CONFIG".
        tokenizer: "byte", a path, or "hub:NAME": see `load_tokenizer`.
        text_column: the field with the text, in .jsonl, .parquet and hub data sets.
        validation_fraction: of the tokens, held out by document; a stream holds out a fixed
            number of documents instead (see `StreamedText`).
        seed: of the split and of the order of training.
        streaming: read on the fly, with `datasets`, what is too large to be packed first.
        mask_documents: let no document see another: batches have `cu_seqlens`, and the token that
            begins a document is no target.

    Raises:
        UserError: if a field is of another type, or out of its range.
    """

    source: str = "embedded"
    tokenizer: str = "byte"
    text_column: str = "text"
    validation_fraction: float = 0.05
    seed: int = 0
    streaming: bool = False
    mask_documents: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("source", "tokenizer", "text_column"):
            if not getattr(self, name):
                raise UserError(f"{name} must be text that is not empty")
        if not 0 < self.validation_fraction < 1:
            raise UserError(
                f"validation_fraction must be between 0 and 1, got {self.validation_fraction}"
            )
        if self.seed < 0:
            raise UserError(f"seed must be from 0 to 2^63 - 1, got {self.seed}")

    def build(
        self, seq_len: int, cache_dir: Path | None, *, rank: int = 0, world_size: int = 1
    ) -> TextData:
        """Read and tokenize the corpus, or open the stream.

        Args:
            seq_len: tokens a window, T.
            cache_dir: where packed tokens are kept; None keeps them in memory. A stream needs none.
            rank: this process. Processes that share `cache_dir` wait until rank 0 has built its
                data, which checks the packed tokens.
            world_size: how many processes there are, for a stream.

        Raises:
            UserError: if the corpus or the tokenizer cannot be used, or there is too little text.
        """
        if type(seq_len) is not int or not 0 < seq_len < 2**31:
            raise UserError(f"seq_len must be from 1 to 2^31 - 1, got {shorten(seq_len)}")
        tokenizer = load_tokenizer(self.tokenizer)
        if self.streaming:
            return StreamedText(
                open_stream(self.source, self.text_column, rank=rank, world_size=world_size),
                tokenizer,
                seq_len=seq_len,
                seed=self.seed,
                mask_documents=self.mask_documents,
            )
        corpus = open_corpus(self.source, self.text_column)
        return PackedText(
            # The first process has just checked what the others find.
            pack_corpus(corpus, tokenizer, cache_dir, check=rank == 0),
            tokenizer,
            seq_len=seq_len,
            validation_fraction=self.validation_fraction,
            seed=self.seed,
            mask_documents=self.mask_documents,
        )
