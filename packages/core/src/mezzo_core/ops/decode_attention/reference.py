"""The definition of attention while decoding, in eager PyTorch: any device, any float dtype."""

import torch
from torch import Tensor

from mezzo_core.positions import RopeScaling, apply_rope, rope_angles


def decode_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, slopes: Tensor | None, scale: float
) -> Tensor:
    """Attend from the newest token of each row to the tokens in its cache of S slots.

    In a row of n tokens, token p is in slot p % S. So the token in slot s is (n - 1 - s) mod S
    positions before the newest one, and slots from n on are still empty. For query head h, which
    reads key and value head h // (HQ/H):

        score[s] = scale q·k[s] - slope ((n - 1 - s) mod S)          s < min(n, S)
        out      = sum_s softmax(score)[s] v[s]

    Matrix products run in the dtype of the inputs, the softmax in float32 (float64 for float64). A
    row of no tokens gets out 0.
    """
    B, HQ, D = q.shape
    S, H = k.shape[1:3]
    if S == 0:
        return torch.zeros_like(q)
    slots = torch.arange(S, device=q.device)
    empty = slots >= lengths[:, None]
    if q.dtype == torch.float16:  # scale before the products, which would overflow
        q, scale = q * scale, 1.0
    scores = torch.einsum("bhgd,bshd->bhgs", q.view(B, H, HQ // H, D), k).flatten(1, 2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if slopes is not None:
        distance = (lengths[:, None] - 1 - slots) % S
        scores = scores - slopes[:, None] * distance[:, None]
    # The content of an empty slot is arbitrary, maybe NaN: mask both its score and its value.
    scores = scores.masked_fill(empty[:, None], float("-inf"))
    v = v.masked_fill(empty[:, :, None, None], 0.0)
    weights = scores.softmax(-1).masked_fill(empty[:, None], 0.0)
    weights = weights.to(v.dtype).view(B, H, HQ // H, S)
    return torch.einsum("bhgs,bshd->bhgd", weights, v).reshape(B, HQ, D)


def append_token_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    rope_base: float | None,
    rope_scaling: RopeScaling | None,
) -> Tensor:
    """Put the next token of each row into its cache of S slots, and return its queries.

    In a row of n tokens the new token has position n. RoPE rotates q and k to that position, in
    float32 (float64 for float64). Then all three are rounded to the cache's dtype, and k and v are
    written to slot n % S.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    if rope_base is not None:
        angles = rope_angles(lengths[:, None], q.shape[-1], rope_base, rope_scaling, dtype=wide)
        q, k = (apply_rope(x.to(wide)[:, None], *angles)[:, 0] for x in (q, k))
    place = (torch.arange(q.shape[0], device=q.device), lengths % k_cache.shape[1])
    k_cache[place], v_cache[place] = k.to(k_cache.dtype), v.to(v_cache.dtype)
    lengths.add_(1)
    return q.to(k_cache.dtype, copy=True, memory_format=torch.contiguous_format)
