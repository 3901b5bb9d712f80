"""The forget gate of all layers of this package, computed from its logits."""

from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor


def forget_gate(g: Tensor, gate_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the shares that a gated recurrence keeps, f = sigmoid(g + b), and writes, 1 - f.

    1 - f is computed as sigmoid(-(g + b)). A gate that remembers for thousands of tokens is so near
    one that subtracting it from one would leave few correct digits.

    Args:
        g: (..., H, D) gate logits, in any floating dtype. +inf keeps everything, -inf nothing.
        gate_bias: (H, D), or any shape that broadcasts to `g`.

    Returns:
        keep and write, float32 (float64 for float64 logits), shaped like `g`.
    """
    logits = g.to(accumulation_dtype(g.dtype))
    if gate_bias is not None:
        logits = logits + gate_bias.to(logits.dtype)
    return logits.sigmoid(), (-logits).sigmoid()
