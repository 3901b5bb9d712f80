"""The checked arguments of one call, and whether the kernels support them."""

from typing import NamedTuple

import torch
from torch import Tensor

from mezzo_rat.ops.rat_attention.form import Form
from mezzo_rat.ops.rat_attention.state import RATState

HEAD_DIMS = (32, 64, 128, 256)
"""Head dimensions that the Triton kernels support."""


class Parts(NamedTuple):
    """The parts of a projection, in the order in which it holds them."""

    z: Tensor | None
    """(B, T, H, D) logits of the output gate."""
    v: Tensor
    """(B, T, H, D) values."""
    g: Tensor
    """(B, T, H, D) logits of the forget gate."""
    q: Tensor
    """(B, T, G, D) queries."""
    k: Tensor
    """(B, T, G, D) keys."""


class Request(NamedTuple):
    """The checked arguments of one call; a default scale is filled in."""

    parts: Parts
    gate_bias: Tensor | None
    form: Form
    initial_state: RATState | None
    lengths: Tensor | None
    cu_seqlens: Tensor | None


def unsupported(r: Request) -> str | None:
    """Return why the kernels do not support this call, or None if they do."""
    parts = [part for part in r.parts if part is not None]
    dtypes, dim = {part.dtype for part in parts}, r.parts.v.shape[-1]
    if len(dtypes) > 1:
        return "gates of another dtype than v"
    if dtypes - {torch.float16, torch.bfloat16, torch.float32}:
        return f"{parts[0].dtype}; supported: float16, bfloat16, float32"
    if dim not in HEAD_DIMS:
        return f"a head dimension of {dim}; supported: {', '.join(map(str, HEAD_DIMS))}"
    if r.parts.v.numel() == 0:
        return "empty tensors"
    if not r.form.scale > 0:
        return f"a scale of {r.form.scale}; supported: positive ones"
    if r.initial_state is not None and torch.is_grad_enabled():
        tensors = (*parts, *r.initial_state, r.gate_bias)
        if any(x is not None and x.requires_grad for x in tensors):
            return "gradients beside a state"
    return None


def scattered(state: RATState) -> str | None:
    """Return why the kernels of a step cannot overwrite this state, or None if they can.

    They find its numbers by their places in memory. Only the rows of the ends may have gaps between
    them, which must be the same in both.
    """
    k, v, k_ends, v_ends, lengths = state
    whole = all(x.is_contiguous() for x in (k, v, k_ends[:1], v_ends[:1], lengths))
    apart = k_ends.stride(0) == v_ends.stride(0) >= k_ends.shape[1:].numel()
    return None if whole and (apart or k.shape[0] == 1) else "a state that is not contiguous"
