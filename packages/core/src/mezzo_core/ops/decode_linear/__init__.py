"""A linear layer on the few rows of a decoding step, with the RMS norm before it."""

from mezzo_core.ops.decode_linear.api import MAX_ROWS as MAX_ROWS
from mezzo_core.ops.decode_linear.api import decode_linear as decode_linear
