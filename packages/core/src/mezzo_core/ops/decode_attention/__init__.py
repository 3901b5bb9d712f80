"""Softmax attention of one query a row over a cache of keys and values, and the cache's growth."""

from mezzo_core.ops.decode_attention.api import append_token_ as append_token_
from mezzo_core.ops.decode_attention.api import decode_attention as decode_attention
