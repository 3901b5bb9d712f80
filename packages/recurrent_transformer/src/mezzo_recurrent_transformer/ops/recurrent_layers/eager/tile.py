"""The attention of a whole tile, its gradients, and those of its persistent pairs."""

import torch
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager.attention import (
    bias,
    by_head,
    earlier_logits,
    heads,
    own_logits,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Attending, Keys, Later


def attend_earlier(
    q: Tensor, keys: Keys, slopes: Tensor, form: Form, o: Tensor, lse: Tensor
) -> None:
    """Attend from a tile's queries (m, S, B, C) to all tokens before the tile.

    Writes o (m, S, B, C) and the natural log-sum-exp (m, S, B, H) of the logits, both in float32.
    With nothing to see they are 0 and -inf.
    """
    logits, v = earlier_logits(q, keys, slopes, form)
    total = logits.logsumexp(-1)  # (m, B, H, S)
    weights = torch.exp(logits - total.nan_to_num(neginf=0.0)[..., None])
    o.copy_(torch.einsum("mbhsl,mblhd->msbhd", weights, v).flatten(3))
    lse.copy_(total.permute(0, 3, 1, 2))


def attend_tile(tile: Attending, keys: Keys, slopes: Tensor, form: Form) -> None:
    """Write the attention output of a whole tile and its log-sum-exp into `tile.o`, `tile.lse`.

    The persistent pairs of the tile are all known: this is for the backward. `tile.o` has the dtype
    of q here.
    """
    dtype = tile.lse.dtype
    o, lse = tile.o.new_empty(tile.o.shape, dtype=dtype), torch.empty_like(tile.lse)
    attend_earlier(tile.q, keys, slopes, form, o, lse)
    logits, values = own_logits(tile, slopes, form)
    total = torch.logaddexp(logits.logsumexp(-1).permute(0, 3, 1, 2), lse)
    weights = torch.exp(logits - total.permute(0, 2, 3, 1)[..., None])
    own = torch.einsum("mbhst,mtbhd->msbhd", weights, values).flatten(3)
    tile.o.copy_(own + o * by_head(torch.exp(lse - total), o))
    tile.lse.copy_(total)


def attend_tile_bwd(
    tile: Attending,
    do: Tensor,
    delta: Tensor,
    keys: Keys,
    slopes: Tensor,
    form: Form,
    dqkv: Tensor,
) -> None:
    """Write the gradients of a tile's queries and temporary pairs, side by side.

    Args:
        tile: as `attend_tile` left it.
        do: gradient of the attention outputs, (m, S, B, C).
        delta: (m, S, B, H), do · o of each head.
        keys: the tokens before the tile.
        slopes: (H,) of ALiBi.
        form: the options.
        dqkv: written, (m, S, B, 3C).
    """
    dq, dkt, dvt = dqkv.chunk(3, -1)
    H, S = form.num_heads, do.shape[1]
    scale = (do.shape[-1] // H) ** -0.5
    do_, delta_ = heads(do, H), delta.permute(0, 2, 3, 1)[..., None]
    lse = tile.lse.permute(0, 2, 3, 1)[..., None]
    logits, values = earlier_logits(tile.q, keys, slopes, form)
    p = torch.exp(logits - lse)
    ds = p * (torch.einsum("msbhd,mblhd->mbhsl", do_, values) - delta_) * scale
    hidden = (logits[:, :, 0, 0] == -torch.inf)[..., None, None]
    earlier = heads(keys.k[:, :, : p.shape[-1]], H).masked_fill(hidden, 0)
    found = torch.einsum("mbhsl,mblhd->msbhd", ds, earlier)
    logits, values = own_logits(tile, slopes, form)
    p = torch.exp(logits - lse)
    ds = p * (torch.einsum("msbhd,mtbhd->mbhst", do_, values) - delta_) * scale
    both = torch.cat([heads(tile.k, H), heads(tile.kt, H)], 1)
    dq.copy_((found + torch.einsum("mbhst,mtbhd->msbhd", ds, both)).flatten(3))
    dkt.copy_(torch.einsum("mbhst,msbhd->mtbhd", ds[..., S:], heads(tile.q, H)).flatten(3))
    dvt.copy_(torch.einsum("mbhst,msbhd->mtbhd", p[..., S:], do_).flatten(3))


def pairs_bwd(
    k: Tensor, v: Tensor, later: Later, slopes: Tensor, form: Form, dk: Tensor, dv: Tensor
) -> None:
    """Write what the tokens after a tile give to dk and dv of its persistent pairs, in float32.

    Args:
        k: (m, S, B, C).
        v: likewise.
        later: the queries of all tokens.
        slopes: (H,) of ALiBi.
        form: the options.
        dk: written, (m, S, B, C); 0 if no tokens come after the tile.
        dv: likewise.
    """
    m, S, _, C = k.shape
    H, Tp = form.num_heads, later.q.shape[2]
    begin = later.begin - S * torch.arange(m, device=k.device)
    least = later.begin - S * (m - 1)
    place = torch.arange(least, Tp, device=k.device)
    hidden = (place < begin[:, None])[:, None, None, :, None]  # (m, 1, 1, Q, 1)
    q, do = (heads(x[:, :, least:], H) for x in (later.q, later.do))
    lse, delta = (x[:, :, least:].transpose(2, 3)[..., None] for x in (later.lse, later.delta))
    distance = (place - begin[:, None] + S)[..., None] - torch.arange(S, device=k.device)
    logits = torch.einsum("mbqhd,msbhd->mbhqs", q, heads(k, H)) * (C // H) ** -0.5
    logits = logits - bias(slopes, distance[:, None, None])
    p = torch.exp(logits - lse).masked_fill(hidden, 0)
    ds = p * (torch.einsum("mbqhd,msbhd->mbhqs", do, heads(v, H)) - delta) * (C // H) ** -0.5
    dk.copy_(torch.einsum("mbhqs,mbqhd->msbhd", ds, q).flatten(3))
    dv.copy_(torch.einsum("mbhqs,mbqhd->msbhd", p, do).flatten(3))


def past_bwd(
    past: tuple[Tensor, Tensor, Tensor], later: Later, slopes: Tensor, form: Form
) -> tuple[Tensor, Tensor]:
    """Return dk and dv of the pairs of earlier calls (n, B, P, C), from all tokens of this one.

    Args:
        past: k, v and their numbers (B,).
        later: the queries of all tokens.
        slopes: (H,) of ALiBi.
        form: the options.
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
    return dk.flatten(3), dv.flatten(3)
