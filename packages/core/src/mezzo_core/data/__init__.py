"""Sources of batches: text (corpora, tokenizers, tokenized corpora, streams) and tasks."""

from mezzo_core.data.answers import AnswersConfig as AnswersConfig
from mezzo_core.data.batches import Batch as Batch
from mezzo_core.data.batches import BatchSource as BatchSource
from mezzo_core.data.batches import TextData as TextData
from mezzo_core.data.config import DataConfig as DataConfig
from mezzo_core.data.config import SourceConfig as SourceConfig
from mezzo_core.data.mixture import MixtureConfig as MixtureConfig
from mezzo_core.data.rows import Rows as Rows
from mezzo_core.data.rows import RowsData as RowsData
from mezzo_core.data.stop_texts import stop_texts as stop_texts
from mezzo_core.data.stream_decoder import StreamDecoder as StreamDecoder
from mezzo_core.data.tokenizer_files import load_tokenizer as load_tokenizer
from mezzo_core.data.tokenizers import Tokenizer as Tokenizer
from mezzo_core.ops.linear_cross_entropy import NO_TARGET as NO_TARGET
