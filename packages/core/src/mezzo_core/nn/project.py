"""A layer on one row: a decoding step's product, by the op that is made for it."""

import torch
from torch import Tensor, nn

from mezzo_core.ops.decode_linear import decode_linear


def project(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return layer(x), (..., K) to (..., N), by `decode_linear` where that does the same."""
    return decode_linear(x, layer.weight, layer.bias) if suits_op(layer, x) else layer(x)


def suits_op(layer: nn.Linear, x: Tensor) -> bool:
    """Tell whether `decode_linear` does all that layer(x) would, for one row and no gradients.

    The layer may do more than x Wᵀ + bias: if it is of a subclass (adapters), its weight a tensor
    of another kind (quantized, sharded), or if somebody gave it hooks or a forward of its own.
    """
    return (
        not torch.is_grad_enabled()
        and x.shape[:-1].numel() == 1
        and type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and "forward" not in vars(layer)
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )
