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


def normed(x: Tensor, weight: Tensor | None, form: Form, out: Tensor) -> None:
    """Normalize rows (m, ..., C) by weights (m, C)."""
    if form.norm == "none":
        out.copy_(x)
        return
    xhat, _ = _standardized(x, form)
    out.copy_(xhat * _per_row(weight, x))


def normed_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    form: Form,
    base: Tensor | None,
    scale: float,
    dx: Tensor | None,
    scaled: Tensor | None,
) -> None:
    """Write dx = base + the gradient of a norm's input, and `scaled` = scale * dx.

    Args:
        dy: (m, ..., C), the gradient of the norm's output.
        x: likewise, its input.
        weight: (m, C).
        form: the options.
        base: likewise, what is added; None for nothing.
        scale: of `scaled`.
        dx: written, if given.
        scaled: written, if given.
    """
    found = dy.to(accumulation_dtype(dy.dtype))
    if form.norm != "none":
        xhat, rstd = _standardized(x, form)
        g = found * _per_row(weight, x)
        found = g - xhat * (g * xhat).mean(-1, keepdim=True)
        if form.norm == "layer":
            found = found - g.mean(-1, keepdim=True)
        found = found * rstd
    if base is not None:
        found = base + found
    if dx is not None:
        dx.copy_(found)
    if scaled is not None:
        scaled.copy_(scale * found)


def add_norm_weight_grad(dy: Tensor, x: Tensor, form: Form, total: Tensor) -> None:
    """Add the gradient of a norm's weight, summed over all rows, to `total` (m, C)."""
    xhat, _ = _standardized(x, form)
    total += (dy.to(xhat.dtype) * xhat).flatten(1, -2).sum(1)


def add_normed(
    x: Tensor, y: Tensor, scale: float, weight: Tensor | None, form: Form, h: Tensor, out: Tensor
) -> None:
    """Write h = x + scale * y, and h as it was rounded, normalized, into `out`."""
    acc = accumulation_dtype(y.dtype)
    h.copy_(x.to(acc) + scale * y.to(acc))
    normed(h, weight, form, out)


def split_pair(kv: Tensor, weight: Tensor | None, form: Form, k: Tensor, v: Tensor) -> None:
    """Split Wk n and Wv n (m, ..., 2C) into normalized keys and values (m, ..., C)."""
    raw, values = kv.chunk(2, -1)
    normed(raw, weight, form, k)
    v.copy_(values)


def split_qkv(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    form: Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> None:
    """Split Wq n, Wk n and Wv n (m, ..., 3C) into normalized queries and keys, and values."""
    raw, rest = qkv.split([q.shape[-1], 2 * q.shape[-1]], -1)
    normed(raw, q_norm, form, q)
    split_pair(rest, k_norm, form, k, v)


def gelu(u: Tensor, out: Tensor) -> None:
    """Write u Φ(u)."""
    out.copy_(F.gelu(u))


def gelu_bwd(u: Tensor, dg: Tensor, out: Tensor) -> None:
    """Write the gradient of u, and then u Φ(u) over u."""
    x = u.to(accumulation_dtype(u.dtype))
    below = torch.special.ndtr(x)
    density = torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5
    out.copy_(dg.to(x.dtype) * (below + x * density))
    u.copy_(x * below)


def head_products(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write the sum of a * b (m, S, B, C) over each head, (m, S, B, H) in float32."""
    H = out.shape[-1]
    out.copy_((_heads(a, H) * _heads(b, H)).sum(-1))


def attend_earlier(
    q: Tensor, keys: Keys, slopes: Tensor, form: Form, o: Tensor, lse: Tensor
) -> None:
    """Attend from a tile's queries (m, S, B, C) to all tokens before the tile.

    Writes o (m, S, B, C) and the natural log-sum-exp (m, S, B, H) of the logits, both in float32.
    With nothing to see they are 0 and -inf.
    """
    logits, v = _earlier_logits(q, keys, slopes, form)
    total = logits.logsumexp(-1)  # (m, B, H, S)
    weights = torch.exp(logits - total.nan_to_num(neginf=0.0)[..., None])
    o.copy_(torch.einsum("mbhsl,mblhd->msbhd", weights, v).flatten(3))
    lse.copy_(total.permute(0, 3, 1, 2))


class Attending(NamedTuple):
    """What the attention of a tile's steps reads and writes, all (m, S, B, C)."""

    q: Tensor
    kt: Tensor
    """Temporary keys; a token sees those of its own step up to itself."""
    vt: Tensor
    k: Tensor
    """Persistent keys, written step by step."""
    v: Tensor
    o: Tensor
    """Attention to the tokens before the tile, by `attend_earlier`."""
    lse: Tensor
    """(m, S, B, H), its log-sum-exp."""


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
    products kv (m, b, B, 2C), whose keys are still to be normalized. None in the first step.
    """
    H, b = form.num_heads, form.block_size
    begin, rows = step * b, slice(step * b, (step + 1) * b)
    if kv is not None:
        last = slice(begin - b, begin)
        split_pair(kv, k_norm, form, tile.k[:, last], tile.v[:, last])
    k = torch.cat([tile.k[:, :begin], tile.kt[:, rows]], 1)
    v = torch.cat([tile.v[:, :begin], tile.vt[:, rows]], 1)
    place = torch.arange(begin + b, device=k.device)
    distance = place[begin:, None] - place
    logits = _products(_heads(tile.q[:, rows], H), _heads(k, H)) - _bias(slopes, distance)
    logits = logits.masked_fill(distance < 0, -torch.inf)
    earlier = tile.lse[:, rows]
    total = torch.logaddexp(logits.logsumexp(-1).permute(0, 3, 1, 2), earlier)
    weights = torch.exp(logits - total.permute(0, 2, 3, 1)[..., None])
    found = torch.einsum("mbhqk,mkbhd->mqbhd", weights, _heads(v, H)).flatten(3)
    out.copy_(found + tile.o[:, rows] * _by_head(torch.exp(earlier - total), found))


def attend_tile(tile: Attending, keys: Keys, slopes: Tensor, form: Form) -> None:
    """Write the attention output of a whole tile and its log-sum-exp into `tile.o`, `tile.lse`.

    The persistent pairs of the tile are all known: this is for the backward. `tile.o` has the dtype
    of q here.
    """
    dtype = tile.lse.dtype
    o, lse = tile.o.new_empty(tile.o.shape, dtype=dtype), torch.empty_like(tile.lse)
    attend_earlier(tile.q, keys, slopes, form, o, lse)
    logits, values = _own_logits(tile, slopes, form)
    total = torch.logaddexp(logits.logsumexp(-1).permute(0, 3, 1, 2), lse)
    weights = torch.exp(logits - total.permute(0, 2, 3, 1)[..., None])
    own = torch.einsum("mbhst,mtbhd->msbhd", weights, values).flatten(3)
    tile.o.copy_(own + o * _by_head(torch.exp(lse - total), o))
    tile.lse.copy_(total)


def attend_tile_bwd(
    tile: Attending,
    do: Tensor,
    delta: Tensor,
    keys: Keys,
    slopes: Tensor,
    form: Form,
    dq: Tensor,
    dkt: Tensor,
    dvt: Tensor,
) -> None:
    """Write the gradients of a tile's queries and temporary pairs, (m, S, B, C).

    Args:
        tile: as `attend_tile` left it.
        do: gradient of the attention outputs, (m, S, B, C).
        delta: (m, S, B, H), do · o of each head.
        keys: the tokens before the tile.
        slopes: (H,) of ALiBi.
        form: the options.
        dq: written.
        dkt: written.
        dvt: written.
    """
    H, S = form.num_heads, do.shape[1]
    scale = (do.shape[-1] // H) ** -0.5
    do_, delta_ = _heads(do, H), delta.permute(0, 2, 3, 1)[..., None]
    lse = tile.lse.permute(0, 2, 3, 1)[..., None]
    logits, values = _earlier_logits(tile.q, keys, slopes, form)
    p = torch.exp(logits - lse)
    ds = p * (torch.einsum("msbhd,mblhd->mbhsl", do_, values) - delta_) * scale
    hidden = (logits[:, :, 0, 0] == -torch.inf)[..., None, None]
    earlier = _heads(keys.k[:, :, : p.shape[-1]], H).masked_fill(hidden, 0)
    found = torch.einsum("mbhsl,mblhd->msbhd", ds, earlier)
    logits, values = _own_logits(tile, slopes, form)
    p = torch.exp(logits - lse)
    ds = p * (torch.einsum("msbhd,mtbhd->mbhst", do_, values) - delta_) * scale
    both = torch.cat([_heads(tile.k, H), _heads(tile.kt, H)], 1)
    dq.copy_((found + torch.einsum("mbhst,mtbhd->msbhd", ds, both)).flatten(3))
    dkt.copy_(torch.einsum("mbhst,msbhd->mtbhd", ds[..., S:], _heads(tile.q, H)).flatten(3))
    dvt.copy_(torch.einsum("mbhst,msbhd->mtbhd", p[..., S:], do_).flatten(3))


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
    q, do = (_heads(x[:, :, least:], H) for x in (later.q, later.do))
    lse, delta = (x[:, :, least:].transpose(2, 3)[..., None] for x in (later.lse, later.delta))
    distance = (place - begin[:, None] + S)[..., None] - torch.arange(S, device=k.device)
    logits = torch.einsum("mbqhd,msbhd->mbhqs", q, _heads(k, H)) * (C // H) ** -0.5
    logits = logits - _bias(slopes, distance[:, None, None])
    p = torch.exp(logits - lse).masked_fill(hidden, 0)
    ds = p * (torch.einsum("mbqhd,msbhd->mbhqs", do, _heads(v, H)) - delta) * (C // H) ** -0.5
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
            the next step is written.
        raw: (m, S, B, C), the persistent keys before their norm.
        k_norm: (m, C), its weight.
        slopes: (H,) of ALiBi.
        form: the options.
        step: which step; its tokens are [step b, (step + 1) b).
        dk: (m, S, B, C) float32, from the tokens after the tile; what the tile's later steps give
            is added in the step's tokens.
        dv: likewise.
        dpair: written for the step's tokens, (m, S, B, 2C): the gradient of Wk n and Wv n.
    """
    b, H, C, S = form.block_size, form.num_heads, do.shape[-1], do.shape[1]
    rows, after = slice(step * b, (step + 1) * b), slice((step + 1) * b, S)
    if after.start < S:
        new = slice(after.start, after.start + b)
        head_products(do[:, new], tile.o[:, new], delta[:, new])
        q_, do_ = _heads(tile.q[:, after], H), _heads(do[:, after], H)
        k_, v_ = _heads(tile.k[:, rows], H), _heads(tile.v[:, rows], H)
        lse, delta_ = (x[:, after].permute(0, 2, 3, 1)[..., None] for x in (tile.lse, delta))
        place = torch.arange(S, device=do.device)
        p = torch.exp(_products(q_, k_) - _bias(slopes, place[after, None] - place[rows]) - lse)
        ds = p * (torch.einsum("mqbhd,msbhd->mbhqs", do_, v_) - delta_) * (C // H) ** -0.5
        dk[:, rows] += torch.einsum("mbhqs,mqbhd->msbhd", ds, q_).flatten(3)
        dv[:, rows] += torch.einsum("mbhqs,mqbhd->msbhd", p, do_).flatten(3)
    here = dpair[:, rows]
    normed_bwd(dk[:, rows], raw[:, rows], k_norm, form, None, 1.0, None, here[..., :C])
    here[..., C:] = dv[:, rows]


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


def _by_head(factor: Tensor, x: Tensor) -> Tensor:
    """Repeat (m, S, B, H) for the channels of each head of x."""
    return factor.repeat_interleave(x.shape[-1] // factor.shape[-1], -1)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Return the scaled products (m, B, H, Q, K) of position-first q and k."""
    return torch.einsum("mqbhd,mkbhd->mbhqk", q, k) * q.shape[-1] ** -0.5


def _bias(slopes: Tensor, distance: Tensor) -> Tensor:
    """Return slope * distance, (..., H, Q, K) from (H,) and (..., 1, Q, K) or (Q, K)."""
    return slopes[:, None, None] * distance.to(slopes.dtype)


def _earlier_logits(q: Tensor, keys: Keys, slopes: Tensor, form: Form) -> tuple[Tensor, Tensor]:
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


def _own_logits(tile: Attending, slopes: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return the logits (m, B, H, S, 2S) of a tile's own persistent and temporary pairs, and v."""
    H, S = form.num_heads, tile.q.shape[1]
    place = torch.arange(S, device=tile.q.device)
    distance = place[:, None] - place
    block = place // form.block_size
    persistent = block[:, None] > block
    temporary = (block[:, None] == block) & (distance >= 0)
    both = torch.cat([_heads(tile.k, H), _heads(tile.kt, H)], 1)
    bias = _bias(slopes, torch.cat([distance, distance], 1))
    logits = _products(_heads(tile.q, H), both) - bias
    values = torch.cat([_heads(tile.v, H), _heads(tile.vt, H)], 1)
    return logits.masked_fill(~torch.cat([persistent, temporary], 1), -torch.inf), values
