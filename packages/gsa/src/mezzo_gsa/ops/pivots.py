"""Decay between two tokens of a chunk, as products of factors that never exceed one.

With G the running sum of the log gates of a chunk, what token i wrote has decayed by exp(G[t] -
G[i]) when token t reads it. exp(-G[i]) alone overflows. But halve the chunk, and its halves, down
to single tokens: a pair i < t is parted at exactly one level, where i lies in the left and t in
the right half of the same node. With the pivot P = G at the last token of the left half,

    exp(G[t] - G[i]) = exp(G[t] - P) · exp(P - G[i]),

and as G never rises, both factors are at most one, for any gates. Each token is on one side of its
node, so a level needs one factor X = exp(-|G - P|) a token: it serves rows of the right halves and
columns of the left halves.

The sums are kept in float64 (in the bfloat16 kernels, float32): where gates of -50 pile up, the
difference of two float32 sums would lose the digits that float32 results have.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def pivot_levels(running: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what parts the pairs of each level.

    Args:
        running: (..., L, M) float64, the running sums G of a chunk of L tokens, a power of two.
        dtype: of X.

    Yields:
        mask (L, L), true where row t and column i are parted at this level; and X (..., L, M).
    """
    L = running.shape[-2]
    token = torch.arange(L, device=running.device)
    half = L // 2
    while half:
        node, side = token // (2 * half), token // half % 2
        pivot = running[..., node * 2 * half + half - 1, :]
        mask = (node[:, None] == node) & (side[:, None] > side)
        # Right of the pivot G - P, left of it P - G: not an absolute value, whose slope at 0 is 0.
        sign = (2 * side - 1)[:, None]
        yield mask, torch.exp((sign * (running - pivot)).to(dtype))
        half //= 2
