"""The attention of a whole tile, its gradients, and those of its persistent pairs."""

import torch
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager.rows import (
    bias,
    by_head,
    heads,
    products,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form, Past
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Keys, Later, Pairs
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import BackwardWork, ForwardWork


def attend_earlier(work: ForwardWork, keys: Keys) -> None:
    """See `Parts.attend_earlier`."""
    o, lse = _attend_earlier(work, keys)
    work.buffers.attending.o.copy_(o)
    work.buffers.attending.lse.copy_(lse)


def _attend_earlier(work: ForwardWork | BackwardWork, keys: Keys) -> tuple[Tensor, Tensor]:
    logits, v = earlier_logits(work, keys)
    total = logits.logsumexp(-1)  # (m, B, H, S)
    weights = torch.exp(logits - total.nan_to_num(neginf=0.0)[..., None])
    o = torch.einsum("mbhsl,mblhd->msbhd", weights, v).flatten(3)
    return o.contiguous(), total.permute(0, 3, 1, 2).contiguous()


def attend_tile(work: BackwardWork, keys: Keys) -> None:
    """See `Parts.attend_tile`."""
    tile = work.buffers.attending
    o, lse = _attend_earlier(work, keys)
    logits, values = own_logits(work)
    total = torch.logaddexp(logits.logsumexp(-1).permute(0, 3, 1, 2), lse)
    weights = torch.exp(logits - total.permute(0, 2, 3, 1)[..., None])
    own = torch.einsum("mbhst,mtbhd->msbhd", weights, values).flatten(3)
    tile.o.copy_(own + o * by_head(torch.exp(lse - total), o))
    tile.lse.copy_(total)


def attend_tile_bwd(work: BackwardWork, keys: Keys, dqkv: Tensor) -> None:
    """See `Parts.attend_tile_bwd`."""
    dq, dkt, dvt = dqkv.chunk(3, -1)
    t, tile, H = work.buffers, work.buffers.attending, work.form.num_heads
    do, S = t.do, t.do.shape[1]
    scale = (do.shape[-1] // H) ** -0.5
    do_, delta_ = heads(do, H), t.delta.permute(0, 2, 3, 1)[..., None]
    lse = tile.lse.permute(0, 2, 3, 1)[..., None]
    logits, values = earlier_logits(work, keys)
    p = torch.exp(logits - lse)
    ds = p * (torch.einsum("msbhd,mblhd->mbhsl", do_, values) - delta_) * scale
    hidden = (logits[:, :, 0, 0] == -torch.inf)[..., None, None]
    earlier = heads(keys.k[:, :, : p.shape[-1]], H).masked_fill(hidden, 0)
    found = torch.einsum("mbhsl,mblhd->msbhd", ds, earlier)
    logits, values = own_logits(work)
    p = torch.exp(logits - lse)
    ds = p * (torch.einsum("msbhd,mtbhd->mbhst", do_, values) - delta_) * scale
    both = torch.cat([heads(tile.k, H), heads(tile.kt, H)], 1)
    dq.copy_((found + torch.einsum("mbhst,mtbhd->msbhd", ds, both)).flatten(3))
    dkt.copy_(torch.einsum("mbhst,msbhd->mtbhd", ds[..., S:], heads(tile.q, H)).flatten(3))
    dvt.copy_(torch.einsum("mbhst,msbhd->mtbhd", p[..., S:], do_).flatten(3))


def pairs_bwd(work: BackwardWork, later: Later) -> None:
    """See `Parts.pairs_bwd`."""
    at, H, Tp = work.buffers.attending, work.form.num_heads, later.q.shape[2]
    m, S, _, C = at.k.shape
    begin = later.begin - S * torch.arange(m, device=at.k.device)
    least = later.begin - S * (m - 1)
    place = torch.arange(least, Tp, device=at.k.device)
    early = place < begin[:, None]  # (m, Q)
    hidden = early[:, None, None, :, None]
    # Queries that do not see the tile may hold anything, even NaN.
    q, do = (
        heads(x[:, :, least:], H).masked_fill(early[:, None, :, None, None], 0)
        for x in (later.q, later.do)
    )
    lse, delta = (x[:, :, least:].transpose(2, 3)[..., None] for x in (later.lse, later.delta))
    distance = (place - begin[:, None] + S)[..., None] - torch.arange(S, device=at.k.device)
    logits = torch.einsum("mbqhd,msbhd->mbhqs", q, heads(at.k, H)) * (C // H) ** -0.5
    logits = logits - bias(work.slopes, distance[:, None, None])
    p = torch.exp(logits - lse).masked_fill(hidden, 0)
    ds = p * (torch.einsum("mbqhd,msbhd->mbhqs", do, heads(at.v, H)) - delta) * (C // H) ** -0.5
    ds = ds.masked_fill(hidden, 0)
    work.buffers.dk.copy_(torch.einsum("mbhqs,mbqhd->msbhd", ds, q).flatten(3))
    work.buffers.dv.copy_(torch.einsum("mbhqs,mbqhd->msbhd", p, do).flatten(3))


def past_bwd(past: Past, later: Later, slopes: Tensor, form: Form) -> Pairs:
    """Return dk and dv of the pairs of earlier calls (n, B, P, C), from all tokens of this one.

    `later` has the queries of all tokens; `slopes` are ALiBi's, (H,).
    """
    k, v, seen = past
    H, scale = form.num_heads, (k.shape[-1] // form.num_heads) ** -0.5
    slot = torch.arange(k.shape[2], device=k.device)
    hidden = (slot >= seen[:, None])[..., None, None]
    k_, v_ = (heads(x, H).masked_fill(hidden, 0) for x in (k, v))
    q, do = heads(later.q, H), heads(later.do, H)
    lse, delta = (x.transpose(2, 3)[..., None] for x in (later.lse, later.delta))
    place = seen[:, None] + torch.arange(q.shape[2], device=k.device)
    distance = place[..., None] - slot
    logits = torch.einsum("nbqhd,nbshd->nbhqs", q, k_) * scale
    logits = logits - bias(slopes, distance[:, None])
    p = torch.exp(logits - lse).masked_fill(hidden[:, None, None, :, 0, 0], 0)
    ds = p * (torch.einsum("nbqhd,nbshd->nbhqs", do, v_) - delta) * scale
    dk = torch.einsum("nbhqs,nbqhd->nbshd", ds, q)
    dv = torch.einsum("nbhqs,nbqhd->nbshd", p, do)
    return Pairs(dk.flatten(3), dv.flatten(3))


def earlier_logits(work: ForwardWork | BackwardWork, keys: Keys) -> tuple[Tensor, Tensor]:
    """Return the logits (m, B, H, S, L) of the tokens before a tile, and their values."""
    q, H = work.buffers.attending.q, work.form.num_heads
    S = q.shape[1]
    before = keys.before(S)
    L = keys.k.shape[2] if keys.seen is not None else keys.first
    slot = torch.arange(L, device=q.device)
    hidden = slot >= before[..., None]  # (m, B, L)
    k, v = heads(keys.k[:, :, :L], H), heads(keys.v[:, :, :L], H)
    # Hidden slots may hold anything, even NaN.
    v = v.masked_fill(hidden[..., None, None], 0)
    logits = torch.einsum("msbhd,mblhd->mbhsl", heads(q, H), k) * k.shape[-1] ** -0.5
    distance = before[:, :, None, None] + torch.arange(S, device=q.device)[:, None] - slot
    logits = logits - bias(work.slopes, distance[:, :, None])
    return logits.masked_fill(hidden[:, :, None, None], -torch.inf), v


def own_logits(work: BackwardWork) -> tuple[Tensor, Tensor]:
    """Return the logits (m, B, H, S, 2S) of a tile's own persistent and temporary pairs, and v."""
    tile, H = work.buffers.attending, work.form.num_heads
    place = torch.arange(tile.q.shape[1], device=tile.q.device)
    distance = place[:, None] - place
    block = place // work.form.block_size
    persistent = block[:, None] > block
    temporary = (block[:, None] == block) & (distance >= 0)
    both = torch.cat([heads(tile.k, H), heads(tile.kt, H)], 1)
    hidden = ~torch.cat([persistent, temporary], 1)
    logits = products(heads(tile.q, H), both)
    logits = logits - bias(work.slopes, torch.cat([distance, distance], 1))
    values = torch.cat([heads(tile.v, H), heads(tile.vt, H)], 1)
    return logits.masked_fill(hidden, -torch.inf), values
