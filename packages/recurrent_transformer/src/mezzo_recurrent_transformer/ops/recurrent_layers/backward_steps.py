"""The steps of a tile in reverse: what must be done one token after another."""

from types import ModuleType

from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.buffers import BackwardBuffers
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.mlp import mlp_step_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Matrices
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import given_by, leaves


def run_tile_bwd(
    buffers: BackwardBuffers, w: Matrices, slopes: Tensor, form: Form, parts: ModuleType
) -> None:
    """Run the steps of a tile backwards, one after another."""
    t, b = buffers, form.block_size
    at, S = t.attending, t.z.shape[1]
    for leaf in reversed(leaves(S, b)):
        if leaf.stop < S:  # the leaf after this one is done
            new = slice(leaf.stop, leaf.stop + b)
            parts.head_products(t.do[:, new], at.o[:, new], t.delta[:, new])
            size = given_by(leaf.stop, len(leaf))
            parts.leaves_bwd(at, t.do, t.delta, slopes, form, leaf.stop, size, t.dk, t.dv)
        if parts.is_narrow(at.q, form):
            parts.narrow_leaf_bwd(t, w, slopes, form, leaf)
        else:
            run_leaf_bwd(t, w, slopes, form, leaf, parts)


def run_leaf_bwd(
    buffers: BackwardBuffers,
    w: Matrices,
    slopes: Tensor,
    form: Form,
    leaf: range,
    parts: ModuleType,
) -> None:
    """Run the steps of a leaf backwards."""
    t, b = buffers, form.block_size
    for begin in reversed(leaf[::b]):
        parts.pairs_step_bwd(
            *(t.attending, t.do, t.delta, t.raw, w.k_norm, slopes, form, begin // b),
            *(t.dk, t.dv, t.dpair),
        )
        mlp_step_bwd(t.of_step(slice(begin, begin + b)), w, form, parts)
