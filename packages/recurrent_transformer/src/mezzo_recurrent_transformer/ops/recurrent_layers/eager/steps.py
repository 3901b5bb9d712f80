"""The attention of a tile's steps: to the tokens of their own leaf, and of leaves to leaves."""

import torch
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager.rows import (
    bias,
    by_head,
    head_products,
    heads,
    normed_bwd,
    products,
    split_pair,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import leaf_of
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import BackwardWork, ForwardWork


def narrow_leaf(work: ForwardWork | BackwardWork, leaf: range) -> bool:
    """Return False: only a kernel runs all steps of a leaf at once; see `Parts.narrow_leaf`."""
    return False


narrow_leaf_bwd = narrow_leaf


def attend_step(work: ForwardWork, kv: Tensor | None, step: int, out: Tensor) -> None:
    """See `Parts.attend_step`."""
    tile, slopes, form = work.buffers.attending, work.slopes, work.form
    H, b = form.num_heads, form.block_size
    begin, rows = step * b, slice(step * b, (step + 1) * b)
    first = leaf_of(begin, tile.q.shape[1], b).start
    if kv is not None:
        last = slice(begin - b, begin)
        split_pair(kv, work.w.k_norm, form, tile.k[:, last], tile.v[:, last])
    k = torch.cat([tile.k[:, first:begin], tile.kt[:, rows]], 1)
    v = torch.cat([tile.v[:, first:begin], tile.vt[:, rows]], 1)
    place = torch.arange(first, begin + b, device=k.device)
    distance = place[begin - first :, None] - place
    logits = products(heads(tile.q[:, rows], H), heads(k, H)) - bias(slopes, distance)
    logits = logits.masked_fill(distance < 0, -torch.inf)
    earlier = tile.lse[:, rows]
    total = torch.logaddexp(logits.logsumexp(-1).permute(0, 3, 1, 2), earlier)
    weights = torch.exp(logits - total.permute(0, 2, 3, 1)[..., None])
    found = torch.einsum("mbhqk,mkbhd->mqbhd", weights, heads(v, H)).flatten(3)
    out.copy_(found + tile.o[:, rows] * by_head(torch.exp(earlier - total), found))


def pairs_step_bwd(work: BackwardWork, step: int) -> None:
    """See `Parts.pairs_step_bwd`."""
    t, tile, form = work.buffers, work.buffers.attending, work.form
    do, delta, b, H = t.do, t.delta, form.block_size, form.num_heads
    _, S, _, C = do.shape
    end = leaf_of(step * b, S, b).stop
    rows, after = slice(step * b, (step + 1) * b), slice((step + 1) * b, end)
    found = t.dv[:, rows]
    if after.start < end:
        new = slice(after.start, after.start + b)
        head_products(do[:, new], tile.o[:, new], delta[:, new])
        q_, do_ = heads(tile.q[:, after], H), heads(do[:, after], H)
        k_, v_ = heads(tile.k[:, rows], H), heads(tile.v[:, rows], H)
        lse, delta_ = (x[:, after].permute(0, 2, 3, 1)[..., None] for x in (tile.lse, delta))
        place = torch.arange(S, device=do.device)
        p = torch.exp(products(q_, k_) - bias(work.slopes, place[after, None] - place[rows]) - lse)
        ds = p * (torch.einsum("mqbhd,msbhd->mbhqs", do_, v_) - delta_) * (C // H) ** -0.5
        t.dk[:, rows] += torch.einsum("mbhqs,mqbhd->msbhd", ds, q_).flatten(3)
        found = found + torch.einsum("mbhqs,mqbhd->msbhd", p, do_).flatten(3)
    here = t.dpair[:, rows]
    normed_bwd(t.dk[:, rows], t.raw[:, rows], work.w.k_norm, form, None, 1.0, None, here[..., :C])
    here[..., C:] = found


def attend_leaves(work: ForwardWork, begin: int, size: int) -> None:
    """See `Parts.attend_leaves`."""
    tile = work.buffers.attending
    H, rows, before = work.form.num_heads, *_both(begin, size)
    logits = _leaves_logits(work, begin, size)
    seen = tile.lse[:, rows]
    total = torch.logaddexp(logits.logsumexp(-1).permute(0, 3, 1, 2), seen)
    weights = torch.exp(logits - total.permute(0, 2, 3, 1)[..., None])
    found = torch.einsum("mbhqk,mkbhd->mqbhd", weights, heads(tile.v[:, before], H)).flatten(3)
    tile.o[:, rows] = found + tile.o[:, rows] * by_head(torch.exp(seen - total), found)
    tile.lse[:, rows] = total


def leaves_bwd(work: BackwardWork, begin: int, size: int) -> None:
    """See `Parts.leaves_bwd`."""
    t, tile = work.buffers, work.buffers.attending
    H, rows, before = work.form.num_heads, *_both(begin, size)
    q_, do_ = heads(tile.q[:, rows], H), heads(t.do[:, rows], H)
    lse, delta_ = (x[:, rows].permute(0, 2, 3, 1)[..., None] for x in (tile.lse, t.delta))
    p = torch.exp(_leaves_logits(work, begin, size) - lse)
    dp = torch.einsum("mqbhd,msbhd->mbhqs", do_, heads(tile.v[:, before], H))
    ds = p * (dp - delta_) * q_.shape[-1] ** -0.5
    t.dk[:, before] += torch.einsum("mbhqs,mqbhd->msbhd", ds, q_).flatten(3)
    t.dv[:, before] += torch.einsum("mbhqs,mqbhd->msbhd", p, do_).flatten(3)


def _both(begin: int, size: int) -> tuple[slice, slice]:
    """Return the places of the queries and of the keys."""
    return slice(begin, begin + size), slice(begin - size, begin)


def _leaves_logits(work: ForwardWork | BackwardWork, begin: int, size: int) -> Tensor:
    """Return (m, B, H, size, size)."""
    tile, H, rows, before = work.buffers.attending, work.form.num_heads, *_both(begin, size)
    place = torch.arange(size, device=tile.q.device)
    logits = products(heads(tile.q[:, rows], H), heads(tile.k[:, before], H))
    return logits - bias(work.slopes, size + place[:, None] - place)
