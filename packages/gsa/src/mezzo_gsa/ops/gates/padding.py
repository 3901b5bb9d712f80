"""Padding on the right of a row: its tokens must not change the state, whatever their values."""

import torch
from torch import Tensor


def skip_padding(lengths: Tensor | None, *parts: Tensor, fill: float = 0.0) -> tuple[Tensor, ...]:
    """Return tensors with zeros in the padding, after the real tokens of each row.

    Keys, values and strengths of zero write nothing, and log gates of zero forget nothing. The
    numbers are replaced and not multiplied, because padding may hold NaN.

    Args:
        lengths: (B,) int64, how many tokens of each row are real; None: all.
        parts: tensors of (B, T, H, ·).
        fill: stands in the place of zeros.

    Returns:
        The parts, of the same shapes; without `lengths`, the tensors themselves.
    """
    if lengths is None:
        return parts
    padding = torch.arange(parts[0].shape[1], device=lengths.device) >= lengths[:, None]
    return tuple(part.masked_fill(padding[..., None, None], fill) for part in parts)
