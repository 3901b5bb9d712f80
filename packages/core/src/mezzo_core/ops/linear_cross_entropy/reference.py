"""The definition: the cross entropy of the logits x Wᵀ, summed over the targets that count."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo_core.ops.precision import accumulation_dtype


def linear_cross_entropy_fwd(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the sum of -log softmax(x Wᵀ)[target], and how many targets have the largest logit.

    Args:
        x: (N, C).
        weight: W, (V, C).
        targets: (N,) int64, in [0, V); those that are `ignore_index` do not count.
        ignore_index: as said.

    Returns:
        The loss in nats, float32 (float64 for float64 inputs), and the hits, int64; both scalars.
    """
    counts = targets != ignore_index
    logits = F.linear(x, weight).to(accumulation_dtype(x.dtype))[counts]
    loss = F.cross_entropy(logits, targets[counts], reduction="sum")
    hits = (logits.argmax(-1) == targets[counts]).sum()
    return loss, hits.to(torch.int64)
