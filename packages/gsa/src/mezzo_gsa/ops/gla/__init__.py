"""Gated linear attention: a matrix-valued memory that decays by key channel, or by head."""

from mezzo_gsa.ops.gla.api import GLAOutput as GLAOutput
from mezzo_gsa.ops.gla.api import chunk_gla as chunk_gla
from mezzo_gsa.ops.gla.api import recurrent_gla as recurrent_gla
