"""Attention of one query per row over a cache of keys and values; appending to the cache."""

from mezzo_core.ops.decode_attention.api import append_token_ as append_token_
from mezzo_core.ops.decode_attention.api import decode_attention as decode_attention
