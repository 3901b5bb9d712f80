"""Attention by torch's fused kernels: flash or cuDNN on a GPU, a blocked kernel on a CPU."""

from typing import Any

import torch
import torch.nn.functional as F

from mezzo_core.ops.attention.request import (
    AttentionOutput,
    Request,
    alibi_bias,
    has_empty_rows,
    is_plain,
    lost_tokens,
    visible_keys,
)
from mezzo_core.ops.named import replaced
from mezzo_core.ops.precision import accumulation_dtype


def unsupported(r: Request) -> str | None:
    """Say why this backend cannot do the request, or None if it can."""
    if r.return_lse:
        # torch's operators that return an lse have no gradient for it, so merging results by their
        # lse would give wrong gradients.
        return "return_lse=True (its gradient would be lost)"
    return None


def attention_sdpa(r: Request) -> AttentionOutput:
    """Compute attention with `scaled_dot_product_attention`; masks are (T, S) tensors.

    Plain causal attention needs no mask, and runs the fastest kernel that torch has for the device.
    Keys and values of grouped heads are not copied. A mask with ALiBi's bias is in float32 or
    wider, and so are the products then: half precision would round the bias. On a CPU a NaN or an
    infinity in a key or value only affects the queries that see it; on a GPU this depends on
    torch's kernel.
    """
    lost = lost_tokens(r.k, r.v) if r.q.device.type == "cpu" else None
    if lost is None:
        return _attend(r)
    k, v = (x.masked_fill(lost[:, :, None, None], 0) for x in (r.k, r.v))
    if is_plain(r):
        sees = lost.cumsum(1) > 0 if r.causal else lost.any(1, keepdim=True)
    else:
        sees = (visible_keys(r) & lost[:, None]).any(-1)
    out = _attend(replaced(r, k=k, v=v)).out
    return AttentionOutput(out.masked_fill(sees[:, :, None, None], float("nan")), None)


def _attend(r: Request) -> AttentionOutput:
    if is_plain(r):
        q, k, v = (x.transpose(1, 2) for x in (r.q, r.k, r.v))
        # An if, and not enable_gqa=(...): with symbolic shapes the comparison is a symbol, which
        # the operator does not accept as a bool.
        grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        out = F.scaled_dot_product_attention(q, k, v, is_causal=r.causal, scale=r.scale, **grouped)
        return AttentionOutput(out.transpose(1, 2), None)
    if r.slopes is None:
        return AttentionOutput(_masked(r), None)
    q, k, v = (x.to(accumulation_dtype(x.dtype)) for x in (r.q, r.k, r.v))
    # Autocast would round the mask. It knows no meta device, where nothing is rounded.
    with torch.autocast("cuda" if q.is_cuda else "cpu", enabled=False):
        return AttentionOutput(_masked(replaced(r, q=q, k=k, v=v)).to(r.q.dtype), None)


def _masked(r: Request) -> torch.Tensor:
    """Attend under a mask.

    torch's masked kernels do not support grouped heads. So the query heads of a group are laid out
    as more queries of one head, and keys and values need not be copied.
    """
    B, T, HQ, _ = r.q.shape
    H, G = r.k.shape[2], HQ // r.k.shape[2]
    visible = visible_keys(r)
    empty = None
    if has_empty_rows(r):
        # The kernels differ in their results for a query without keys. So let it see all keys, and
        # set its result to 0 afterwards.
        empty = ~visible.any(-1)
        visible = visible | empty[..., None]
    if r.slopes is None:
        mask = visible[:, None, None].expand(-1, 1, G, -1, -1)
    else:
        bias = alibi_bias(r, r.slopes.to(r.q.dtype))
        mask = bias.masked_fill(~visible[:, None], float("-inf")).unflatten(1, (H, G))
    out = F.scaled_dot_product_attention(
        r.q.unflatten(2, (H, G)).permute(0, 2, 3, 1, 4).flatten(2, 3),
        r.k.transpose(1, 2),
        r.v.transpose(1, 2),
        attn_mask=mask.flatten(2, 3),
        scale=r.scale,
    )
    out = out.unflatten(2, (G, T)).permute(0, 3, 1, 2, 4).reshape(B, T, HQ, r.v.shape[-1])
    return out if empty is None else out.masked_fill(empty[:, :, None, None], 0.0)
