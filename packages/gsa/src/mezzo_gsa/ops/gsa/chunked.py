"""Gated slot attention by chunks in eager PyTorch: two passes of gated linear attention."""

from mezzo_core.ops.precision import accumulation_dtype
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
from mezzo_gsa.ops.gla.chunked import CHUNK, read_chunks
from mezzo_gsa.ops.gsa.arguments import Between, GSAState
from mezzo_gsa.ops.gsa.reference import apply_between


def chunked_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor,
    scale: float,
    between: Between,
    initial_state: GSAState,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, GSAState]:
    """Compute what `recurrent_gsa_reference` computes, CHUNK tokens at a time."""
    (_, T, H, _), dtype = k.shape, initial_state.k.dtype
    L = min(CHUNK, 1 << (T - 1).bit_length())
    packed = None if cu_seqlens is None else place_packed(T, L, cu_seqlens)
    queries, keys, values, strengths = (
        cut(x.to(dtype), L, packed).unflatten(2, (H, -1)) for x in (q, k, v, s)
    )
    gates = cut(g.to(accumulation_dtype(dtype)), L, packed).unflatten(2, (H, -1))
    logits, last_k = _read_slots(queries, keys, gates, strengths, initial_state.k, packed)
    weights = apply_between(scale * logits, between)
    out, last_v = read_chunks(weights, strengths, values, gates, initial_state.v, packed)
    return join(out.flatten(2, 3), T, packed).to(q.dtype), GSAState(last_k, last_v)


def _read_slots(
    q: Tensor, k: Tensor, g: Tensor, s: Tensor, initial_state: Tensor, packed: PackedChunks | None
) -> tuple[Tensor, Tensor]:
    """Return K~ q (B, N, H, HQ / H, L, M) and the last K~.

    This is like `read_chunks`, but the gates belong to the values and not to the keys.

    Args:
        q: (B, N, H, HQ / H, L, K), N chunks of L tokens, a power of two.
        k: (B, N, H, 1, L, K).
        g: (B, N, H, 1, L, M), at least float32.
        s: (B, N, H, 1, L, M).
        initial_state: (B, H, M, K), or (S, H, M, K) when packed.
        packed: the chunks of packed sequences; None: rows are not packed.
    """
    dtype, L = initial_state.dtype, k.shape[-2]
    ends = (s * decay_to_end(g).to(dtype)).mT @ k
    decays = g.sum(-2).exp().to(dtype)[..., None]
    starts, last = carry(initial_state, decays[:, :, :, 0], ends[:, :, :, 0], packed)
    logits = decay_from_start(g).to(dtype) * (q @ starts[:, :, :, None].mT)
    logits = logits + (q * k).sum(-1, keepdim=True) * s
    for w in half_widths(L):
        writes = left_halves(s, w) * decay_to_end(left_halves(g, w)).to(dtype)
        reads = right_halves(q, w) @ left_halves(k, w).mT @ writes
        logits = logits + at_right(decay_from_start(right_halves(g, w)).to(dtype) * reads, w)
    return logits, last
