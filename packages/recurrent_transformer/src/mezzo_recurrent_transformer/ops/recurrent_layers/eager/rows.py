"""Operations on single rows: norms, residuals, the activation, products of heads, ALiBi."""

import torch
import torch.nn.functional as F
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form


def heads(x: Tensor, num_heads: int) -> Tensor:
    """Split the channels of (m, S, B, C) into heads, in float32 or float64."""
    return x.to(accumulation_dtype(x.dtype)).unflatten(-1, (num_heads, -1))


def normed(x: Tensor, weight: Tensor | None, form: Form, out: Tensor) -> None:
    """See `Parts.normed`."""
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
    partial: Tensor | None = None,
) -> None:
    """See `Parts.normed_bwd`."""
    if partial is not None:
        dy.copy_(partial.sum(0))
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
    """See `Parts.add_norm_weight_grad`."""
    xhat, _ = _standardized(x, form)
    total += (dy.to(xhat.dtype) * xhat).flatten(1, -2).sum(1)


def add_normed(
    x: Tensor, y: Tensor, scale: float, weight: Tensor | None, form: Form, h: Tensor, out: Tensor
) -> None:
    """See `Parts.add_normed`."""
    acc = accumulation_dtype(y.dtype)
    h.copy_(x.to(acc) + scale * y.to(acc).sum(0))
    normed(h, weight, form, out)


def split_pair(kv: Tensor, weight: Tensor | None, form: Form, k: Tensor, v: Tensor) -> None:
    """See `Parts.split_pair`.

    A value that is not finite becomes 0, and its key NaN. A query that must not see the pair gives
    it a weight of 0, and 0 times a value of NaN would be NaN; but a mask replaces a logit of NaN.
    """
    raw, values = kv.chunk(2, -1)
    normed(raw, weight, form, k)
    lost = ~values.isfinite()
    k.masked_fill_(lost, torch.nan)
    v.copy_(values.masked_fill(lost, 0))


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
    """See `Parts.head_products`."""
    H = out.shape[-1]
    out.copy_((heads(a, H) * heads(b, H)).sum(-1))


def _standardized(x: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return the normalized rows without the norm's weight, and 1 / rms or 1 / std."""
    x = x.to(accumulation_dtype(x.dtype))
    if form.norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + form.eps)
    return x * rstd, rstd


def _per_row(weight: Tensor | None, x: Tensor) -> Tensor:
    """Reshape weights (m, C) to multiply x (m, ..., C)."""
    assert weight is not None
    dtype = accumulation_dtype(x.dtype)
    return weight.to(dtype).view(weight.shape[0], *[1] * (x.ndim - 2), weight.shape[1])


def by_head(factor: Tensor, x: Tensor) -> Tensor:
    """Repeat (m, S, B, H) for the channels of each head of x."""
    return factor.repeat_interleave(x.shape[-1] // factor.shape[-1], -1)


def products(q: Tensor, k: Tensor) -> Tensor:
    """Return the scaled products (m, B, H, Q, K) of position-first q and k."""
    return torch.einsum("mqbhd,mkbhd->mbhqk", q, k) * q.shape[-1] ** -0.5


def bias(slopes: Tensor, distance: Tensor) -> Tensor:
    """Return slope * distance, (..., H, Q, K) from (H,) and (..., 1, Q, K) or (Q, K)."""
    return slopes[:, None, None] * distance.to(slopes.dtype)
