"""A linear layer for a single row, as in a decoding step, optionally with an RMS norm before it."""

from mezzo_core.ops.decode_linear.api import decode_linear as decode_linear
