"""The attention of leaves to leaves before them in their tile, and its gradients."""

import torch
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager.attention import (
    bias,
    by_head,
    heads,
    products,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Attending


def attend_leaves(tile: Attending, slopes: Tensor, form: Form, begin: int, size: int) -> None:
    """Attend from the `size` tokens from `begin` on to the persistent pairs of those before them.

    What the tokens have seen so far, `tile.o` and `tile.lse`, is overwritten.
    """
    H, rows, before = form.num_heads, *_both(begin, size)
    logits = _logits(tile, slopes, H, begin, size)
    seen = tile.lse[:, rows]
    total = torch.logaddexp(logits.logsumexp(-1).permute(0, 3, 1, 2), seen)
    weights = torch.exp(logits - total.permute(0, 2, 3, 1)[..., None])
    found = torch.einsum("mbhqk,mkbhd->mqbhd", weights, heads(tile.v[:, before], H)).flatten(3)
    tile.o[:, rows] = found + tile.o[:, rows] * by_head(torch.exp(seen - total), found)
    tile.lse[:, rows] = total


def leaves_bwd(
    tile: Attending,
    do: Tensor,
    delta: Tensor,
    slopes: Tensor,
    form: Form,
    begin: int,
    size: int,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add what the `size` tokens from `begin` on give to dk and dv of as many before them.

    Args:
        tile: as `attend_tile` left it.
        do: (m, S, B, C), gradients of the attention outputs.
        delta: (m, S, B, H), do · o of each head.
        slopes: (H,) of ALiBi.
        form: the options.
        begin: the first of the tokens that give.
        size: their number.
        dk: (m, S, B, C) float32.
        dv: likewise.
    """
    H, rows, before = form.num_heads, *_both(begin, size)
    q_, do_ = heads(tile.q[:, rows], H), heads(do[:, rows], H)
    lse, delta_ = (x[:, rows].permute(0, 2, 3, 1)[..., None] for x in (tile.lse, delta))
    p = torch.exp(_logits(tile, slopes, H, begin, size) - lse)
    dp = torch.einsum("mqbhd,msbhd->mbhqs", do_, heads(tile.v[:, before], H))
    ds = p * (dp - delta_) * q_.shape[-1] ** -0.5
    dk[:, before] += torch.einsum("mbhqs,mqbhd->msbhd", ds, q_).flatten(3)
    dv[:, before] += torch.einsum("mbhqs,mqbhd->msbhd", p, do_).flatten(3)


def _both(begin: int, size: int) -> tuple[slice, slice]:
    """Return the places of the queries and of the keys."""
    return slice(begin, begin + size), slice(begin - size, begin)


def _logits(tile: Attending, slopes: Tensor, H: int, begin: int, size: int) -> Tensor:
    """Return (m, B, H, size, size)."""
    rows, before = _both(begin, size)
    place = torch.arange(size, device=tile.q.device)
    distance = size + place[:, None] - place
    return products(heads(tile.q[:, rows], H), heads(tile.k[:, before], H)) - bias(slopes, distance)
