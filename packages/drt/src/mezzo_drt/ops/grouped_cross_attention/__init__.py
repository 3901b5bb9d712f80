"""Cross-attention to the chunks that each chunk retrieved (section "Grouped Cross-Attention")."""

from mezzo_drt.ops.grouped_cross_attention.api import grouped_cross_attention

__all__ = ["grouped_cross_attention"]
