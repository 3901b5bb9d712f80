"""Strides by which kernels find the tokens of a tensor that may be a view into a wider one."""

import torch
from torch import Tensor


def by_token(x: Tensor) -> Tensor:
    """Return x (B, T, H, D), copied if needed, with token t of row b at (b T + t) · stride(1).

    The H D numbers of a token are adjacent in memory.
    """
    B, T, _, D = x.shape
    if x.stride(3) == 1 and x.stride(2) == D and (B == 1 or x.stride(0) == T * x.stride(1)):
        return x
    # contiguous() is not enough: it keeps any stride of an axis of length one.
    return x.clone(memory_format=torch.contiguous_format)


def token_stride(x: Tensor) -> int:
    """Return the distance in memory from one token of x (B, T, H, D) to the next of all rows.

    For x from `by_token`, and for a part of a contiguous projection. If a row has one token, the
    next token is the next row, and the stride of T may be any number.
    """
    return x.stride(0) if x.shape[1] == 1 else x.stride(1)
