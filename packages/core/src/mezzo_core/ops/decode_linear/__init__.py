"""A linear layer on the one row of a decoding step, with the RMS norm before it."""

from mezzo_core.ops.decode_linear.api import decode_linear as decode_linear
