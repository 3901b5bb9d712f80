"""The parts of the tiled algorithm as Triton kernels; `eager` has their definitions."""

from mezzo_recurrent_transformer.ops.recurrent_layers.triton.steps import (
    attend_step as attend_step,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.steps import (
    pairs_step_bwd as pairs_step_bwd,
)
