"""The parts of the tiled algorithm in PyTorch: for CPUs, for float64, and to test the kernels.

Everything is computed in float32 (float64 for float64) and rounded at the end.
"""

from mezzo_recurrent_transformer.ops.recurrent_layers.eager.products import (
    product_add,
    product_gelu,
    product_gelu_bwd,
    product_partial,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.eager.rows import (
    add_norm_weight_grad,
    add_normed,
    gelu,
    gelu_bwd,
    head_products,
    normed,
    normed_bwd,
    split_pair,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.eager.steps import (
    attend_leaves,
    attend_step,
    leaves_bwd,
    narrow_leaf,
    narrow_leaf_bwd,
    pairs_step_bwd,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.eager.tile import (
    attend_earlier,
    attend_tile,
    attend_tile_bwd,
    pairs_bwd,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import product

__all__ = [
    "add_norm_weight_grad",
    "add_normed",
    "attend_earlier",
    "attend_leaves",
    "attend_step",
    "attend_tile",
    "attend_tile_bwd",
    "gelu",
    "gelu_bwd",
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
