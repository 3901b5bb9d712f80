"""The linear scan and its adjoint, as loops over time: the definition, and the fast form on a CPU.

    h[t]  = a[t] ⊙ h[t-1] + x[t]               h[-1] = h0
    dx[t] = dh[t] + a[t+1] ⊙ dx[t+1]           dx[T-1] = dh[T-1] + dhT
    da[t] = dx[t] ⊙ h[t-1]                     dh0 = a[0] ⊙ dx[0]

Where a chunk starts (t % L == 0, t > 0) h[t-1] counts as zero. Every time step is one fused
multiply-add in place, over all rows, chunks and channels at once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mezzo_core.ops.precision import accumulation_dtype


def linear_scan_fwd(
    a: Tensor, x: Tensor, h0: Tensor | None, chunk_size: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scan forward.

    Args:
        a: (B, T, D) decays.
        x: (B, T, D) inputs.
        h0: (B, D), or (S, D) when packed; None for zeros.
        chunk_size: L, or 0 for one chunk as long as the sequence.
        cu_seqlens: (S + 1,) borders of packed sequences, or None.

    Returns:
        h (B, T, D) in x's dtype, and the last states, (B, D) or (S, D), at least float32.
    """
    dtype = accumulation_dtype(x.dtype)
    h, decay = x.to(dtype, copy=True, memory_format=torch.contiguous_format), a.to(dtype)
    num_states = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    zeros = h.new_zeros(num_states, x.shape[2])
    final = zeros if h0 is None else h0.to(dtype, copy=True, memory_format=torch.contiguous_format)
    for tokens, state in _sequences(x.shape[1], cu_seqlens):
        ht, at = h[:, tokens], decay[:, tokens]
        ht[:, 0].addcmul_(at[:, 0], final[state])
        for hs, decays in zip(_steps(ht, chunk_size), _steps(at, chunk_size), strict=True):
            for t in range(1, len(hs)):
                hs[t].addcmul_(decays[t], hs[t - 1])
        final[state] = ht[:, -1]
    return h.to(x.dtype), final


def linear_scan_bwd(
    dout: Tensor,
    dfinal: Tensor,
    a: Tensor,
    out: Tensor,
    h0: Tensor | None,
    chunk_size: int,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of a, x and h0 from those of `out` and of the last states."""
    dtype = accumulation_dtype(out.dtype)
    dx, decay = dout.to(dtype, copy=True, memory_format=torch.contiguous_format), a.to(dtype)
    da = torch.empty_like(dx)
    dh0 = dfinal.to(dtype, copy=True, memory_format=torch.contiguous_format)
    for tokens, state in _sequences(out.shape[1], cu_seqlens):
        dxt, dat, at, ht = dx[:, tokens], da[:, tokens], decay[:, tokens], out[:, tokens]
        dxt[:, -1] += dh0[state]
        for dxs, decays in zip(_steps(dxt, chunk_size), _steps(at, chunk_size), strict=True):
            for t in reversed(range(len(dxs) - 1)):
                dxs[t].addcmul_(decays[t + 1], dxs[t + 1])
        torch.mul(dxt[:, 1:], ht[:, :-1], out=dat[:, 1:])
        dat[:, :: chunk_size or dat.shape[1]] = 0
        if h0 is not None:
            dat[:, 0] = dxt[:, 0] * h0[state]
        dh0[state] = at[:, 0] * dxt[:, 0]
    return da.to(a.dtype), dx.to(out.dtype), dh0


def _sequences(num_tokens: int, cu_seqlens: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Yield (tokens, rows of the state) of every sequence that has tokens."""
    if cu_seqlens is None:
        borders, states = [0, num_tokens], [slice(None)]
    else:
        borders = cu_seqlens.tolist()
        states = [slice(s, s + 1) for s in range(len(borders) - 1)]
    for start, end, state in zip(borders[:-1], borders[1:], states, strict=True):
        if end > start:
            yield slice(start, end), state


def _steps(rows: Tensor, chunk_size: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield a tuple of views for all N full chunks, then one for the short last chunk.

    Each tuple has one view for each time step, (B, N, D) or for the short chunk (B, D).
    """
    length = rows.shape[1]
    full = length - length % chunk_size if chunk_size else 0
    if full:
        yield rows[:, :full].unflatten(1, (-1, chunk_size)).unbind(2)
    if full < length:
        yield rows[:, full:].unbind(1)
