"""Gated slot attention by chunks in plain PyTorch: two passes of gated linear attention."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

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
    if cu_seqlens is None:
        return _run(q, k, v, g, s, scale, between, initial_state)
    outs, states = [], []
    borders = cu_seqlens.tolist()
    for i, (start, stop) in enumerate(pairwise(borders)):
        first = GSAState(*(x[i : i + 1] for x in initial_state))
        row = (
            q[:, start:stop],
            k[:, start:stop],
            v[:, start:stop],
            g[:, start:stop],
            s[:, start:stop],
        )
        out, last = _run(*row, scale, between, first)
        outs.append(out)
        states.append(last)
    return torch.cat(outs, dim=1), GSAState(*(torch.cat(x) for x in zip(*states, strict=True)))


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor,
    scale: float,
    between: Between,
    state: GSAState,
) -> tuple[Tensor, GSAState]:
    T, dtype = q.shape[1], state.k.dtype
    num_groups = q.shape[2] // k.shape[2]
    keys, values, gates, strengths = (_cut(x.to(dtype)) for x in (k, v, g, s))
    # Nothing is left at -100, and sums stay finite.
    running = gates.double().clamp(min=-100).cumsum(-2)
    total = running[..., -1:, :]
    write = strengths * torch.exp((total - running).to(dtype))
    keep, total = torch.exp(running.to(dtype)), torch.exp(total.to(dtype))
    starts_k, last_k = _carry(state.k, total, write.mT @ keys)
    starts_v, last_v = _carry(state.v, total, write.mT @ values)
    levels = list(pivot_levels(running, dtype))
    outs = []
    for j in range(num_groups):  # query heads of one key head
        queries = scale * _cut(q[:, :, j::num_groups].to(dtype))
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
    out = torch.stack(outs, dim=2).flatten(1, 2)  # (B, H G, N, L, V)
    out = out.flatten(2, 3)[:, :, :T].transpose(1, 2)
    return out.to(q.dtype), GSAState(last_k, last_v)


def _cut(x: Tensor) -> Tensor:
    """Cut (B, T, H, D) into chunks, (B, H, N, CHUNK, D); zeros fill the last one."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return padded.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)


def _carry(state: Tensor, keep: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk, (B, H, N, M, D), and after the last; keep decays it."""
    starts = []
    for n in range(added.shape[2]):
        starts.append(state)
        state = keep[:, :, n].mT * state + added[:, :, n]
    return torch.stack(starts, dim=2) if starts else added, state
