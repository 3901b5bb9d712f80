"""The parts of the tiled algorithm in PyTorch: for a CPU, for float64, and to test the kernels by.

The Triton kernels have the same names and arguments. A *tile* is S tokens in a row of m layers at
once, each layer at its own place in the sequence; its tensors are (m, S, B, C), position first.
Everything is computed in float32 (float64 for float64) and rounded at the end.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form


class Keys(NamedTuple):
    """The persistent pairs of the tokens before a tile, and where they are."""

    k: Tensor
    """(m, B, P + Tp, C)."""
    v: Tensor
    seen: Tensor | None
    """(B,) int64: pairs of earlier calls in each row, which come first; None for none."""
    first: int
    """Tokens of this call before the tile of the tile's first layer; S fewer for each next one."""

    def before(self, S: int) -> Tensor:
        """Return (m, B), the number of visible slots: those of all tokens before the tile."""
        m, B = self.k.shape[:2]
        own = self.first - S * torch.arange(m, device=self.k.device)
        return own[:, None].expand(m, B) + (0 if self.seen is None else self.seen)


def normed(x: Tensor, weight: Tensor | None, form: Form, dtype: torch.dtype) -> Tensor:
    """Normalize rows (m, ..., C) by weights (m, C)."""
    if form.norm == "none":
        return x.to(dtype, memory_format=torch.contiguous_format)
    xhat, _ = _standardized(x, form)
    return (xhat * _per_row(weight, x)).to(dtype)


def normed_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, form: Form, base: Tensor | None, scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return dx = base + the norm's input gradient, and scale * dx rounded to `dtype`."""
    acc = accumulation_dtype(dtype)
    dx = dy.to(acc)
    if form.norm != "none":
        xhat, rstd = _standardized(x, form)
        g = dx * _per_row(weight, x)
        dx = g - xhat * (g * xhat).mean(-1, keepdim=True)
        if form.norm == "layer":
            dx = dx - g.mean(-1, keepdim=True)
        dx = dx * rstd
    if base is not None:
        dx = base.to(acc) + dx
    return dx, (scale * dx).to(dtype)


def norm_weight_grad(dy: Tensor, x: Tensor, form: Form) -> Tensor:
    """Return the gradient (m, C) of a norm's weight, summed over all rows."""
    xhat, _ = _standardized(x, form)
    return (dy.to(xhat.dtype) * xhat).flatten(1, -2).sum(1)


def add_normed(
    x: Tensor, y: Tensor, scale: float, weight: Tensor | None, form: Form, keep: torch.dtype,
    dtype: torch.dtype, is_normed: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return h = x + scale * y, rounded to `keep`, and h normalized (or not) in `dtype`."""
    acc = accumulation_dtype(dtype)
    h = (x.to(acc) + scale * y.to(acc)).to(keep)
    return h, normed(h, weight, form, dtype) if is_normed else h.to(dtype)


def split_pair(kv: Tensor, weight: Tensor | None, form: Form) -> tuple[Tensor, Tensor]:
    """Split Wk x and Wv x (m, ..., 2C) and normalize the keys."""
    k, v = kv.chunk(2, -1)
    return normed(k, weight, form, kv.dtype), v


def gelu(u: Tensor) -> Tensor:
    return F.gelu(u)


def gelu_bwd(u: Tensor, dg: Tensor) -> Tensor:
    """Return du."""
    acc = accumulation_dtype(u.dtype)
    x = u.to(acc)
    density = torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5
    return (dg.to(acc) * (torch.special.ndtr(x) + x * density)).to(u.dtype)


def attend_earlier(q: Tensor, keys: Keys, slopes: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Attend from a tile's queries (m, S, B, C) to all tokens before the tile.

    Returns:
        o (m, S, B, C), and the natural log-sum-exp (m, S, B, H) of the logits; both float32. With
        nothing to see they are 0 and -inf.
    """
    logits, v = _earlier_logits(q, keys, slopes, form)
    lse = logits.logsumexp(-1)  # (m, B, H, S)
    weights = torch.exp(logits - lse.nan_to_num(neginf=0.0)[..., None])
    o = torch.einsum("mbhsl,mblhd->msbhd", weights, v)
    return o.flatten(3), lse.permute(0, 3, 1, 2)


def attend_step(
    q: Tensor, kt: Tensor, vt: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    slopes: Tensor, form: Form, step: int,
) -> Tensor:
    """Return the attention output of one step's tokens, (m, b, B, C).

    Args:
        q: (m, S, B, C) queries of the tile; the step's are [step b, (step + 1) b).
        kt: temporary keys; a token sees those of its own step up to itself.
        vt: temporary values.
        k: persistent keys; those before the step are there.
        v: persistent values.
        o: attention to all tokens before the tile, by `attend_earlier`.
        lse: its log-sum-exp.
        slopes: (H,) of ALiBi.
        form: the options.
        step: which step of the tile.
    """
    b = form.block_size
    begin, end = step * b, (step + 1) * b
    rows = slice(begin, end)
    return _merge(
        q[:, rows],
        torch.cat([k[:, :begin], kt[:, rows]], 1),
        torch.cat([v[:, :begin], vt[:, rows]], 1),
        o[:, rows],
        lse[:, rows],
        slopes,
        form,
        begin,
    )[0].to(q.dtype)


def attend_tile(
    q: Tensor, kt: Tensor, vt: Tensor, k: Tensor, v: Tensor, keys: Keys, slopes: Tensor, form: Form
) -> tuple[Tensor, Tensor]:
    """Return the attention output of a whole tile in q's dtype, and its log-sum-exp (m, S, B, H).

    The persistent pairs k and v (m, S, B, C) of the tile are all known: this is for the backward.
    """
    o, lse = attend_earlier(q, keys, slopes, form)
    logits, values = _own_logits(q, kt, vt, k, v, slopes, form)
    own = logits.logsumexp(-1).permute(0, 3, 1, 2)
    total = torch.logaddexp(own, lse)
    weights = torch.exp(logits - total.permute(0, 2, 3, 1)[..., None])
    out = torch.einsum("mbhst,mtbhd->msbhd", weights, values).flatten(3)
    out = out + o * _by_head(torch.exp(lse - total), o)
    return out.to(q.dtype), total


def attend_tile_bwd(
    do: Tensor, delta: Tensor, q: Tensor, kt: Tensor, vt: Tensor, k: Tensor, v: Tensor,
    lse: Tensor, keys: Keys, slopes: Tensor, form: Form,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dkt and dvt of a tile (m, S, B, C), in float32.

    Args:
        do: gradient of the attention outputs, (m, S, B, C).
        delta: (m, S, B, H), do · o of each head.
        q: queries; kt, vt, k and v as in `attend_tile`.
        lse: from `attend_tile`.
        keys: the tokens before the tile.
        slopes: (H,) of ALiBi.
        form: the options.
    """
    H, S = form.num_heads, q.shape[1]
    scale = (q.shape[-1] // H) ** -0.5
    do_, delta_ = _heads(do, H), delta.permute(0, 2, 3, 1)[..., None]
    logits, values = _earlier_logits(q, keys, slopes, form)
    p = torch.exp(logits - lse.permute(0, 2, 3, 1)[..., None])
    ds = p * (torch.einsum("msbhd,mblhd->mbhsl", do_, values) - delta_) * scale
    earlier = _by_slot(keys.k[:, :, : p.shape[-1]], H)
    earlier = earlier.masked_fill((logits[:, :, 0, 0] == -torch.inf)[..., None, None], 0)
    dq = torch.einsum("mbhsl,mblhd->msbhd", ds, earlier)
    logits, values = _own_logits(q, kt, vt, k, v, slopes, form)
    p = torch.exp(logits - lse.permute(0, 2, 3, 1)[..., None])
    ds = p * (torch.einsum("msbhd,mtbhd->mbhst", do_, values) - delta_) * scale
    both = torch.cat([_heads(k, H), _heads(kt, H)], 1)
    dq = dq + torch.einsum("mbhst,mtbhd->msbhd", ds, both)
    dkt = torch.einsum("mbhst,msbhd->mtbhd", ds[..., S:], _heads(q, H))
    dvt = torch.einsum("mbhst,msbhd->mtbhd", p[..., S:], do_)
    return dq.flatten(3), dkt.flatten(3), dvt.flatten(3)


class Later(NamedTuple):
    """The queries of the tokens after a tile, with what their gradients need."""

    q: Tensor
    """(m, B, Tp, C): of all tokens, from the tile's first layer on."""
    do: Tensor
    lse: Tensor
    """(m, B, Tp, H)."""
    delta: Tensor
    begin: int
    """The first token after the tile of the tile's first layer; S fewer for each next layer."""


def pairs_bwd(
    k: Tensor, v: Tensor, later: Later, slopes: Tensor, form: Form
) -> tuple[Tensor, Tensor]:
    """Return what all later tokens add to dk and dv of a tile's persistent pairs, in float32.

    Args:
        k: (m, S, B, C).
        v: likewise.
        later: the queries of all tokens.
        slopes: (H,) of ALiBi.
        form: the options.
    """
    m, S, _, C = k.shape
    H, Tp = form.num_heads, later.q.shape[2]
    begin = later.begin - S * torch.arange(m, device=k.device)
    least = later.begin - S * (m - 1)
    place = torch.arange(least, Tp, device=k.device)
    hidden = (place < begin[:, None])[:, None, None, :, None]  # (m, 1, 1, Q, 1)
    q, do = (_heads(x[:, :, least:], H) for x in (later.q, later.do))
    lse, delta = (x[:, :, least:].transpose(2, 3)[..., None] for x in (later.lse, later.delta))
    distance = (place - begin[:, None] + S)[..., None] - torch.arange(S, device=k.device)
    logits = torch.einsum("mbqhd,msbhd->mbhqs", q, _heads(k, H)) * (C // H) ** -0.5
    logits = logits - _bias(slopes, distance[:, None, None])
    p = torch.exp(logits - lse).masked_fill(hidden, 0)
    dv = torch.einsum("mbhqs,mbqhd->msbhd", p, do)
    ds = p * (torch.einsum("mbqhd,msbhd->mbhqs", do, _heads(v, H)) - delta) * (C // H) ** -0.5
    dk = torch.einsum("mbhqs,mbqhd->msbhd", ds, q)
    return dk.flatten(3), dv.flatten(3)


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
    k_, v_ = (_heads(x, H).masked_fill(hidden, 0) for x in (k, v))
    q, do = _heads(later.q, H), _heads(later.do, H)
    lse, delta = (x.transpose(2, 3)[..., None] for x in (later.lse, later.delta))
    place = seen[:, None] + torch.arange(q.shape[2], device=k.device)
    distance = place[..., None] - slot
    logits = torch.einsum("nbqhd,nbshd->nbhqs", q, k_) * scale
    logits = logits - _bias(slopes, distance[:, None])
    p = torch.exp(logits - lse).masked_fill(hidden[:, None, None, :, 0, 0], 0)
    ds = p * (torch.einsum("nbqhd,nbshd->nbhqs", do, v_) - delta) * scale
    dk = torch.einsum("nbhqs,nbqhd->nbshd", ds, q)
    dv = torch.einsum("nbhqs,nbqhd->nbshd", p, do)
    return dk.flatten(3), dv.flatten(3)


def pairs_step_bwd(
    dk: Tensor, dv: Tensor, q: Tensor, k: Tensor, v: Tensor, do: Tensor, delta: Tensor,
    lse: Tensor, slopes: Tensor, form: Form, step: int,
) -> tuple[Tensor, Tensor]:
    """Return dk and dv of one step's persistent pairs, (m, b, B, C), in float32.

    To dk and dv (m, S, B, C), by `pairs_bwd`, it adds what the tile's own later steps contribute;
    their do and delta are known.
    """
    b, H = form.block_size, form.num_heads
    rows, after = slice(step * b, (step + 1) * b), slice((step + 1) * b, q.shape[1])
    if after.start == after.stop:
        return dk[:, rows], dv[:, rows]
    q_, do_ = _heads(q[:, after], H), _heads(do[:, after], H)
    k_, v_ = _heads(k[:, rows], H), _heads(v[:, rows], H)
    lse_, delta_ = (x[:, after].permute(0, 2, 3, 1)[..., None] for x in (lse, delta))
    place = torch.arange(q.shape[1], device=q.device)
    distance = place[after, None] - place[rows]
    p = torch.exp(_products(q_, k_) - _bias(slopes, distance) - lse_)
    scale = (q.shape[-1] // H) ** -0.5
    ds = p * (torch.einsum("mqbhd,msbhd->mbhqs", do_, v_) - delta_) * scale
    return (
        dk[:, rows] + torch.einsum("mbhqs,mqbhd->msbhd", ds, q_).flatten(3),
        dv[:, rows] + torch.einsum("mbhqs,mqbhd->msbhd", p, do_).flatten(3),
    )


def head_products(a: Tensor, b: Tensor, num_heads: int) -> Tensor:
    """Return the sum of a * b over each head, (m, S, B, C) to (m, S, B, H), in float32."""
    return (_heads(a, num_heads) * _heads(b, num_heads)).sum(-1)


def _standardized(x: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return the rows before a norm's weight, and what they were multiplied by."""
    x = x.to(accumulation_dtype(x.dtype))
    if form.norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + form.eps)
    return x * rstd, rstd


def _per_row(weight: Tensor | None, x: Tensor) -> Tensor:
    """Return weights (m, C) so that they multiply x (m, ..., C)."""
    assert weight is not None
    dtype = accumulation_dtype(x.dtype)
    return weight.to(dtype).view(weight.shape[0], *[1] * (x.ndim - 2), weight.shape[1])


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """Split the channels of (m, S, B, C) into heads, in float32 or float64."""
    return x.to(accumulation_dtype(x.dtype)).unflatten(-1, (num_heads, -1))


_by_slot = _heads


def _by_head(factor: Tensor, x: Tensor) -> Tensor:
    """Repeat (m, S, B, H) for the channels of each head of x."""
    return factor.repeat_interleave(x.shape[-1] // factor.shape[-1], -1)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Return the scaled products (m, B, H, Q, K) of position-first q and k."""
    return torch.einsum("mqbhd,mkbhd->mbhqk", q, k) * q.shape[-1] ** -0.5


def _bias(slopes: Tensor, distance: Tensor) -> Tensor:
    """Return slope * distance, (..., H, Q, K) from (H,) and (..., 1, Q, K) or (Q, K)."""
    return slopes[:, None, None] * distance.to(slopes.dtype)


def _earlier_logits(
    q: Tensor, keys: Keys, slopes: Tensor, form: Form
) -> tuple[Tensor, Tensor]:
    """Return the logits (m, B, H, S, L) of the tokens before a tile, and their values."""
    H, S = form.num_heads, q.shape[1]
    before = keys.before(S)
    L = keys.k.shape[2] if keys.seen is not None else max(keys.first, 0)
    slot = torch.arange(L, device=q.device)
    hidden = slot >= before[..., None]  # (m, B, L)
    k, v = _heads(keys.k[:, :, :L], H), _heads(keys.v[:, :, :L], H)
    # What is hidden may hold anything, NaN too.
    v = v.masked_fill(hidden[..., None, None], 0)
    logits = torch.einsum("msbhd,mblhd->mbhsl", _heads(q, H), k) * k.shape[-1] ** -0.5
    distance = before[:, :, None, None] + torch.arange(S, device=q.device)[:, None] - slot
    logits = logits - _bias(slopes, distance[:, :, None])
    return logits.masked_fill(hidden[:, :, None, None], -torch.inf), v


def _own_logits(
    q: Tensor, kt: Tensor, vt: Tensor, k: Tensor, v: Tensor, slopes: Tensor, form: Form
) -> tuple[Tensor, Tensor]:
    """Return the logits (m, B, H, S, 2S) of a tile's own persistent and temporary pairs."""
    H, S, b = form.num_heads, q.shape[1], form.block_size
    place = torch.arange(S, device=q.device)
    distance = place[:, None] - place
    block = place // b
    persistent = block[:, None] > block
    temporary = (block[:, None] == block) & (distance >= 0)
    visible = torch.cat([persistent, temporary], 1)
    both = torch.cat([_heads(k, H), _heads(kt, H)], 1)
    logits = _products(_heads(q, H), both) - _bias(slopes, torch.cat([distance, distance], 1))
    values = torch.cat([_heads(v, H), _heads(vt, H)], 1)
    return logits.masked_fill(~visible, -torch.inf), values


def _merge(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, slopes: Tensor, form: Form, begin: int
) -> tuple[Tensor, Tensor]:
    """Attend from the tokens that start at `begin` of a tile to k, v; merge with o and lse."""
    H = form.num_heads
    place = torch.arange(k.shape[1], device=q.device)
    distance = place[begin:, None] - place
    logits = _products(_heads(q, H), _heads(k, H)) - _bias(slopes, distance)
    logits = logits.masked_fill(distance < 0, -torch.inf)
    own = logits.logsumexp(-1).permute(0, 3, 1, 2)
    total = torch.logaddexp(own, lse)
    weights = torch.exp(logits - total.permute(0, 2, 3, 1)[..., None])
    values = _heads(v, H)
    out = torch.einsum("mbhqk,mkbhd->mqbhd", weights, values).flatten(3)
    return out + o * _by_head(torch.exp(lse - total), o), total
