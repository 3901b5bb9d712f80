"""Cross-attention to the chunks that each chunk retrieved (section "Grouped Cross-Attention")."""

from mezzo_drt.ops.grouped_cross_attention.api import grouped_cross_attention
from mezzo_drt.ops.grouped_cross_attention.readers import Readers, readers_of

__all__ = ["Readers", "grouped_cross_attention", "readers_of"]
