"""Gated slot attention, token by token: the definition (section 3.1 of the GSA paper)."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo_gsa.ops.gla.reference import run_tokens
from mezzo_gsa.ops.gsa.arguments import Between, GSAState


def recurrent_gsa_reference(
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
    """Run the recurrence. Arguments are as in `recurrent_gsa`, with g and s given in float32."""
    step = partial(gsa_step, scale=scale, between=between)
    return run_tokens(step, (q, k, v, g, s), initial_state, cu_seqlens)


def gsa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor,
    scale: float,
    between: Between,
    state: GSAState,
) -> tuple[Tensor, GSAState]:
    """Process one token by equations 6 to 8.

    The shapes are q (B, HQ, K), k (B, H, K), v (B, H, V), g and s (B, H, M).

    Returns:
        o (B, HQ, V) in the state's dtype, and the next state.
    """
    dtype = state.k.dtype
    keep, write = torch.exp(g)[..., None], s[..., None]
    slots_k = keep * state.k + write * k.to(dtype)[:, :, None, :]
    slots_v = keep * state.v + write * v.to(dtype)[:, :, None, :]
    groups = q.to(dtype).unflatten(1, (k.shape[1], -1))
    logits = scale * torch.einsum("bhmk,bhgk->bhgm", slots_k, groups)
    out = torch.einsum("bhgm,bhmv->bhgv", apply_between(logits, between), slots_v)
    return out.flatten(1, 2), GSAState(slots_k, slots_v)


def apply_between(logits: Tensor, between: Between) -> Tensor:
    """Return the second pass's queries from the first pass's outputs (..., M)."""
    if between == "softmax":
        return torch.softmax(logits, dim=-1)
    if between == "swish":
        return F.silu(logits)
    if between == "relu":
        return F.relu(logits)
    return F.relu(logits).square() if between == "relu_squared" else logits
