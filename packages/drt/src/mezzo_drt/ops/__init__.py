"""The op of DRT: functions on tensors."""

from mezzo_drt.ops.grouped_cross_attention import Readers, grouped_cross_attention, readers_of

__all__ = ["Readers", "grouped_cross_attention", "readers_of"]
