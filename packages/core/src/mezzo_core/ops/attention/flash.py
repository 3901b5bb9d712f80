"""Attention by the flash-attn package, if it is installed and impl="flash" is given."""

import importlib.util

import torch

from mezzo_core.ops.attention.request import AttentionOutput, Request

_INSTALLED = importlib.util.find_spec("flash_attn") is not None


def unsupported(r: Request) -> str | None:
    """Say why this backend cannot do the request, or None if it can."""
    if r.q.device.type != "cuda":
        return f"tensors on {r.q.device} (it needs CUDA)"
    if r.q.dtype not in (torch.float16, torch.bfloat16):
        return f"{r.q.dtype} (it needs float16 or bfloat16)"
    if r.q.shape[-1] != r.v.shape[-1] or r.q.shape[-1] > 256:
        return f"heads of width {r.q.shape[-1]} and {r.v.shape[-1]} (equal, at most 256)"
    if r.q_positions is not None:
        return "q_positions and k_positions"
    if r.q.shape[1] != r.k.shape[1]:
        return "fewer or more keys than queries"  # its window is aligned to the last key
    if r.return_lse:
        return "return_lse=True (its gradient would be lost)"
    if not _INSTALLED:
        return "anything here: the package flash-attn is not installed"
    return None


def attention_flash(r: Request) -> AttentionOutput:
    """Compute attention with flash-attn 2; packed sequences run its variable-length kernel."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    # flash-attn's window is (keys to the left, keys to the right), both without the current key.
    left = -1 if r.window_size is None else r.window_size - 1
    options = {
        "softmax_scale": r.scale,
        "causal": r.causal,
        "window_size": (left, 0 if r.causal else -1),
        "alibi_slopes": None if r.slopes is None else r.slopes.float(),
    }
    if r.cu_seqlens is None:
        return AttentionOutput(flash_attn_func(r.q, r.k, r.v, **options), None)
    borders, longest = r.cu_seqlens.to(torch.int32), r.q.shape[1]
    out = flash_attn_varlen_func(
        r.q[0], r.k[0], r.v[0], borders, borders, longest, longest, **options
    )
    return AttentionOutput(out[None], None)
