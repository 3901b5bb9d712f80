"""What is done to each row alone: norms, residuals, the MLP's activation, products of heads."""

import torch
import torch.nn.functional as F
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager.attention import heads
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form


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
    partial: Tensor | None = None,
) -> None:
    """Write dx = base + the gradient of a norm's input, and `scaled` = scale * dx.

    Args:
        dy: (m, ..., C), the gradient of the norm's output; written first, if `partial` is given.
        x: likewise, its input.
        weight: (m, C).
        form: the options.
        base: likewise, what is added; None for nothing.
        scale: of `scaled`.
        dx: written, if given.
        scaled: written, if given; may be dy.
        partial: (P, m, ..., C), of `product_partial`: their sum is dy.
    """
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
    """Add the gradient of a norm's weight, summed over all rows, to `total` (m, C)."""
    xhat, _ = _standardized(x, form)
    total += (dy.to(xhat.dtype) * xhat).flatten(1, -2).sum(1)


def add_normed(
    x: Tensor, y: Tensor, scale: float, weight: Tensor | None, form: Form, h: Tensor, out: Tensor
) -> None:
    """Write h = x + scale * (the sum of y), and h as it was rounded, normalized, into `out`.

    y is (P, m, ..., C), of `product_partial`; the other tensors are (m, ..., C).
    """
    acc = accumulation_dtype(y.dtype)
    h.copy_(x.to(acc) + scale * y.to(acc).sum(0))
    normed(h, weight, form, out)


def split_pair(kv: Tensor, weight: Tensor | None, form: Form, k: Tensor, v: Tensor) -> None:
    """Split Wk n and Wv n (m, ..., 2C) into normalized keys and values (m, ..., C).

    A value that is not finite becomes 0, and its key NaN: a weight of 0 times NaN is NaN, also for
    a query that must not see it, but its logit is masked by selection.
    """
    raw, values = kv.chunk(2, -1)
    normed(raw, weight, form, k)
    lost = ~values.isfinite()
    k.masked_fill_(lost, torch.nan)
    v.copy_(values.masked_fill(lost, 0))


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
    out.copy_((heads(a, H) * heads(b, H)).sum(-1))


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
