"""The Transformer that the paper compares with, built from core's block of attention."""

from dataclasses import dataclass

from mezzo_core.nn import Attention, AttentionConfig, Block, MLPConfig
from mezzo_core.nn.mlp import GELUMLP

from mezzo_recurrent_transformer.layer import LayerConfig, init_as_released


@dataclass(frozen=True)
class TransformerBlockConfig(LayerConfig):
    """Describes a `TransformerBlock`; the attributes are those of `LayerConfig`."""

    def build(self, d_model: int) -> "TransformerBlock":
        """Build the block, on torch's default device; a ValueError if head_dim does not divide."""
        return TransformerBlock(d_model, self)


class TransformerBlock(Block):
    """A causal Transformer layer with normalized queries and keys ("The Transformer layer").

    It equals a Recurrent Transformer whose block is as long as the sequence, and has as many
    weights.
    """

    mixer: Attention
    mlp: GELUMLP

    def __init__(self, d_model: int, config: LayerConfig) -> None:
        config.check_width(d_model)
        attention = AttentionConfig(
            config.head_dim,
            rope_base=None,
            alibi=config.alibi,
            qk_norm=config.norm,
            norm_eps=config.norm_eps,
        )
        super().__init__(
            attention.build(d_model),
            MLPConfig("gelu", config.hidden).build(d_model),
            d_model,
            config.norm_eps,
            config.norm,
            config.residual_scale,
        )
        self.config = config

    def init_own_weights(self) -> None:
        """Draw the weights as the released code does, if `init_layer` asks for it."""
        if self.config.init_layer is not None:
            init_as_released(self.mixer, self.mlp, self.config.init_layer)
