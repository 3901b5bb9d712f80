"""What a GSA layer does to gates and outputs, number by number, around the recurrence."""

from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor
from torch.nn import functional as F


def log_gate(logits: Tensor, damping: float) -> Tensor:
    """Return g = log(sigmoid(logits)^(1/τ)), at most 0, float32 (float64 for float64)."""
    return F.logsigmoid(logits.to(accumulation_dtype(logits.dtype))) / damping


def gated_norm(o: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return RMSNorm(swish(o)) over the last dimension, equation 9, in the dtype of o.

    Args:
        o: (..., C) all heads' outputs side by side.
        weight: (C,) of the norm; None: swish alone.
        eps: of the norm.
    """
    y = F.silu(o.to(accumulation_dtype(o.dtype)))
    if weight is not None:
        y = F.rms_norm(y, weight.shape, weight.to(y.dtype), eps)
    return y.to(o.dtype)
