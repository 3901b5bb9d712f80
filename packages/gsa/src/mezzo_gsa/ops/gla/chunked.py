"""Gated linear attention by chunks, in eager PyTorch: matrix products for any gates.

What token i wrote has decayed by exp(g[i+1] + ... + g[t]) when token t reads it. A matrix product
needs this as a factor of t times a factor of i, and the usual pair, exp(G[t]) and exp(-G[i]) with
G the running sum, overflows. So halve the chunk, and its halves, down to single tokens: a pair
i < t is parted at exactly one level, where i is in the left and t in the right half of one node.
There the decay is that from i to the end of the left half, times that from there to t: two sums of
log gates inside their own halves, never positive, and no difference of large sums is ever taken.
"""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from mezzo_gsa.ops.eager_chunks import carry, cut, join, lay_out

CHUNK = 64
"""Tokens of a chunk, a power of two; shorter inputs take shorter chunks."""


def chunk_gla_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute what `recurrent_gla_reference` computes, chunk by chunk; T is at least 1."""
    T, H = k.shape[1], k.shape[2]
    L = min(CHUNK, 1 << (T - 1).bit_length())
    layout = None if cu_seqlens is None else lay_out(T, L, cu_seqlens)
    queries, keys, values, gates = (
        cut(x.to(initial_state.dtype), L, layout).unflatten(2, (H, -1)) for x in (q, k, v, g)
    )
    ends = (keys * _to_end(gates).exp()).mT @ values
    decays = gates.sum(-2).exp()[..., None]
    starts, final_state = carry(initial_state, decays[:, :, :, 0], ends[:, :, :, 0], layout)
    out = (queries * gates.cumsum(-2).exp()) @ starts[:, :, :, None]
    out = out + (queries * keys).sum(-1, keepdim=True) * values
    for w in _half_widths(L):
        out = out + _between_halves(queries, keys, values, gates, w)
    return join((scale * out).flatten(2, 3), T, layout).to(q.dtype), final_state


def _half_widths(length: int) -> Iterator[int]:
    while length > 1:
        length //= 2
        yield length


def _between_halves(q: Tensor, k: Tensor, v: Tensor, g: Tensor, w: int) -> Tensor:
    """Return what tokens of right halves read from left halves, in all nodes of 2 w tokens."""
    q_right, g_right = (x.unflatten(-2, (-1, 2, w))[..., 1, :, :] for x in (q, g))
    k_left, v_left, g_left = (x.unflatten(-2, (-1, 2, w))[..., 0, :, :] for x in (k, v, g))
    scores = (q_right * g_right.cumsum(-2).exp()) @ (k_left * _to_end(g_left).exp()).mT
    return F.pad(scores @ v_left, (0, 0, w, 0)).flatten(-3, -2)


def _to_end(g: Tensor) -> Tensor:
    """Return g[i+1] + ... + g[L-1] for each token i of (..., L, K)."""
    later = g[..., 1:, :].flip(-2).cumsum(-2).flip(-2)
    return F.pad(later, (0, 0, 0, 1))
