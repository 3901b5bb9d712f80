"""Elementwise operations of a layer: gates before the recurrence."""

import math

import torch
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor
from torch.nn import functional as F


def log_gate(logits: Tensor, damping: float) -> Tensor:
    """Return log gates g = log(sigmoid(logits)^(1/τ)), at most 0.

    Args:
        logits: of any shape.
        damping: τ, positive; a larger one forgets less.

    Returns:
        g, of the same shape, float32 (float64 for float64).
    """
    return F.logsigmoid(logits.to(accumulation_dtype(logits.dtype))) / float(damping)


def bounded_gate(g: Tensor, bound: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 - α and log α of α = β + (1 - β) exp(g), both to full precision.

    Args:
        g: (..., H, K) log gates, at most 0, float32 or float64.
        bound: β, in [0, 1); or log β and log(1 - β) of each channel, (2, H K) float32 or float64.
    """
    if isinstance(bound, Tensor):
        below, rest = bound.unflatten(1, g.shape[-2:])
        return -rest.exp() * torch.expm1(g), torch.logaddexp(g + rest, below)
    if bound == 0:
        return -torch.expm1(g), g
    log_gates = torch.logaddexp(g + math.log1p(-bound), torch.full_like(g, math.log(bound)))
    return (bound - 1) * torch.expm1(g), log_gates
