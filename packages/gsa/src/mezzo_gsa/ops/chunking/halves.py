"""Matrix products between the tokens of a chunk, in eager PyTorch, that are exact for any gates.

When token t reads what token i wrote, it has decayed by exp(g[i+1] + ... + g[t]). A matrix product
needs this as a factor of t times a factor of i. The usual factors, exp(G[t]) and exp(-G[i]) with
the running sum G, overflow. So the chunk is halved, and its halves again, down to single tokens. A
pair i < t is split at exactly one level: there i is in the left and t in the right half of a node.
The decay is then that from i to the end of the left half, times that from there to t. Both are sums
of log gates inside a half, which are never positive, and no difference of large sums is needed.

No product contains a pair i > t, so nothing has to be masked, and a NaN never reaches earlier
tokens.
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
    """Put right halves back in their places, (..., L, D), with zeros in the left halves."""
    return F.pad(x, (0, 0, width, 0)).flatten(-3, -2)


def decay_from_start(g: Tensor) -> Tensor:
    """Return exp(g[0] + ... + g[t]) for each token t of (..., L, K)."""
    return g.cumsum(-2).exp()


def decay_to_end(g: Tensor) -> Tensor:
    """Return exp(g[i+1] + ... + g[L-1]) for each token i of (..., L, K)."""
    later = g[..., 1:, :].flip(-2).cumsum(-2).flip(-2)
    return F.pad(later, (0, 0, 0, 1)).exp()
