"""The parts of the tiled algorithm as Triton kernels; `eager` has their definitions."""

from mezzo_recurrent_transformer.ops.recurrent_layers.triton.earlier import (
    attend_earlier as attend_earlier,
)
