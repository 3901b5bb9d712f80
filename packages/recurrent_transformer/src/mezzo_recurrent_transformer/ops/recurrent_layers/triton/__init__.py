"""The parts of the tiled algorithm as Triton kernels; `eager` has their definitions."""

from mezzo_recurrent_transformer.ops.recurrent_layers.triton.earlier import attend_earlier
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.later import pairs_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.leaves import (
    attend_leaves,
    leaves_bwd,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.narrow import (
    is_narrow,
    narrow_leaf,
    narrow_leaf_bwd,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.products import (
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
    split_qkv,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.steps import (
    attend_step,
    pairs_step_bwd,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.tile import (
    attend_tile,
    attend_tile_bwd,
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
    "is_narrow",
    "leaves_bwd",
    "narrow_leaf",
    "narrow_leaf_bwd",
    "normed",
    "normed_bwd",
    "pairs_bwd",
    "pairs_step_bwd",
    "product_add",
    "product_gelu",
    "product_gelu_bwd",
    "product_partial",
    "split_pair",
    "split_qkv",
]
