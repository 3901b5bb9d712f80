"""The function between GSA's two passes: softmax, or another one in the ablation of Table 2."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Between = Literal["softmax", "none", "swish", "relu", "relu_squared"]


def apply_between(logits: Tensor, between: Between) -> Tensor:
    """Return the second pass's queries from the first pass's outputs (..., M)."""
    if between == "softmax":
        return torch.softmax(logits, dim=-1)
    if between == "swish":
        return F.silu(logits)
    if between == "relu":
        return F.relu(logits)
    return F.relu(logits).square() if between == "relu_squared" else logits
