"""The definition: the cross entropy of the logits x Wᵀ, summed over the targets that count."""

import torch.nn.functional as F
from torch import Tensor

from mezzo_core.ops.precision import accumulation_dtype


def linear_cross_entropy_fwd(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the sum of -log softmax(x Wᵀ)[target], and which targets have the largest logit.

    Args:
        x: (N, C).
        weight: W, (V, C).
        targets: (N,) int64, in [0, V), or `ignore_index`.
        ignore_index: the target that does not count.

    Returns:
        The loss in nats, a float32 scalar (float64 for float64 inputs), and the hits (N,), bool.
    """
    return cross_entropy(F.linear(x, weight), targets, ignore_index)


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Return the loss of given logits (..., V), and the hits (...), as above."""
    wide = logits.to(accumulation_dtype(logits.dtype)).flatten(0, -2)
    loss = F.cross_entropy(wide, targets.flatten(), ignore_index=ignore_index, reduction="sum")
    return loss, (logits.argmax(-1) == targets) & (targets != ignore_index)
