"""Padding on the right of a row: tokens that must leave a memory alone, whatever they hold."""

import torch
from torch import Tensor


def skip_padding(lengths: Tensor | None, *parts: Tensor) -> tuple[Tensor, ...]:
    """Return parts of tokens with zeros where a row's real tokens have ended.

    Keys, values and strengths of zero write nothing, and log gates of zero forget nothing. Numbers
    are replaced, not multiplied: padding may hold NaN.

    Args:
        lengths: (B,) int64, how many tokens of each row are real; None: all.
        parts: (B, T, H, ·) each.
    """
    if lengths is None:
        return parts
    padding = torch.arange(parts[0].shape[1], device=lengths.device) >= lengths[:, None]
    return tuple(part.masked_fill(padding[..., None, None], 0.0) for part in parts)
