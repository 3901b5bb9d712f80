"""The op of DRT: functions on tensors."""

from mezzo_drt.ops.grouped_cross_attention import grouped_cross_attention

__all__ = ["grouped_cross_attention"]
