"""The definition of the gated scan, in eager PyTorch; autograd differentiates it."""

import torch
from mezzo_core.ops.scan import linear_scan
from torch import Tensor

from mezzo_rat.ops.forget_gate import forget_gate


def gated_scan_reference(
    zvg: Tensor,
    gate_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute h[t] = f[t] h[t-1] + (1 - f[t]) v[t] and sigmoid(z[t]) h[t], f = sigmoid(g + b).

    This is equation 3 of the RAT paper with one chunk, followed by the layer's output gate.
    Arguments and results are those of `api.gated_scan`.
    """
    z, v, g = zvg.chunk(3, dim=-1)
    padding = None
    if lengths is not None:
        padding = (torch.arange(zvg.shape[1], device=zvg.device) >= lengths[:, None])[..., None]
        # The inputs are masked too, and not only the gates: a NaN in the padding would otherwise
        # reach the gradients.
        v, g = v.masked_fill(padding, 0.0), g.masked_fill(padding, 0.0)
        z = z.masked_fill(padding, float("-inf"))
    keep, write = forget_gate(g, gate_bias)
    if padding is not None:
        keep = keep.masked_fill(padding, 1.0)
    write = write * v
    h, final_state = linear_scan(
        keep, write, initial_state=initial_state, cu_seqlens=cu_seqlens, impl="reference"
    )
    return (z.to(h.dtype).sigmoid() * h).to(zvg.dtype), final_state
