"""The Recurrent Transformer: each layer attends to keys and values of its own outputs."""

from typing import TYPE_CHECKING

from mezzo_core.lazy import lazy_names

if TYPE_CHECKING:
    from mezzo_recurrent_transformer.block import RecurrentBlock as RecurrentBlock
    from mezzo_recurrent_transformer.block import RecurrentBlockConfig as RecurrentBlockConfig
    from mezzo_recurrent_transformer.stack import RecurrentStack as RecurrentStack
    from mezzo_recurrent_transformer.stack import RecurrentStackConfig as RecurrentStackConfig
    from mezzo_recurrent_transformer.stack import scaled as scaled
    from mezzo_recurrent_transformer.transformer import TransformerBlock as TransformerBlock
    from mezzo_recurrent_transformer.transformer import (
        TransformerBlockConfig as TransformerBlockConfig,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "block": ("RecurrentBlock", "RecurrentBlockConfig"),
            "stack": ("RecurrentStack", "RecurrentStackConfig", "scaled"),
            "transformer": ("TransformerBlock", "TransformerBlockConfig"),
        },
    )

__version__ = "0.1.0"
