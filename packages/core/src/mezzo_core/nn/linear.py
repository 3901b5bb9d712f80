"""The linear layer of every module here: a decoding step's product by the op made for it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo_core.ops.decode_linear import decode_linear


class Linear(nn.Linear):
    """`nn.Linear`, which multiplies one row without gradients by `decode_linear`.

    On a GPU that reads the weight as fast as its memory allows, which decoding one sequence waits
    for. Everything else, and everywhere else, is `nn.Linear`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + bias, (..., K) to (..., N)."""
        if takes_decode_linear(self, x):
            return decode_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


def takes_decode_linear(layer: nn.Linear, x: Tensor) -> bool:
    """Tell whether `decode_linear` computes what the layer's weight and bias alone say of x.

    It needs one row, no gradients, and a plain weight: a quantized, sharded or parametrized one is
    a tensor of another kind.
    """
    return (
        not torch.is_grad_enabled()
        and x.shape[:-1].numel() == 1
        and type(layer.weight) is nn.Parameter
    )


def is_plain(layer: nn.Module) -> bool:
    """Tell whether a layer is a Linear and does no more than its weight and bias say.

    One of a subclass (adapters), or one that was given hooks or a forward of its own, does more.
    """
    return (
        type(layer) in (Linear, nn.Linear)
        and type(layer.weight) is nn.Parameter
        and "forward" not in vars(layer)
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )
