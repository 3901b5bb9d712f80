"""The loss and its gradients, a chunk of rows at a time, so that most logits are never in memory.

The gradient of the logits is softmax(logits) minus one at the target. It overwrites the logits, and
is multiplied at once into what the backward will need: dx and dW.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mezzo_core.ops.precision import accumulation_dtype, add_product
from mezzo_core.ops.sizes import ceil_div

CHUNK_BYTES = 2**29
"""The most memory for logits."""
ALIGNMENT = 128
"""On a GPU the vocabulary is padded to a multiple of this: cuBLAS is slow at odd widths."""


class Parts(NamedTuple):
    """What the forward computes; dx and dweight are empty if no gradient is wanted.

    `hits` (N,) tells which targets have their row's largest logit.
    """

    loss: Tensor
    hits: Tensor
    dx: Tensor
    dweight: Tensor


def linear_cross_entropy_fwd(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    *,
    differentiable: bool,
    use_triton: bool,
) -> Parts:
    """Return the loss, the hits, and the gradients of x (N, C) and W (V, C) for dloss = 1.

    Products are computed in `dtype`; the gradient of W is accumulated in float32 or wider.
    """
    N, V = x.shape[0], weight.shape[0]
    sums = accumulation_dtype(dtype)
    w = _aligned(weight, dtype)
    losses = torch.zeros(N, dtype=sums, device=x.device)
    hits = torch.zeros(N, dtype=torch.bool, device=x.device)
    dx = x.new_empty(x.shape if differentiable else 0, dtype=dtype)
    dweight = torch.zeros(w.shape if differentiable else 0, dtype=sums, device=x.device)
    size = _chunk_size(N, w.shape[0] * w.itemsize)
    room = w.new_empty(size, w.shape[0])
    for start in range(0, N, size):
        rows = slice(start, start + size)
        part = x[rows].to(dtype)
        logits = torch.mm(part, w.T, out=room[: len(part)])
        _cross_entropy_(
            logits, V, targets[rows], ignore_index, losses[rows], hits[rows],
            differentiable=differentiable, use_triton=use_triton,
        )  # fmt: skip
        if differentiable:
            torch.mm(logits, w, out=dx[rows])
            add_product(dweight, logits.T, part)
    return Parts(losses.sum(), hits, dx, dweight[:V])


def _chunk_size(N: int, row_bytes: int) -> int:
    """Return the rows of a chunk: a multiple of a GPU's tiles, and chunks of about equal size."""
    N, most = max(N, 1), max(CHUNK_BYTES // row_bytes, 1)
    even = ceil_div(N, ceil_div(N, most))
    return min(ALIGNMENT * ceil_div(even, ALIGNMENT), most, N)


def _aligned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return W in `dtype`; on a GPU padded with rows of zeros to a multiple of ALIGNMENT."""
    V, C = weight.shape
    rows = V + (-V % ALIGNMENT if weight.is_cuda else 0)
    if rows == V:
        return weight.to(dtype)
    padded = weight.new_empty(rows, C, dtype=dtype)
    padded[:V] = weight
    padded[V:] = 0
    return padded


def _cross_entropy_(
    logits: Tensor,
    V: int,
    targets: Tensor,
    ignore_index: int,
    losses: Tensor,
    hits: Tensor,
    *,
    differentiable: bool,
    use_triton: bool,
) -> None:
    """Write each row's loss and hit; if `differentiable`, overwrite the logits by their gradient.

    Columns from V on are padding; their gradient is 0.
    """
    if use_triton:
        from mezzo_core.ops.linear_cross_entropy.triton.cross_entropy import cross_entropy_

        cross_entropy_(logits, V, targets, ignore_index, losses, hits, differentiable)
        return
    counts = targets != ignore_index
    index = targets.where(counts, 0)[:, None]
    real = logits[:, :V].to(losses.dtype)
    lse = real.logsumexp(1)
    losses.copy_(torch.where(counts, lse - real.gather(1, index)[:, 0], 0))
    hits.copy_((real.argmax(1) == index[:, 0]) & counts)
    if differentiable:
        p = real.sub_(lse[:, None]).exp_()  # overwrites the logits, or their wider copy
        p.scatter_add_(1, index, -torch.ones_like(index, dtype=p.dtype))
        logits[:, :V] = p.masked_fill_(~counts[:, None], 0)
        logits[:, V:] = 0
