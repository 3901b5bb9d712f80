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
    return run_tokens(partial(gla_step, scale=scale), (q, k, v, g), initial_state, cu_seqlens)


def run_tokens(
    step: Callable[..., Any], inputs: tuple[Tensor, ...], state: Any, cu_seqlens: Tensor | None
) -> tuple[Tensor, Any]:
    """Run a recurrence token by token; each packed sequence runs alone, which defines packing.

    Args:
        step: takes a token of each input, and `state`; returns its output and the next state.
        inputs: q (B, T, HQ, K), k, v (B, T, H, V) and more.
        state: before the first token of each sequence.
        cu_seqlens: (S + 1,) borders of packed sequences.

    Returns:
        out (B, T, HQ, V) in the dtype of q, and the last state.
    """
    if cu_seqlens is not None:
        rows = zip(*(x.split(cu_seqlens.diff().tolist(), dim=1) for x in inputs), strict=True)
        results = (
            run_tokens(step, row, tree_map(itemgetter(slice(i, i + 1)), state), None)
            for i, row in enumerate(rows)
        )
        parts, states = zip(*results, strict=True)
        return torch.cat(parts, dim=1), tree_map(lambda *each: torch.cat(each), *states)
    q, _, v, *_ = inputs
    outs = []
    for token in zip(*(x.unbind(1) for x in inputs), strict=True):
        out, state = step(*token, state=state)
        outs.append(out)
    out = torch.stack(outs, dim=1) if outs else q.new_empty(*q.shape[:3], v.shape[3])
    return out.to(q.dtype), state


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
