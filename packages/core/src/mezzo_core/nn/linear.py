"""The linear layer of all our modules, with a special kernel for a decoding step."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo_core.ops.decode_linear import decode_linear


class Linear(nn.Linear):
    """`nn.Linear`, except that a single row without gradients is computed by `decode_linear`.

    Decoding one sequence mostly waits for weights to be read, and on a GPU `decode_linear` has a
    kernel made for that. In all other cases this is plain `nn.Linear`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + bias, (..., K) to (..., N)."""
        if takes_decode_linear(self, x):
            return decode_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


def takes_decode_linear(layer: nn.Linear, x: Tensor) -> bool:
    """Tell whether `decode_linear` can compute this layer on x from its weight and bias alone.

    x must be a single row, gradients must be off, and the weight must be a plain tensor. Quantized,
    sharded and parametrized weights are other kinds of tensors.
    """
    return (
        not torch.is_grad_enabled()
        and math.prod(x.shape[:-1]) == 1  # not numel(), which torch.export takes for a constant
        and type(layer.weight) is nn.Parameter
    )


def is_plain(layer: nn.Module) -> bool:
    """Tell whether a layer computes only x Wᵀ + bias; a subclass of Linear may do more."""
    return (
        type(layer) in (Linear, nn.Linear)
        and type(layer.weight) is nn.Parameter
        and is_unchanged(layer)
    )


def is_unchanged(module: nn.Module) -> bool:
    """Tell whether a module does what its class says: no hooks, and no `forward` of its own."""
    return not (
        "forward" in module.__dict__  # torch 2.8 cannot trace vars()
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
