"""Merges partial softmaxes in PyTorch; `triton.py` has the same for kernels."""

from collections.abc import Sequence
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.ops.shapes import Shapes


def merge(
    outs: Sequence[Float[Tensor, "*rows V"]], lses: Sequence[Float[Tensor, "*rows"]]
) -> tuple[Float[Tensor, "*rows V"], Float[Tensor, "*rows"]]:
    """Merge attention over several sets of keys into attention over all of them.

    Part i attends to its own set of keys: lse_i is its log-sum-exp, and out_i its weighted mean of
    values. Then

        lse = log sum_i exp(lse_i)
        out = sum_i exp(lse_i - lse) out_i

    `attention(..., return_lse=True)` returns such parts. Differentiable in all of them. A part
    without keys has lse -inf, and its out is ignored. A NaN stays in its row.

    Args:
        outs: the parts' outputs, each (..., V), in any floating-point dtype.
        lses: their log-sum-exps, natural, each (...).

    Returns:
        out (..., V) in the dtype of the first part, and lse (...), at least float32. Where no part
        has a key they are 0 and -inf.

    Raises:
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device or the number of outs or lses is wrong.
    """
    _check(outs, lses)
    dtype = accumulation_dtype(lses[0].dtype)
    weights, lse = softmax_with_lse(torch.stack([part.to(dtype) for part in lses], -1))
    parts = (
        weight[..., None] * part.masked_fill((part_lse == float("-inf"))[..., None], 0.0)
        for weight, part, part_lse in zip(weights.unbind(-1), outs, lses, strict=True)
    )
    return reduce(torch.add, parts).to(outs[0].dtype), lse


def softmax_with_lse(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax over the last axis, and the log-sum-exp (...); differentiable in both.

    Where all scores are -inf, the softmax is 0 and the log-sum-exp -inf, with gradients of 0.
    """
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], float("-inf"))
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0.0)
    exponentials = (scores - top).exp()
    total = exponentials.sum(-1, keepdim=True)
    # In an empty row take the log of 1, which is then replaced: log 0 would have a NaN gradient.
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (total.log() + top).masked_fill(empty, float("-inf"))
    return exponentials / total, lse.squeeze(-1)


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge: one lse an out, got {len(outs)} outs and {len(lses)} lses")
    shapes = {f"outs[{i}]": "... V" for i in range(len(outs))}
    shapes |= {f"lses[{i}]": "..." for i in range(len(lses))}
    Shapes(**shapes).check("merge", *outs, *lses)
