"""The parts of the tiled algorithm as Triton kernels; `eager` has their definitions."""

from mezzo_recurrent_transformer.ops.recurrent_layers.triton.narrow import (
    narrow_leaf,
    narrow_leaf_bwd,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.products import (
    product,
    product_add,
    product_gelu,
    product_gelu_bwd,
    product_partial,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import (
    add_norm_weight_grad,
    add_normed,
    head_products,
    normed,
    normed_bwd,
    split_pair,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.steps import (
    attend_leaves,
    attend_step,
    leaves_bwd,
    pairs_step_bwd,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.tile import (
    attend_earlier,
    attend_tile,
    attend_tile_bwd,
    pairs_bwd,
)

__all__ = [
    "add_norm_weight_grad",
    "add_normed",
    "attend_earlier",
    "attend_leaves",
    "attend_step",
    "attend_tile",
    "attend_tile_bwd",
    "head_products",
    "leaves_bwd",
    "narrow_leaf",
    "narrow_leaf_bwd",
    "normed",
    "normed_bwd",
    "pairs_bwd",
    "pairs_step_bwd",
    "product",
    "product_add",
    "product_gelu",
    "product_gelu_bwd",
    "product_partial",
    "split_pair",
]
