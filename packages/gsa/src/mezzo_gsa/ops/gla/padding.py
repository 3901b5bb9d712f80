"""Padding on the right of a row: tokens that must leave the state of gated linear attention."""

import torch
from torch import Tensor


def skip_padding(k: Tensor, g: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return keys and log gates that neither write nor forget where a row's real tokens have ended.

    Args:
        k: (B, T, H, K) keys.
        g: (B, T, H, K) or (B, T, H, 1) log gates.
        lengths: (B,) int64, how many tokens of each row are real; None: all.
    """
    if lengths is None:
        return k, g
    padding = torch.arange(k.shape[1], device=k.device) >= lengths[:, None]
    padding = padding[..., None, None]
    return k.masked_fill(padding, 0.0), g.masked_fill(padding, 0.0)
