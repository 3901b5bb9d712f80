"""Gated linear attention, token by token: the definition (section 2.3 of the GSA paper)."""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def recurrent_gla_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence. Arguments are as in `recurrent_gla`, with g and the state in float32."""
    return run_apart(partial(_run, scale), (q, k, v, g), initial_state, cu_seqlens)


def run_apart(
    run: Callable[..., Any], inputs: tuple[Tensor, ...], state: Any, cu_seqlens: Tensor | None
) -> tuple[Tensor, Any]:
    """Return `run(*inputs, state)`, where each packed sequence runs alone: this defines packing."""
    if cu_seqlens is None:
        return run(*inputs, state)
    rows = zip(*(x.split(cu_seqlens.diff().tolist(), dim=1) for x in inputs), strict=True)
    results = (
        run(*row, tree_map(itemgetter(slice(i, i + 1)), state)) for i, row in enumerate(rows)
    )
    outs, states = zip(*results, strict=True)
    return torch.cat(outs, dim=1), tree_map(lambda *parts: torch.cat(parts), *states)


def _run(
    scale: float, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor
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
