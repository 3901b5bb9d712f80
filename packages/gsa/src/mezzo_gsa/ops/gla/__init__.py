"""Gated linear attention: a matrix as state, with a decay for each key channel or each head."""

from mezzo_gsa.ops.gla.api import GLAOutput as GLAOutput
from mezzo_gsa.ops.gla.api import chunk_gla as chunk_gla
from mezzo_gsa.ops.gla.api import recurrent_gla as recurrent_gla
from mezzo_gsa.ops.gla.arguments import LayerForm as LayerForm
from mezzo_gsa.ops.gla.step import step_gla_ as step_gla_
from mezzo_gsa.ops.gla.step import step_gla_layer_ as step_gla_layer_
