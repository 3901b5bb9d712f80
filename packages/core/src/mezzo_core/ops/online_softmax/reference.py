"""The merge of two partial softmaxes and its adjoint, as equations.

    lse = log(exp(lse_a) + exp(lse_b))
    out = w_a out_a + w_b out_b
    w_a = exp(lse_a - lse) = sigmoid(lse_a - lse_b)      w_b = sigmoid(lse_b - lse_a)

    dout_a = w_a dout                dlse_a = w_a dlse + w_a w_b <dout, out_a - out_b>
    dout_b = w_b dout                dlse_b = w_b dlse - w_a w_b <dout, out_a - out_b>

The sigmoids stay exact where lse is so large that its rounding is not small. A part without keys
has lse = -inf and weighs 0, whatever its out holds; two of them make another.
"""

import torch
from torch import Tensor


def merge_softmax_fwd(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge forward: out (*, D) in the dtype of `out_a`, lse (*) in its own."""
    out = _weight(lse_a, lse_b) * _values(out_a, lse_a)
    out += _weight(lse_b, lse_a) * _values(out_b, lse_b)
    return out.to(out_a.dtype), torch.logaddexp(lse_a, lse_b)


def merge_softmax_bwd(
    dout: Tensor, dlse: Tensor, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pull gradients back to out_a, lse_a, out_b and lse_b."""
    w_a, w_b = _weight(lse_a, lse_b), _weight(lse_b, lse_a)
    d, dlse = dout.to(dlse.dtype), dlse.unsqueeze(-1)
    inner = (d * (_values(out_a, lse_a) - _values(out_b, lse_b))).sum(-1, keepdim=True)
    pull = w_a * w_b * inner
    return (
        (w_a * d).to(out_a.dtype),
        (w_a * dlse + pull).squeeze(-1),
        (w_b * d).to(out_b.dtype),
        (w_b * dlse - pull).squeeze(-1),
    )


def _weight(lse: Tensor, other: Tensor) -> Tensor:
    """sigmoid(lse - other) as (*, 1), and 0 where both are -inf."""
    return (lse - other).sigmoid().masked_fill(lse.isneginf(), 0).unsqueeze(-1)


def _values(out: Tensor, lse: Tensor) -> Tensor:
    return out.to(lse.dtype).masked_fill(lse.isneginf().unsqueeze(-1), 0)
