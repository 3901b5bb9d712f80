"""Rows of logits become their losses and, in place, the losses' gradients."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def cross_entropy_(
    logits: Tensor,
    V: int,
    targets: Tensor,
    ignore_index: int,
    losses: Tensor,
    hits: Tensor,
    differentiable: bool,
) -> None:
    """Write each row's loss and hit; if `differentiable`, its gradient over the logits.

    Args:
        logits: (N, W), contiguous; columns from V on are no tokens', and get a gradient of 0.
        V: the vocabulary's size.
        targets: (N,) int64.
        ignore_index: the target that does not count.
        losses: (N,) float32.
        hits: (N,) bool.
        differentiable: whether the logits are overwritten.
    """
    N, W = logits.shape
    if N == 0:
        return
    cross_entropy_kernel[(N,)](
        logits, targets, losses, hits, V, W, ignore_index,
        WRITES=differentiable, BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, hits, V, W, ignore_index,
    WRITES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row: a pass for its maximum and sum, a second one for its gradient."""
    i = tl.program_id(0)
    p_row = logits + i.to(tl.int64) * W
    target = tl.load(targets + i)
    counts = target != ignore_index
    largest = tl.full((), float("-inf"), tl.float32)
    first = tl.full((), 0, tl.int32)  # the first column with the largest logit
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        o = start + tl.arange(0, BLOCK)
        x = tl.load(p_row + o, mask=o < V, other=float("-inf")).to(tl.float32)
        here = tl.max(x, 0)
        first = tl.where(here > largest, tl.argmax(x, 0) + start, first)
        new = tl.maximum(largest, here)
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)
        largest = new
    lse = largest + tl.log(total)
    own = tl.load(p_row + target, mask=counts, other=0.0).to(tl.float32)
    tl.store(losses + i, tl.where(counts, lse - own, 0.0))
    tl.store(hits + i, counts & (first == target))
    if WRITES:
        for start in range(0, W, BLOCK):
            o = start + tl.arange(0, BLOCK)
            x = tl.load(p_row + o, mask=o < V, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - lse) - tl.where(o == target, 1.0, 0.0)
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(p_row + o, gradient.to(logits.dtype.element_ty), mask=o < W)
