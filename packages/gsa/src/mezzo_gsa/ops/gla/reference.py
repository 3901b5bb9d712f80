"""Gated linear attention, token by token: the definition (section 2.3 of the GSA paper)."""

import torch
from torch import Tensor


def recurrent_gla_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence. Arguments are as in `recurrent_gla`, with g and the state in float32.

    Each packed sequence runs alone; this defines packing.
    """
    if cu_seqlens is None:
        return _run(q, k, v, g, scale, initial_state)
    lengths = cu_seqlens.diff().tolist()
    rows = (x.split(lengths, dim=1) for x in (q, k, v, g))
    outs, finals = zip(
        *(
            _run(q, k, v, g, scale, state)
            for q, k, v, g, state in zip(*rows, initial_state.split(1), strict=True)
        ),
        strict=True,
    )
    return torch.cat(outs, dim=1), torch.cat(finals)


def _run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    outs = [q.new_zeros(q.shape[0], 0, q.shape[2], v.shape[3])]
    for t in range(q.shape[1]):
        out, state = gla_step(q[:, t], k[:, t], v[:, t], g[:, t], scale, state)
        outs.append(out[:, None].to(q.dtype))
    return torch.cat(outs, dim=1), state


def gla_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Take one token: S[t] = Diag(exp g[t]) S[t-1] + k[t] ⊗ v[t], o[t] = scale S[t]ᵀ q[t].

    Args:
        q: (B, HQ, K); query head h uses head h // (HQ // H).
        k: (B, H, K).
        v: (B, H, V).
        g: (B, H, K), or (B, H, 1) for one gate a head.
        scale: multiplies q.
        state: (B, H, K, V), S[t-1].

    Returns:
        o[t] (B, HQ, V) in the state's dtype, and S[t].
    """
    k, v = k.to(state.dtype), v.to(state.dtype)
    state = g.exp()[..., None] * state + k[..., None] * v[..., None, :]
    groups = q.to(state.dtype).unflatten(1, (k.shape[1], -1))
    return scale * (groups @ state).flatten(1, 2), state
