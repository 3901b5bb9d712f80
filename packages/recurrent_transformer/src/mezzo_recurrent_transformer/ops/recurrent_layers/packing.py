"""Packed sequences as batches: sequences of like lengths run side by side."""

from itertools import pairwise

import torch
from torch import Tensor


def batches_of(cu_seqlens: Tensor) -> list[Tensor]:
    """Group packed sequences into batches, so that at most half of a batch is padding.

    A batch holds the sequences whose lengths are between two powers of two. So all batches together
    take fewer than twice as many steps as the longest sequence alone. The call waits for the GPU.

    Args:
        cu_seqlens: (S + 1,) borders.

    Returns:
        For each batch the indices (rows, longest) of its tokens; T stands for padding.
    """
    borders = cu_seqlens.tolist()
    groups: dict[int, list[tuple[int, int]]] = {}
    for begin, end in pairwise(borders):
        if end > begin:
            groups.setdefault((end - begin - 1).bit_length(), []).append((begin, end - begin))
    batches = []
    for _, sequences in sorted(groups.items()):
        begins, sizes = torch.tensor(sequences, device=cu_seqlens.device).T
        place = torch.arange(int(sizes.max()), device=cu_seqlens.device)
        batches.append(torch.where(place < sizes[:, None], begins[:, None] + place, borders[-1]))
    return batches


def take(packed: Tensor, index: Tensor) -> Tensor:
    """Return the rows of a batch (..., rows, longest, C) from (..., 1, T, C), zeros for padding."""
    tokens = packed.squeeze(-3)
    room = torch.cat([tokens, torch.zeros_like(tokens[..., :1, :])], -2)
    return room[..., index, :]


def put(batch: Tensor, index: Tensor, packed: Tensor) -> None:
    """Write the tokens of a batch (..., rows, longest, C) into (..., 1, T, C); padding is lost."""
    real = index.flatten() < packed.shape[-2]
    chosen = index.flatten()[real]
    packed[..., 0, chosen, :] = batch.flatten(-3, -2)[..., real, :].to(packed.dtype)
