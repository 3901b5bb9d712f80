"""Division of positions by a length, in compiled programs too."""

import torch
from torch import Tensor


def floor_divide(positions: Tensor, length: int) -> Tensor:
    """Return positions // length: the chunk of each position.

    Use this wherever tensors of positions are divided on a path that torch.compile may see. On a
    CPU its inductor (seen in torch 2.13 and 2.15) splits the loop of `arange(T) // length` into
    T // length runs of `length`, and leaves the T % length last elements unwritten. An op of its
    own is a division that the inductor does not see.

    Args:
        positions: integers of any shape.
        length: at least 1.
    """
    return _floor_divide(positions, length)


@torch.library.custom_op("mezzo_rat::floor_divide", mutates_args=())
def _floor_divide(positions: Tensor, length: int) -> Tensor:
    return positions // length


@_floor_divide.register_fake
def _(positions: Tensor, length: int) -> Tensor:
    return positions // length  # of tensors without memory: shape and strides
