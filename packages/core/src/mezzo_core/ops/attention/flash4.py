"""Attention by flash-attn 4 (the package `flash-attn-4`), for Hopper GPUs and newer, as an op.

A registered op, so that torch.compile does not break its graph here. The package is a pre-release,
whose functions may change; tests compare output and gradients with the reference.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from mezzo_core.ops.gradients import register_gradient

INSTALLED = bool(importlib.util.find_spec("flash_attn")) and bool(
    importlib.util.find_spec("flash_attn.cute")
)


@torch.library.custom_op("mezzo::flash_attention_4", mutates_args=())
def _flash_attention_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    causal: bool,
    window_size: int | None,
) -> tuple[Tensor, Tensor]:
    """Return out (B, T, HQ, V) and the lse (B, HQ, T), float32; arguments as of `attention`."""
    from flash_attn.cute.interface import _flash_attn_fwd

    with torch.cuda.device_of(q):
        inputs = _packed(cu_seqlens, q, k, v)
        options = _options(q, cu_seqlens, scale, causal, window_size)
        out, lse, *_ = _flash_attn_fwd(*inputs, return_lse=True, **options)
    return out.view(*q.shape[:3], v.shape[3]), lse.view(q.shape[0], q.shape[2], q.shape[1])


@_flash_attention_4.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    B, T, HQ, _ = q.shape
    return q.new_empty(B, T, HQ, v.shape[3]), q.new_empty(B, HQ, T, dtype=torch.float32)


@torch.library.custom_op("mezzo::flash_attention_4_bwd", mutates_args=())
def _flash_attention_4_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    causal: bool,
    window_size: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, the same bits at each call."""
    from flash_attn.cute.interface import _flash_attn_bwd

    with torch.cuda.device_of(q):
        inputs = _packed(cu_seqlens, q, k, v, out, dout.contiguous())
        lses = _packed(cu_seqlens, lse, None if dlse is None else dlse.contiguous())
        dq, dk, dv = _flash_attn_bwd(
            *inputs,
            lses[0],
            dlse=lses[1],
            deterministic=True,
            **_options(q, cu_seqlens, scale, causal, window_size),
        )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


@_flash_attention_4_bwd.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _packed(cu_seqlens: Tensor | None, *tensors: Tensor | None) -> list[Tensor | None]:
    """Drop the batch axis if sequences are packed, as the package wants it."""
    return list(tensors) if cu_seqlens is None else [x if x is None else x[0] for x in tensors]


def _options(
    q: Tensor, cu_seqlens: Tensor | None, scale: float, causal: bool, window_size: int | None
) -> dict[str, Any]:
    """Return the options of a forward or a backward.

    The package's window has two numbers of keys, to the left and to the right, both without the
    current key; None is unlimited.
    """
    options: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
    if window_size is not None:
        options |= {"window_size_left": window_size - 1, "causal": False}
        options["window_size_right"] = 0 if causal else None
    if cu_seqlens is not None:
        borders, longest = cu_seqlens.to(torch.int32), q.shape[1]
        options |= {"cu_seqlens_q": borders, "cu_seqlens_k": borders}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return options


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.set_materialize_grads(False)  # often only `out` has a gradient


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    grads = _flash_attention_4_bwd(dout, dlse, q, k, v, out, lse, cu_seqlens, *ctx.options)
    return (*grads, *(None,) * 4)


flash_attention_4 = register_gradient(_flash_attention_4, _backward, _save)
