"""Division of positions by a length that torch.compile gets right."""

import torch
from torch import Tensor


def floor_divide(positions: Tensor, length: int) -> Tensor:
    """Return positions // length: the chunk of each position.

    Use this wherever code that may be compiled divides tensors of positions. On a CPU, inductor
    (seen in torch 2.13 and 2.15) splits the loop of `arange(T) // length` into T // length runs of
    `length` elements, and does not write the last T % length elements. As a registered op, the
    division is hidden from inductor.

    Args:
        positions: integers of any shape.
        length: at least 1.
    """
    if torch.onnx.is_in_onnx_export():  # which knows no registered op
        return positions // length
    return _floor_divide(positions, length)


@torch.library.custom_op("mezzo_rat::floor_divide", mutates_args=())
def _floor_divide(positions: Tensor, length: int) -> Tensor:
    return positions // length


@_floor_divide.register_fake
def _(positions: Tensor, length: int) -> Tensor:
    return positions // length  # a fake tensor: only its shape and strides matter
