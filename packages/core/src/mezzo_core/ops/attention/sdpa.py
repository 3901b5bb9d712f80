"""Attention by torch's fused kernels: flash or cuDNN on a GPU, a blocked kernel on a CPU."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo_core.ops.attention import blocked
from mezzo_core.ops.attention.request import (
    WILD,
    AttentionOutput,
    Request,
    alibi_bias,
    is_plain,
    is_tame,
    visible_keys,
    wild_tokens,
)
from mezzo_core.ops.checks import can_look
from mezzo_core.ops.gradients import refuse_second_gradient
from mezzo_core.ops.named_tuples import replaced
from mezzo_core.ops.precision import accumulation_dtype, without_autocast

MOST_ROWS = 65_535
"""The rows B that flash attention can take at a time: they are the second axis of its grid."""


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
    Keys and values of grouped heads are not copied. With ALiBi, and with a mask for float16 on a
    GPU, everything is computed in float32 or wider. A token with a NaN, an infinity or (except in
    compiled code on a CPU) a number of WILD or more only affects the queries that see it; under a
    mask on a GPU these become NaN.
    """
    on_cpu = r.q.device.type == "cpu"
    if not on_cpu and is_plain(r):
        return AttentionOutput(_attend(r), None)
    look = can_look(r.q, r.k, r.v)
    if look and is_tame(r.q, r.k, r.v):
        return AttentionOutput(blocked.isolate_gradient(_attend(r), r), None)
    # torch masks by adding -inf: a score that overflowed becomes NaN, and 0 times a NaN value is
    # NaN too. So the kernel gets zeros in place of such tokens.
    limit = WILD if look or not on_cpu else math.inf
    wild_q, wild = wild_tokens(r.q, limit=limit), wild_tokens(r.k, r.v, limit=limit)
    q, k, v = (
        x.masked_fill(where[:, :, None, None], 0)
        for x, where in ((r.q, wild_q), (r.k, wild), (r.v, wild))
    )
    out = _attend(replaced(r, q=q, k=k, v=v))
    hit = (wild_q | _sees(r, wild))[:, :, None, None]
    if not look:
        return AttentionOutput(out.masked_fill(hit, math.nan), None)
    out = blocked.isolate_gradient(out, r)
    return AttentionOutput(blocked.attention_blocked(r).out.to(out.dtype).where(hit, out), None)


def _sees(r: Request, tokens: Tensor) -> Tensor:
    """Return (B, T) bool: whether each query sees one of the given keys (B, S)."""
    if is_plain(r):
        return tokens.cumsum(1) > 0 if r.causal else tokens.any(1, keepdim=True)
    return (visible_keys(r) & tokens[:, None]).any(-1)


def _attend(r: Request) -> Tensor:
    if is_plain(r):
        # An exported program runs for any number of rows, so it must not branch on it.
        if not torch.compiler.is_exporting() and r.q.shape[0] > MOST_ROWS:
            parts = zip(*(x.split(MOST_ROWS) for x in (r.q, r.k, r.v)), strict=True)
            return torch.cat([_attend(replaced(r, q=q, k=k, v=v)) for q, k, v in parts])
        q, k, v = (x.transpose(1, 2) for x in (r.q, r.k, r.v))
        # Not enable_gqa=(...): with symbolic shapes the comparison is no bool for the operator.
        grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        out = F.scaled_dot_product_attention(q, k, v, is_causal=r.causal, scale=r.scale, **grouped)
        return refuse_second_gradient(out).transpose(1, 2)
    # On a GPU torch masks float16 scores by a finite number, which large scores may exceed.
    if r.slopes is None and not (r.q.is_cuda and r.q.dtype == torch.float16):
        return _masked(r)
    q, k, v = (x.to(accumulation_dtype(x.dtype)) for x in (r.q, r.k, r.v))
    with without_autocast(q.device):  # it would round ALiBi's bias
        return _masked(replaced(r, q=q, k=k, v=v)).to(r.q.dtype)


def _masked(r: Request) -> Tensor:
    """Attend under a mask.

    torch's masked kernels do not support grouped heads. So the query heads of a group become more
    queries of one head, and keys and values need not be copied.
    """
    B, T, HQ, _ = r.q.shape
    H, G = r.k.shape[2], HQ // r.k.shape[2]
    visible = visible_keys(r)
    empty = None
    if r.q_positions is not None or r.q.shape[1] != r.k.shape[1]:
        # A query may have no key, for which kernels differ. Let it see all keys, and set its result
        # to 0.
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
    out = refuse_second_gradient(out)
    out = out.unflatten(2, (G, T)).permute(0, 3, 1, 2, 4).reshape(B, T, HQ, r.v.shape[-1])
    return out if empty is None else out.masked_fill(empty[:, :, None, None], 0.0)
