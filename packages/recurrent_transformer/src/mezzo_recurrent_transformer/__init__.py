"""The Recurrent Transformer: each layer attends to keys and values of its own outputs."""

from mezzo_recurrent_transformer.block import RecurrentBlock as RecurrentBlock
from mezzo_recurrent_transformer.block import RecurrentBlockConfig as RecurrentBlockConfig
from mezzo_recurrent_transformer.stack import RecurrentStack as RecurrentStack
from mezzo_recurrent_transformer.stack import RecurrentStackConfig as RecurrentStackConfig
from mezzo_recurrent_transformer.stack import scaled as scaled
from mezzo_recurrent_transformer.transformer import TransformerBlock as TransformerBlock
from mezzo_recurrent_transformer.transformer import (
    TransformerBlockConfig as TransformerBlockConfig,
)

__version__ = "0.1.0"
