"""RAT attention in chunks, in eager PyTorch: all tokens at once (Listing 1 of the paper).

Head h = r G + j uses the queries and keys of group j = h % G. Viewed as (B, T, R, G, D), a tensor
(B, T, H, D) broadcasts against q and k viewed as (B, T, 1, G, D), and nothing is copied.
"""

from functools import partial
from itertools import repeat

import torch
from mezzo_core.ops.checks import can_look
from mezzo_core.ops.impl import Impl
from mezzo_core.ops.named_tuples import replaced
from mezzo_core.ops.packed import check_borders
from mezzo_core.ops.scan import linear_scan
from torch import Tensor

from mezzo_rat.ops.rat_attention.arguments import Parts, Request
from mezzo_rat.ops.rat_attention.chunks import Chunks, continued_chunks, packed_chunks, plain_chunks
from mezzo_rat.ops.rat_attention.reference import widened
from mezzo_rat.ops.rat_attention.state import RATState


def chunk_reference(
    r: Request, keep: Tensor, write: Tensor, scan_impl: Impl
) -> tuple[Tensor, RATState | None]:
    """Scan inside chunks, then attend to the ends of earlier chunks and to each token's k~, v~.

    Args:
        r: what to compute; its state, if any, must have a slot for every chunk that these tokens
            reach.
        keep: (B, T, H, D) forget gates.
        write: (B, T, H, D), 1 - keep.
        scan_impl: the implementation of the scan.

    Returns:
        y (B, T, H, D), before the output gate, and the state after the last real token.
    """
    _, v, _, q, k = r.parts
    form, state, lengths, cu_seqlens = r.form, r.initial_state, r.lengths, r.cu_seqlens
    T, L = v.shape[1], form.chunk_size
    if cu_seqlens is not None and T > 0 and can_look(v):
        return _one_by_one(r, keep, write, cu_seqlens, scan_impl), None
    k_in, v_in = _spread(write, k), write * v
    if state is None or T == 0:
        if cu_seqlens is None or T == 0:
            chunks = plain_chunks(T, L, v.device)
        else:
            chunks = packed_chunks(T, L, cu_seqlens)
        scan = partial(linear_scan, chunk_size=L, cu_seqlens=cu_seqlens, impl=scan_impl)
        k_run, v_run = scan(keep, k_in).out, scan(keep, v_in).out
        if state is not None:  # a step may overwrite the result
            state = RATState(*(x.clone() for x in state))
    else:
        added = torch.full_like(state.lengths, T) if lengths is None else lengths
        chunks = continued_chunks(T, L, state.k_ends.shape[1], state.lengths, added)
        # The rows may be at different places of their chunks, and still one scan over all tokens
        # computes them: the first token of a chunk keeps nothing, and padding keeps everything and
        # writes nothing.
        padding = (torch.arange(T, device=v.device) >= added[:, None])[..., None, None]
        opens = (chunks.position % L == 0)[..., None, None]
        keep = keep.masked_fill(opens, 0.0).masked_fill(padding, 1.0)
        scan = partial(linear_scan, keep, impl=scan_impl)
        unused = (state.lengths % L == 0)[:, None, None]  # no chunk is open; k and v may be NaN
        k_0, v_0 = (x.masked_fill(unused, 0.0) for x in (state.k, state.v))
        k_run, k_last = scan(k_in.masked_fill(padding, 0.0), initial_state=k_0)
        v_run, v_last = scan(v_in.masked_fill(padding, 0.0), initial_state=v_0)
        state = replaced(state, k=k_last, v=v_last, lengths=state.lengths + added)

    ends = [x.gather(1, chunks.end) for x in (chunks.chunk, chunks.position)]
    k_ends = form.rotate(_at(k_run, chunks.end), *ends).to(k.dtype)
    v_ends = _at(v_run, chunks.end).to(v.dtype)
    q_rotated = form.rotate(q, chunks.chunk, chunks.position)
    if state is not None and chunks.changed is not None:
        changed = chunks.changed[..., None, None]
        k_ends, v_ends = k_ends.where(changed, state.k_ends), v_ends.where(changed, state.v_ends)
        state = replaced(state, k_ends=k_ends, v_ends=v_ends)
    return _attend(q, q_rotated, k_run, v_run, k_ends, v_ends, chunks, form.scale), state


def _one_by_one(
    r: Request, keep: Tensor, write: Tensor, cu_seqlens: Tensor, scan_impl: Impl
) -> Tensor:
    """Run packed sequences apart, so that a NaN of one cannot reach the gradients of others."""
    check_borders("chunk_rat_attention", cu_seqlens, keep.shape[1])
    lengths = cu_seqlens.diff().tolist()
    sequences = zip(
        *(repeat(None) if x is None else x.split(lengths, 1) for x in (*r.parts, keep, write)),
        strict=False,
    )
    alone = replaced(r, cu_seqlens=None)
    outs = [
        chunk_reference(replaced(alone, parts=Parts(*parts)), keep, write, scan_impl)[0]
        for *parts, keep, write in sequences
        if keep.shape[1]
    ]
    return torch.cat(outs, 1)


def _attend(
    q: Tensor,
    q_rotated: Tensor,
    k_run: Tensor,
    v_run: Tensor,
    k_ends: Tensor,
    v_ends: Tensor,
    chunks: Chunks,
    scale: float,
) -> Tensor:
    """Attend to [ends of earlier chunks ; own k~]; return (B, T, H, D) in the dtype of v_run.

    RoPE would rotate a query and its own k~ by the same angle, so their logit needs no rotation.
    """
    G, N = q.shape[2], k_ends.shape[1]
    # A weight of 0 times a value of NaN is NaN, also for queries that must not see the value. So a
    # value that is not finite becomes 0, and its key becomes NaN instead. The NaN then reaches the
    # logits, which are masked by selection, and only queries that see the chunk get it.
    lost = ~v_ends.isfinite()
    k_ends, v_ends = k_ends.masked_fill(lost, float("nan")), v_ends.masked_fill(lost, 0.0)
    own = (k_run.unflatten(2, (-1, G)) * q.unsqueeze(2)).sum(-1).flatten(2).transpose(1, 2)
    keys = k_ends.unflatten(2, (-1, G)).permute(0, 2, 3, 4, 1)  # (B, R, G, D, N)
    queries = q_rotated.transpose(1, 2).unsqueeze(1)  # (B, 1, G, T, D)
    past = torch.matmul(*widened(queries, keys)).flatten(1, 2)  # (B, H, T, N)
    slots = torch.arange(N, device=q.device)
    hidden = slots >= chunks.slot[..., None]
    if chunks.first is not None:
        hidden = hidden | (slots < chunks.first[..., None])
    past = (past.to(own.dtype) * scale).masked_fill(hidden[:, None], float("-inf"))
    weights = torch.cat([past, own[..., None] * scale], dim=-1).softmax(-1)
    w_past, w_own = weights.split([N, 1], dim=-1)
    values = torch.matmul(w_past.to(v_ends.dtype), v_ends.transpose(1, 2)).transpose(1, 2)
    return values.to(v_run.dtype) + w_own.transpose(1, 2) * v_run


def _spread(write: Tensor, k: Tensor) -> Tensor:
    """Multiply the gates of all heads into the keys of their groups: (B, T, H, D)."""
    return (write.unflatten(2, (-1, k.shape[2])) * k.unsqueeze(2)).flatten(2, 3)


def _at(x: Tensor, token: Tensor) -> Tensor:
    """Take (B, N, H, D) out of x (B, T, H, D) at the tokens (1 or B, N)."""
    if token.shape[0] == 1:
        return x.index_select(1, token[0])
    return x.gather(1, token[..., None, None].expand(-1, -1, *x.shape[2:]))
