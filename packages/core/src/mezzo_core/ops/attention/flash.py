"""Attention by flash-attn 4 or 2, where one of them is installed."""

import importlib.util

import torch

from mezzo_core.ops.attention import flash4
from mezzo_core.ops.attention.request import AttentionOutput, Request

# flash-attn 4 alone brings a `flash_attn` without flash-attn 2's modules.
_FLASH_2 = bool(importlib.util.find_spec("flash_attn")) and bool(
    importlib.util.find_spec("flash_attn.flash_attn_interface")
)

HOPPER = 9
WIDTHS_4 = (32, 64, 96, 128, 256)
"""Head widths that flash-attn 4 is tested with. With 16 its gradients under a window are wrong."""


def unsupported(r: Request) -> str | None:
    """Say why this backend cannot do the request, or None if it can."""
    if r.q.device.type != "cuda":
        return f"tensors on {r.q.device} (it needs CUDA)"
    if r.q.dtype not in (torch.float16, torch.bfloat16):
        return f"{r.q.dtype} (it needs float16 or bfloat16)"
    width = r.q.shape[-1]
    if width != r.v.shape[-1] or width > 256 or width % 8:
        return f"heads of width {width} and {r.v.shape[-1]} (equal, multiples of 8, at most 256)"
    if r.q_positions is not None:
        return "q_positions and k_positions"
    if r.q.shape[1] != r.k.shape[1]:
        return "fewer or more keys than queries"  # its window is aligned to the last key
    if _runs_on_4(r):
        return None
    if not _FLASH_2:
        return (
            "this without flash-attn (2; or flash-attn-4 on Hopper GPUs and newer, without ALiBi, "
            f"for heads of width {', '.join(map(str, WIDTHS_4))})"
        )
    if r.return_lse:
        return "return_lse=True with flash-attn 2 (its gradient would be lost)"
    return None


def is_fastest(r: Request) -> bool:
    """Tell whether this backend is the fastest for the request, by our measurements.

    On an H200, it trained 1.03 to 1.2 times as fast as cuDNN (plain causal attention), 1.6 times as
    fast as flex_attention under windows and 2.4 times on packed sequences
    (packages/core/results/nvidia-h200/attention.json).
    """
    return unsupported(r) is None and _runs_on_4(r) and _generation(r) == HOPPER


def _runs_on_4(r: Request) -> bool:
    """Tell whether flash-attn 4 runs the request, rather than flash-attn 2."""
    fits = r.slopes is None and r.q.shape[-1] in WIDTHS_4
    return flash4.INSTALLED and fits and _generation(r) >= HOPPER


def _generation(r: Request) -> int:
    """Return the major number of the GPU's compute capability, in compiled graphs too."""
    return torch.cuda.get_device_properties(r.q.device).major


def attention_flash(r: Request) -> AttentionOutput:
    """Compute attention with flash-attn 4 if it supports the request, else with flash-attn 2."""
    if not _runs_on_4(r):
        return _attention_flash_2(r)
    options = (r.cu_seqlens, r.scale, r.causal, r.window_size)
    out, lse = flash4.flash_attention_4(r.q, r.k, r.v, *options)
    return AttentionOutput(out, lse.transpose(1, 2) if r.return_lse else None)


def _attention_flash_2(r: Request) -> AttentionOutput:
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
