"""Softmax attention: causal, windowed, ALiBi, packed, by positions; with its log-sum-exp."""

from mezzo_core.ops.attention.api import attention as attention
from mezzo_core.ops.attention.request import AttentionOutput as AttentionOutput
