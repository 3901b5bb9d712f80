"""How kernels find the tokens of a tensor that may be a part of a wider one."""

import torch
from torch import Tensor


def by_token(x: Tensor) -> Tensor:
    """Return x (B, T, H, D), or a copy, such that token t of row b is at (b T + t) · stride(1).

    The H D numbers of a token lie side by side.
    """
    B, T, _, D = x.shape
    if x.stride(3) == 1 and x.stride(2) == D and (B == 1 or x.stride(0) == T * x.stride(1)):
        return x
    # Not contiguous(), which keeps the strides of axes of length one as they are.
    return x.clone(memory_format=torch.contiguous_format)
