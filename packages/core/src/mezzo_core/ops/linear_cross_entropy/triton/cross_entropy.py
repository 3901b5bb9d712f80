"""Computes the loss of each row of logits and, in place, the gradient of the logits."""

import triton
import triton.language as tl
from torch import Tensor

from mezzo_core.ops.launch import launch
from mezzo_core.ops.triton import exp

BLOCK = 4096
LOWEST = tl.constexpr(-2e38)
"""In place of -inf, because the difference of two infinities is NaN."""


def cross_entropy_(
    logits: Tensor,
    V: int,
    targets: Tensor,
    ignore_index: int,
    losses: Tensor,
    hits: Tensor,
    differentiable: bool,
) -> None:
    """Write each row's loss and hit; if `differentiable`, overwrite the logits by their gradient.

    Args:
        logits: (N, W), contiguous; columns from V on are padding, and get a gradient of 0.
        V: the vocabulary's size.
        targets: (N,) int64; one beyond the vocabulary makes the row's loss NaN.
        ignore_index: the target that does not count.
        losses: (N,) float32.
        hits: (N,) bool.
        differentiable: whether the logits are overwritten.
    """
    N, W = logits.shape
    if N == 0:
        return
    launch(
        cross_entropy_kernel, (N,),
        logits, targets, losses, hits, V, W, ignore_index,
        WRITES=differentiable, BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip


@triton.jit
def add_columns(x, o, b_max, b_first, b_sum):
    """Add logits x of columns o to each lane's running maximum, its column, and sum exp(x - max).

    One exponential is enough: of the new logit and the old maximum, the smaller one is weighted by
    it and the larger one by 1.
    """
    factor = exp(-tl.abs(x - b_max))
    is_larger = x > b_max
    b_sum = tl.where(is_larger, b_sum * factor + 1.0, b_sum + factor)
    return tl.maximum(b_max, x), tl.where(is_larger, o, b_first), b_sum


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, hits, V, W, ignore_index,
    WRITES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row: a pass for its maximum and sum, a second one for its gradient.

    Instructions limit the speed, not memory, so only the last block has a mask.
    """
    i = tl.program_id(0)
    p_row = logits + i.to(tl.int64) * W
    target = tl.load(targets + i)
    counts = target != ignore_index
    # Nobody has checked the targets on a GPU: a wrong one may read and write nothing elsewhere.
    m_own = counts & (target >= 0) & (target < V)
    own = tl.load(p_row + target, mask=m_own, other=float("nan")).to(tl.float32)
    b_max = tl.full([BLOCK], LOWEST, tl.float32)
    b_first = tl.zeros([BLOCK], tl.int32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    edge = V // BLOCK * BLOCK
    for start in range(0, edge, BLOCK):
        o = start + tl.arange(0, BLOCK)
        x = tl.load(p_row + o).to(tl.float32)
        b_max, b_first, b_sum = add_columns(x, o, b_max, b_first, b_sum)
    o = edge + tl.arange(0, BLOCK)
    x = tl.load(p_row + o, mask=o < V, other=float("-inf")).to(tl.float32)
    b_max, b_first, b_sum = add_columns(x, o, b_max, b_first, b_sum)
    largest = tl.max(b_max, 0)
    lse = largest + tl.log(tl.sum(b_sum * exp(b_max - largest), 0))
    first = tl.min(tl.where(b_max == largest, b_first, V), 0)
    tl.store(losses + i, tl.where(counts, lse - own, 0.0))
    tl.store(hits + i, m_own & (first == target))
    if WRITES:
        dtype = logits.dtype.element_ty
        for start in range(0, edge, BLOCK):
            o = start + tl.arange(0, BLOCK)
            x = tl.load(p_row + o).to(tl.float32)
            p = tl.where(counts, exp(x - lse), 0.0)
            tl.store(p_row + o, p.to(dtype))
        for start in range(edge, W, BLOCK):
            o = start + tl.arange(0, BLOCK)
            x = tl.load(p_row + o, mask=o < V, other=float("-inf")).to(tl.float32)
            p = tl.where(counts, exp(x - lse), 0.0)
            tl.store(p_row + o, p.to(dtype), mask=o < W)
        tl.debug_barrier()  # the loop's write of the target's column comes before the next one
        tl.store(p_row + target, (exp(own - lse) - 1.0).to(dtype), mask=m_own)
