"""Text to batches: corpora, tokenizers, packing, streams."""

from mezzo_core.data.batches import NO_TARGET, Batch, TextData
from mezzo_core.data.config import DataConfig
from mezzo_core.data.tokenizers import StreamDecoder, Tokenizer, load_tokenizer

__all__ = [
    "NO_TARGET",
    "Batch",
    "DataConfig",
    "StreamDecoder",
    "TextData",
    "Tokenizer",
    "load_tokenizer",
]
