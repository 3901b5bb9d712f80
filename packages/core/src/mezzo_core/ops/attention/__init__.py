"""Softmax attention with causal masks, windows, ALiBi, packed sequences and free positions."""

from mezzo_core.ops.attention.api import attention as attention
from mezzo_core.ops.attention.request import AttentionOutput as AttentionOutput
