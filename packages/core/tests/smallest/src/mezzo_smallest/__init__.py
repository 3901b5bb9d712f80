"""The smallest package of a paper: a mixer on an op that exists, and a recipe."""

from dataclasses import dataclass

from mezzo_core.nn import AttentionConfig
from mezzo_core.nn.attention import Attention


@dataclass(frozen=True)
class LookBackConfig:
    """A head of attention to a few tokens."""

    window_size: int = 4

    def build(self, d_model: int) -> Attention:
        """Build the mixer, on torch's default device."""
        return AttentionConfig(head_dim=d_model, window_size=self.window_size).build(d_model)
