"""What a step does with its tokens besides attention: the residuals, the MLP, and the pairs."""

from types import ModuleType

import torch
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.buffers import BackwardBuffers
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Matrices
from mezzo_recurrent_transformer.ops.recurrent_layers.products import product


def mlp_step(a: Tensor, x: Tensor, w: Matrices, form: Form, z: Tensor, parts: ModuleType) -> Tensor:
    """Write the outputs z of a step's tokens, and return Wk n and Wv n of n = n1(z), (m, b, B, 2C).

    Args:
        a: (m, b, B, C), the attention's outputs before Wo.
        x: likewise, the layers' inputs.
        w: the weights.
        form: the options.
        z: written, the layers' outputs; one layer's may be where the next one's inputs are.
        parts: `eager` or `triton`.
    """
    r, n = form.residual_scale, torch.empty_like(a)
    h = torch.empty_like(a, dtype=accumulation_dtype(a.dtype))
    g = a.new_empty(*a.shape[:3], w.up.shape[1])
    squares = parts.product_add(a, w.o, x, r, w.n2, form, h, n)
    parts.product_gelu(n, w.up, g, squares, form)
    y = parts.product_partial(g, w.down)
    parts.add_normed(h, y, r, w.n1, form.of_pairs(), z, n)
    return product(n, w.kv)


def mlp_step_bwd(t: BackwardBuffers, w: Matrices, form: Form, parts: ModuleType) -> None:
    """Go back from the pairs and the outputs of a step's tokens to their attention outputs.

    Args:
        t: the buffers of the step.
        w: the weights.
        form: the options.
        parts: `eager` or `triton`.
    """
    r, dz = form.residual_scale, torch.empty_like(t.h)
    partial = parts.product_partial(t.dpair, w.kv.mT, t.dnormed)
    parts.normed_bwd(
        t.dnormed, t.z, w.n1, form.of_pairs(), t.dstream[1:], r, dz, t.dz_scaled, partial
    )
    parts.product_gelu_bwd(t.dz_scaled, w.down.mT, t.u, t.du)
    partial = parts.product_partial(t.du, w.up.mT, t.dhn)
    parts.normed_bwd(t.dhn, t.h, w.n2, form, dz, r, t.dh, t.dh_scaled, partial)
    product(t.dh_scaled, w.o.mT, t.do)
