"""The definition of grouped cross-attention, in eager PyTorch."""

import torch
from mezzo_core.ops.checks import in_transform
from torch import Tensor


def grouped_cross_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, weights: Tensor, softmax1: bool, scale: float
) -> Tensor:
    """Attend to each retrieved chunk alone, and return the weighted sum of the outputs.

        O_j = softmax1(scale q k_jᵀ) v_j,    softmax1(s)_i = exp(s_i) / (1 + Σ exp(s))
        out = Σ_j w_j O_j,                   over the chunks j that are retrieved

    Args:
        q: (B, N, M, H, D), the queries of N chunks, M places each.
        k: (B, S, L, H, D), the keys of S chunks.
        v: likewise.
        indices: (B, N, R), which chunks each chunk reads; -1 for none.
        weights: (B, N, R).
        softmax1: whether a query may ignore a chunk; False for the softmax.
        scale: of the products.

    Returns:
        (B, N, M, H, D) in the dtype of q; 0 where nothing is retrieved.
    """
    high = torch.promote_types(q.dtype, torch.float32)
    rows = torch.arange(q.shape[0], device=q.device)[:, None, None]
    is_read = indices >= 0
    if k.requires_grad or v.requires_grad or in_transform():
        k, v = k.to(high), v.to(high)  # so that gradients of several readers are summed in `high`
    k, v = (x[rows, indices.clamp(min=0)].to(high) for x in (k, v))  # (B, N, R, L, H, D)
    # Chunks that are not read may hold anything, even NaN.
    k, v = (x.masked_fill(~is_read[..., None, None, None], 0) for x in (k, v))
    logits = torch.einsum("bnmhd,bnrlhd->bnrhml", q.to(high), k) * scale
    if softmax1:  # one more key of logit 0, whose value is 0
        logits = torch.cat([torch.zeros_like(logits[..., :1]), logits], -1)
    p = logits.softmax(-1)[..., 1:] if softmax1 else logits.softmax(-1)
    out = torch.einsum("bnrhml,bnrlhd->bnrmhd", p, v)
    w = weights.to(high).masked_fill(~is_read, 0)
    return torch.einsum("bnrmhd,bnr->bnmhd", out, w).to(q.dtype)
