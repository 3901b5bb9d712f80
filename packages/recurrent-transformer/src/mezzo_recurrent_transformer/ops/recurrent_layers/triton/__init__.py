"""The parts of the tiled algorithm as Triton kernels; `eager` has their definitions."""

from mezzo_recurrent_transformer.ops.recurrent_layers.triton.earlier import (
    attend_earlier as attend_earlier,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.later import pairs_bwd as pairs_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.tile import (
    attend_tile as attend_tile,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.tile import (
    attend_tile_bwd as attend_tile_bwd,
)
