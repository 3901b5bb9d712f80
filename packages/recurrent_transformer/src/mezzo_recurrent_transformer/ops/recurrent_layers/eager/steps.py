"""The attention of one step of a tile, forward and backward: to the tokens of its own leaf."""

import torch
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager.attention import (
    bias,
    by_head,
    heads,
    products,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.eager.rows import (
    head_products,
    normed_bwd,
    split_pair,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Attending
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import leaf_of


def attend_step(
    tile: Attending,
    kv: Tensor | None,
    k_norm: Tensor | None,
    slopes: Tensor,
    form: Form,
    step: int,
    out: Tensor,
) -> None:
    """Write the attention output (m, b, B, C) of one step's tokens, [step b, (step + 1) b).

    Before that, the persistent pairs of the step before are stored in the tile: they are the
    products kv (m, b, B, 2C), whose keys are still to be normalized. None in a leaf's first step.
    """
    H, b = form.num_heads, form.block_size
    begin, rows = step * b, slice(step * b, (step + 1) * b)
    first = leaf_of(begin, tile.q.shape[1], b).start
    if kv is not None:
        last = slice(begin - b, begin)
        split_pair(kv, k_norm, form, tile.k[:, last], tile.v[:, last])
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


def pairs_step_bwd(
    tile: Attending,
    do: Tensor,
    delta: Tensor,
    raw: Tensor,
    k_norm: Tensor | None,
    slopes: Tensor,
    form: Form,
    step: int,
    dk: Tensor,
    dv: Tensor,
    dpair: Tensor,
) -> None:
    """Finish the gradients of one step's persistent pairs, and go back through the keys' norm.

    Args:
        tile: as `attend_tile` left it.
        do: (m, S, B, C), gradients of the attention outputs of the tile's later steps.
        delta: (m, S, B, H), do · o of each head: known for the steps after the next one; that of
            the next step, if it is of the same leaf, is written.
        raw: (m, S, B, C), the persistent keys before their norm.
        k_norm: (m, C), its weight.
        slopes: (H,) of ALiBi.
        form: the options.
        step: which step; its tokens are [step b, (step + 1) b).
        dk: (m, S, B, C) float32, from the tokens after the leaf; what the leaf's later steps give
            is added in the step's tokens.
        dv: likewise, but nothing is added: no one reads it again.
        dpair: written for the step's tokens, (m, S, B, 2C): the gradient of Wk n and Wv n.
    """
    b, H, C, S = form.block_size, form.num_heads, do.shape[-1], do.shape[1]
    end = leaf_of(step * b, S, b).stop
    rows, after = slice(step * b, (step + 1) * b), slice((step + 1) * b, end)
    found = dv[:, rows]
    if after.start < end:
        new = slice(after.start, after.start + b)
        head_products(do[:, new], tile.o[:, new], delta[:, new])
        q_, do_ = heads(tile.q[:, after], H), heads(do[:, after], H)
        k_, v_ = heads(tile.k[:, rows], H), heads(tile.v[:, rows], H)
        lse, delta_ = (x[:, after].permute(0, 2, 3, 1)[..., None] for x in (tile.lse, delta))
        place = torch.arange(S, device=do.device)
        p = torch.exp(products(q_, k_) - bias(slopes, place[after, None] - place[rows]) - lse)
        ds = p * (torch.einsum("mqbhd,msbhd->mbhqs", do_, v_) - delta_) * (C // H) ** -0.5
        dk[:, rows] += torch.einsum("mbhqs,mqbhd->msbhd", ds, q_).flatten(3)
        found = found + torch.einsum("mbhqs,mqbhd->msbhd", p, do_).flatten(3)
    here = dpair[:, rows]
    normed_bwd(dk[:, rows], raw[:, rows], k_norm, form, None, 1.0, None, here[..., :C])
    here[..., C:] = found
