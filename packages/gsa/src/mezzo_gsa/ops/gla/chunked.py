"""Gated linear attention by chunks, in eager PyTorch; `chunking.halves` explains the method."""

from torch import Tensor

from mezzo_gsa.ops.chunking.eager import PackedChunks, carry, cut, join, place_packed
from mezzo_gsa.ops.chunking.halves import (
    at_right,
    decay_from_start,
    decay_to_end,
    half_widths,
    left_halves,
    right_halves,
)

CHUNK = 64
"""Tokens of a chunk, a power of two; shorter inputs have shorter chunks."""


def chunk_gla_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute what `recurrent_gla_reference` computes, chunk by chunk."""
    T, H = k.shape[1], k.shape[2]
    L = min(CHUNK, 1 << (T - 1).bit_length())
    packed = None if cu_seqlens is None else place_packed(T, L, cu_seqlens)
    queries, keys, values, gates = (
        cut(x.to(initial_state.dtype), L, packed).unflatten(2, (H, -1)) for x in (q, k, v, g)
    )
    out, final_state = read_chunks(queries, keys, values, gates, initial_state, packed)
    return join((scale * out).flatten(2, 3), T, packed).to(q.dtype), final_state


def read_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor,
    packed: PackedChunks | None,
) -> tuple[Tensor, Tensor]:
    """Run gated linear attention along chunks.

    Args:
        q: (B, N, H, HQ / H, L, K), N chunks of L tokens, a power of two.
        k: (B, N, H, 1, L, K).
        v: (B, N, H, 1, L, V).
        g: (B, N, H, 1, L, K or 1), at least float32.
        initial_state: (B, H, K, V), or (S, H, K, V) when packed.
        packed: the chunks of packed sequences; None: rows are not packed.

    Returns:
        out (B, N, H, HQ / H, L, V), and the final state.
    """
    dtype, L = initial_state.dtype, k.shape[-2]
    ends = (k * decay_to_end(g).to(dtype)).mT @ v
    decays = g.sum(-2).exp().to(dtype)[..., None]
    starts, final_state = carry(initial_state, decays[:, :, :, 0], ends[:, :, :, 0], packed)
    out = (q * decay_from_start(g).to(dtype)) @ starts[:, :, :, None]
    out = out + (q * k).sum(-1, keepdim=True) * v
    for w in half_widths(L):
        reads = right_halves(q, w) * decay_from_start(right_halves(g, w)).to(dtype)
        writes = left_halves(k, w) * decay_to_end(left_halves(g, w)).to(dtype)
        out = out + at_right(reads @ writes.mT @ left_halves(v, w), w)
    return out, final_state
