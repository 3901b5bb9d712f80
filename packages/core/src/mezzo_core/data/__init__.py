"""Sources of batches: text (corpora, tokenizers, tokenized corpora, streams) and tasks."""

from mezzo_core.data.answers import AnswersConfig
from mezzo_core.data.batches import Batch, BatchSource, TextData
from mezzo_core.data.config import DataConfig, SourceConfig
from mezzo_core.data.mixture import MixtureConfig
from mezzo_core.data.rows import Rows, RowsData
from mezzo_core.data.stop_texts import stop_texts
from mezzo_core.data.stream_decoder import StreamDecoder
from mezzo_core.data.tokenizer_files import load_tokenizer
from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.ops.linear_cross_entropy import NO_TARGET

__all__ = [
    "NO_TARGET",
    "AnswersConfig",
    "Batch",
    "BatchSource",
    "DataConfig",
    "MixtureConfig",
    "Rows",
    "RowsData",
    "SourceConfig",
    "StreamDecoder",
    "TextData",
    "Tokenizer",
    "load_tokenizer",
    "stop_texts",
]
