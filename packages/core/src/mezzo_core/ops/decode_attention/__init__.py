"""Softmax attention of one query a row over a cache of keys and values."""

from mezzo_core.ops.decode_attention.api import decode_attention as decode_attention
