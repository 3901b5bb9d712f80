"""Attention on a CPU, one block of queries at a time, over the keys that the block may see.

Only the scores of one block are in memory, because the backward recomputes them. With a window of W
these are at most BLOCK (W + BLOCK) scores a head, for any T. It is a registered op, so that
torch.compile does not unroll the loop over the blocks.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezzo_core.ops.attention.request import (
    AttentionOutput,
    Request,
    is_tame,
    lost_tokens,
    seen_interval,
    token_positions,
    visible_keys,
    wild_tokens,
)
from mezzo_core.ops.gradients import register_gradient
from mezzo_core.ops.named_tuples import replaced
from mezzo_core.ops.precision import accumulation_dtype, without_autocast
from mezzo_core.positions import sequence_ids

BLOCK = 128  # queries in a block


def unsupported(r: Request) -> str | None:
    """Say why this backend cannot do the request, or None if it can."""
    return None if r.q.device.type == "cpu" else f"tensors on {r.q.device} (it needs a CPU)"


def attention_blocked(r: Request) -> AttentionOutput:
    """Compute attention; products and softmax run in float32 (float64 for float64)."""
    *inputs, return_lse = r
    with without_autocast(r.q.device):  # it would multiply in its own dtype
        out, lse = _differentiable(*inputs)
    return AttentionOutput(out, lse if return_lse else None)


class _Block(NamedTuple):
    """A block of t queries (B, H, G t, ...), already scaled, and its s keys (B, H, s, ...).

    A token with a NaN or an infinity is 0 in q, k and v, and NaN in the scores of all pairs that
    see it. So it cannot spread to other pairs by a product of a NaN with a weight of 0.
    """

    queries: slice
    keys: slice
    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    hidden: Tensor | None  # True where a query does not see a key, (B, H, G, t, s); None: sees all

    def hide(self, x: Tensor, value: float) -> None:
        """Write a value into x (B, H, G t, s) where a query does not see a key."""
        if self.hidden is not None:
            G = x.shape[2] // self.hidden.shape[-2]
            x.unflatten(2, (G, -1)).masked_fill_(self.hidden, value)


# The fields of a `Request`, except `return_lse`: these ops always return the lse.
_REQUEST_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, bool causal, SymInt? window_size, Tensor? slopes, float scale, "
    "Tensor? cu_seqlens, Tensor? q_positions, Tensor? k_positions"
)


@torch.library.custom_op(
    "mezzo::blocked_attention",
    mutates_args=(),
    schema=f"({_REQUEST_SCHEMA}) -> (Tensor, Tensor)",
)
def _attention(*request: Any) -> tuple[Tensor, Tensor]:
    r = Request._make((*request, True))
    out = r.q.new_zeros(*r.q.shape[:3], r.v.shape[3])
    lse = r.q.new_full(r.q.shape[:3], float("-inf"), dtype=accumulation_dtype(r.q.dtype))
    for block in _blocks(r):
        scores, queries = block.scores, block.queries
        weights = scores.softmax(-1)
        # The largest weight is exp(top - lse): it gives the lse without another sum over the keys.
        top = scores.amax(-1, keepdim=True)
        part_lse = top - weights.amax(-1, keepdim=True).log()
        empty = top == float("-inf")
        if empty.any():
            weights.masked_fill_(empty, 0)
            part_lse.masked_fill_(empty, float("-inf"))
        t = queries.stop - queries.start
        out[:, queries] = _tokens_first(weights @ block.v, t).to(out.dtype)
        lse[:, queries] = _tokens_first(part_lse, t).squeeze(-1)
    return out, lse


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    return q.new_empty(*q.shape[:3], v.shape[3]), lse


@torch.library.custom_op(
    "mezzo::blocked_attention_bwd",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor dlse, Tensor out, Tensor lse, {_REQUEST_SCHEMA})"
    " -> (Tensor, Tensor, Tensor)",
)
def _attention_bwd(
    dout: Tensor, dlse: Tensor, out: Tensor, lse: Tensor, *request: Any
) -> tuple[Tensor, Tensor, Tensor]:
    r = Request._make((*request, True))
    H = r.k.shape[2]
    dq = r.q.new_zeros(r.q.shape)
    dk, dv = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (r.k, r.v))
    # Shared by all scores of a query: softmax subtracts dout·out, and lse adds its own gradient.
    row_term = (dlse - (dout.to(lse.dtype) * out).sum(-1))[..., None]
    # For a query that sees no key, lse = 0 instead of -inf makes its weights exp(-inf - 0) = 0.
    lse = lse.masked_fill(lse == float("-inf"), 0)[..., None]
    lost = ~(dout.isfinite().all(-1, keepdim=True) & row_term.isfinite())
    if lost.any():  # make the weights of these queries NaN; `hide` removes it from unseen keys
        dout, lse = dout.masked_fill(lost, 0), lse.masked_fill(lost, float("nan"))
    for block in _blocks(r):
        queries, keys = block.queries, block.keys
        d = _heads_first(dout[:, queries], H).to(lse.dtype)
        weights = block.scores.sub_(_heads_first(lse[:, queries], H)).exp_()
        dscores = (d @ block.v.transpose(-1, -2)).add_(_heads_first(row_term[:, queries], H))
        dscores.mul_(weights)
        block.hide(weights, 0)
        block.hide(dscores, 0)
        t = queries.stop - queries.start
        dq[:, queries] = _tokens_first(dscores @ block.k, t).mul_(r.scale).to(r.q.dtype)
        dk[:, keys] += (dscores.transpose(-1, -2) @ block.q).transpose(1, 2)
        dv[:, keys] += (weights.transpose(-1, -2) @ d).transpose(1, 2)
    return dq, dk.to(r.k.dtype), dv.to(r.v.dtype)


@_attention_bwd.register_fake
def _(dout: Tensor, dlse: Tensor, out: Tensor, lse: Tensor, *request: Any) -> tuple[Tensor, ...]:
    q, k, v, *_ = request
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, ctx.causal, ctx.window_size, slopes, ctx.scale, *places = inputs
    ctx.save_for_backward(*output, q, k, v, slopes, *places)


def _backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, slopes, cu_seqlens, q_positions, k_positions = ctx.saved_tensors
    places = (cu_seqlens, q_positions, k_positions)
    found = _attention_bwd(
        dout, dlse, *tensors, ctx.causal, ctx.window_size, slopes, ctx.scale, *places
    )
    return (*found, *[None] * 7)


_differentiable = register_gradient(_attention, _backward, _save)


class _IsolatedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *request: Any) -> Tensor:
        _save(ctx, request, ())
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        if is_tame(dout):
            return (dout, *[None] * 10)
        q, k, v, slopes, *places = ctx.saved_tensors
        request = (q, k, v, ctx.causal, ctx.window_size, slopes, ctx.scale, *places)
        wild = wild_tokens(dout)[:, :, None, None]
        with torch.no_grad(), without_autocast(q.device):
            out, lse = _attention(*request)
            rest = dout.where(wild, 0)
            found = _attention_bwd(rest, torch.zeros_like(lse), out, lse, *request)
        return (dout.masked_fill(wild, 0), *found, *[None] * 7)


def isolate_gradient(out: Tensor, r: Request) -> Tensor:
    """Return the output of another backend, with gradients that reach only tokens that are seen.

    Other backends multiply a gradient by weights of 0, so a NaN or an overflow would reach all
    tokens. Here the gradients of such tokens go through blocked attention.
    """
    *inputs, _ = r
    return _IsolatedGradient.apply(out, *inputs)


def _blocks(r: Request) -> Iterator[_Block]:
    """Yield the blocks of queries that see any key, with their scores; masked scores are -inf."""
    _, T, HQ, _ = r.q.shape
    H = r.k.shape[2]
    dtype = accumulation_dtype(r.q.dtype)
    interval = _interval(r)
    q_pos, k_pos = token_positions(r)
    lost_q, lost = lost_tokens(r.q), lost_tokens(r.k, r.v)
    for start in range(0, T, BLOCK):
        queries = slice(start, min(start + BLOCK, T))
        if interval is None:
            keys = _seen_keys(r, q_pos[:, queries], k_pos)
        else:
            # Both ends never decrease along the queries. So the block's keys go from the first
            # query's first key to the last query's last key.
            keys = slice(int(interval[0][start]), int(interval[1][queries.stop - 1]) + 1)
        if keys.start >= keys.stop:
            continue
        q, k, v = r.q[:, queries], r.k[:, keys], r.v[:, keys]
        if lost_q is not None:
            q = q.masked_fill(lost_q[:, queries, None, None], 0)
        if lost is not None:
            k, v = (x.masked_fill(lost[:, keys, None, None], 0) for x in (k, v))
        q = _heads_first(q, H).to(dtype) * r.scale
        k, v = (x.transpose(1, 2).to(dtype) for x in (k, v))
        scores = q @ k.transpose(-1, -2)
        # A view (B, H, G, t, s) of the scores, for slopes and masks.
        wide = scores.unflatten(2, (HQ // H, -1))
        if r.slopes is not None:
            distance = (q_pos[:, queries, None] - k_pos[:, None, keys]).abs()
            wide -= r.slopes.to(dtype).view(H, -1, 1, 1) * distance[:, None, None]
        if lost_q is not None:
            wide.masked_fill_(lost_q[:, None, None, queries, None], float("nan"))
        if lost is not None:
            wide.masked_fill_(lost[:, None, None, None, keys], float("nan"))
        if interval is not None:
            places = k_pos[0, keys]
            visible = places >= interval[0][queries, None]
            visible &= places <= interval[1][queries, None]
        else:
            part = replaced(r, q_positions=q_pos[:, queries], k_positions=k_pos[:, keys])
            visible = visible_keys(part)[:, None, None]
        block = _Block(queries, keys, q, k, v, scores, None if visible.all() else ~visible)
        block.hide(scores, float("-inf"))
        yield block


def _seen_keys(r: Request, q_pos: Tensor, k_pos: Tensor) -> slice:
    """Return the slice from the first to the last key that any query of a block sees."""
    seen = k_pos >= 0
    if r.causal:
        seen = seen & (k_pos <= q_pos.amax(1, keepdim=True))
    if r.window_size is not None:
        seen = seen & (k_pos > q_pos.amin(1, keepdim=True).clamp(min=0) - r.window_size)
    places = seen.any(0).nonzero()
    return slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0, 0)


def _interval(r: Request) -> tuple[Tensor, Tensor] | None:
    if r.q_positions is not None:
        return None
    T, S = r.q.shape[1], r.k.shape[1]
    ids = None if r.cu_seqlens is None else sequence_ids(T, r.cu_seqlens)
    return seen_interval(torch.arange(T), S, r.causal, r.window_size, r.cu_seqlens, ids)


def _heads_first(x: Tensor, num_heads: int) -> Tensor:
    """Turn (B, t, HQ, D) into (B, H, G t, D): the queries of a group are rows of one product."""
    return x.unflatten(2, (num_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _tokens_first(x: Tensor, num_tokens: int) -> Tensor:
    """Undo `_heads_first`: (B, H, G t, D) to (B, t, HQ, D)."""
    return x.unflatten(2, (-1, num_tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)
