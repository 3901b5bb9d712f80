"""The definition of attention, in eager PyTorch: any device, any float dtype, any request."""

import torch

from mezzo_core.ops.attention.blocked import isolate_gradient
from mezzo_core.ops.attention.request import (
    AttentionOutput,
    Request,
    alibi_bias,
    lost_tokens,
    visible_keys,
)
from mezzo_core.ops.checks import can_look
from mezzo_core.ops.online_softmax import softmax_with_lse


def attention_reference(r: Request) -> AttentionOutput:
    """Compute softmax attention directly from its definition, with all scores in memory.

    For query head h, which reads key and value head h // (HQ/H), and the keys s visible to t:

        score[t,s] = scale q[t]·k[s] - slope |position(t) - position(s)|
        lse[t]     = log sum_s exp(score[t,s])
        out[t]     = sum_s exp(score[t,s] - lse[t]) v[s]

    Matrix products run in the dtype of the inputs, the softmax in float32 (float64 for float64).
    A query that sees no key gets out 0 and lse -inf. A query that sees a token with a NaN or an
    infinity gets NaN; other queries do not. On a CPU the same holds for gradients.
    """
    B, T, HQ, _ = r.q.shape
    H = r.k.shape[2]
    lost_q, lost, visible = lost_tokens(r.q), lost_tokens(r.k, r.v), visible_keys(r)[:, None]
    q, k, v = r.q, r.k, r.v
    if lost_q is not None:
        q = q.masked_fill(lost_q[:, :, None, None], 0)
    if lost is not None:
        k, v = (x.masked_fill(lost[:, :, None, None], 0) for x in (k, v))
    q = q.unflatten(2, (H, HQ // H))
    scores = torch.einsum("bthgd,bshd->bhgts", q, k).flatten(1, 2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * r.scale
    if r.slopes is not None:
        scores = scores + alibi_bias(r, r.slopes)
    if lost_q is not None:
        scores = scores.masked_fill(lost_q[:, None, :, None], float("nan"))
    if lost is not None:
        scores = scores.masked_fill(lost[:, None, None], float("nan"))
    probabilities, lse = softmax_with_lse(scores.masked_fill(~visible, float("-inf")))
    # Mask once more for the backward: a gradient that is not finite, times 0, would be NaN.
    probabilities = probabilities.masked_fill(~visible, 0)
    probabilities = probabilities.to(r.v.dtype).unflatten(1, (H, HQ // H))
    out = torch.einsum("bhgts,bshv->bthgv", probabilities, v).reshape(B, T, HQ, r.v.shape[-1])
    if can_look(r.q, r.k, r.v):
        out = isolate_gradient(out, r)
    return AttentionOutput(out, lse.transpose(1, 2) if r.return_lse else None)
