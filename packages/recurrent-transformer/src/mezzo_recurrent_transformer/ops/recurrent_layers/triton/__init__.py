"""The parts of the tiled algorithm as Triton kernels; `eager` has their definitions."""

from mezzo_recurrent_transformer.ops.recurrent_layers.triton.earlier import (
    attend_earlier as attend_earlier,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.later import pairs_bwd as pairs_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import (
    add_norm_weight_grad as add_norm_weight_grad,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import add_normed as add_normed
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import gelu as gelu
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import gelu_bwd as gelu_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import (
    head_products as head_products,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import normed as normed
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import normed_bwd as normed_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import split_pair as split_pair
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import split_qkv as split_qkv
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.steps import attend_step as attend_step
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.steps import (
    pairs_step_bwd as pairs_step_bwd,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.tile import attend_tile as attend_tile
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.tile import (
    attend_tile_bwd as attend_tile_bwd,
)
