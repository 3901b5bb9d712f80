"""What the tokens of a chunk read of each other, in eager PyTorch: matrix products for any gates.

What token i wrote has decayed by exp(g[i+1] + ... + g[t]) when token t reads it. A matrix product
needs this as a factor of t times a factor of i, and the usual pair, exp(G[t]) and exp(-G[i]) with
G the running sum, overflows. So halve the chunk, and its halves, down to single tokens: a pair
i < t is parted at exactly one level, where i is in the left and t in the right half of one node.
There the decay is that from i to the end of the left half, times that from there to t: two sums of
log gates inside their own halves, never positive, and no difference of large sums is ever taken.

Nothing is masked: no product takes a pair i > t. So what is no number reaches nothing before it.
"""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor


def half_widths(length: int) -> Iterator[int]:
    """Yield the width of a half at each level of a chunk of `length` tokens, a power of two."""
    while length > 1:
        length //= 2
        yield length


def left_halves(x: Tensor, width: int) -> Tensor:
    """Return the left halves, (..., nodes, width, D), of all nodes of 2 `width` tokens."""
    return x.unflatten(-2, (-1, 2, width))[..., 0, :, :]


def right_halves(x: Tensor, width: int) -> Tensor:
    """Return the right halves; see `left_halves`."""
    return x.unflatten(-2, (-1, 2, width))[..., 1, :, :]


def at_right(x: Tensor, width: int) -> Tensor:
    """Put right halves back in their places, (..., L, D), with zeros in the left ones."""
    return F.pad(x, (0, 0, width, 0)).flatten(-3, -2)


def decay_from_start(g: Tensor) -> Tensor:
    """Return exp(g[0] + ... + g[t]) for each token t of (..., L, K)."""
    return g.cumsum(-2).exp()


def decay_to_end(g: Tensor) -> Tensor:
    """Return exp(g[i+1] + ... + g[L-1]) for each token i of (..., L, K)."""
    later = g[..., 1:, :].flip(-2).cumsum(-2).flip(-2)
    return F.pad(later, (0, 0, 0, 1)).exp()
