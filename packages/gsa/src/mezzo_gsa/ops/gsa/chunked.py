"""Gated slot attention by chunks in plain PyTorch: two passes of gated linear attention."""

import torch
from torch import Tensor

from mezzo_gsa.ops.eager_chunks import carry, cut, join, lay_out
from mezzo_gsa.ops.gsa.between import Between, apply_between
from mezzo_gsa.ops.gsa.state import GSAState
from mezzo_gsa.ops.pivots import pivot_levels

CHUNK = 64


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
    T, dtype = q.shape[1], initial_state.k.dtype
    num_groups = q.shape[2] // k.shape[2]
    layout = None if cu_seqlens is None else lay_out(T, CHUNK, cu_seqlens)
    keys, values, gates, strengths = (cut(x.to(dtype), CHUNK, layout) for x in (k, v, g, s))
    # Nothing is left at -100, and sums stay finite.
    running = gates.double().clamp(min=-100).cumsum(-2)
    total = running[..., -1:, :]
    write = strengths * torch.exp((total - running).to(dtype))
    keep, total = torch.exp(running.to(dtype)), torch.exp(total.to(dtype)).mT
    starts_k, last_k = carry(initial_state.k, total, write.mT @ keys, layout)
    starts_v, last_v = carry(initial_state.v, total, write.mT @ values, layout)
    levels = list(pivot_levels(running, dtype))
    outs = []
    for j in range(num_groups):  # query heads of one key head
        queries = scale * cut(q[:, :, j::num_groups].to(dtype), CHUNK, layout)
        scores = queries @ keys.mT
        logits = keep * (queries @ starts_k.mT)
        logits = logits + scores.diagonal(dim1=-2, dim2=-1)[..., None] * strengths
        for mask, x in levels:
            logits = logits + x * ((scores * mask) @ (x * strengths))
        p = apply_between(logits, between)
        weights = torch.diag_embed((p * strengths).sum(-1))
        for mask, x in levels:
            weights = weights + mask * ((p * x) @ (strengths * x).mT)
        outs.append((p * keep) @ starts_v + weights @ values)
    out = torch.stack(outs, dim=3).flatten(2, 3)  # (B, N, H G, L, V)
    return join(out, T, layout).to(q.dtype), GSAState(last_k, last_v)
