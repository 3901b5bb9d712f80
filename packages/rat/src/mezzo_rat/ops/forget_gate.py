"""The forget gate that every layer of this package shares, from its logits."""

from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor


def forget_gate(g: Tensor, gate_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what a gated recurrence keeps, f = sigmoid(g + b), and what it writes, 1 - f.

    1 - f is computed as sigmoid(-(g + b)): a gate that remembers for thousands of tokens is
    so near to one that the difference would keep few digits.

    Args:
        g: (..., H, D) gate logits, any floating dtype. +inf keeps everything, -inf nothing.
        gate_bias: (H, D), or any shape that broadcasts to `g`.

    Returns:
        keep and write, float32 (float64 for float64 logits), shaped like `g`.
    """
    logits = g.to(accumulation_dtype(g.dtype))
    if gate_bias is not None:
        logits = logits + gate_bias.to(logits.dtype)
    return logits.sigmoid(), (-logits).sigmoid()
