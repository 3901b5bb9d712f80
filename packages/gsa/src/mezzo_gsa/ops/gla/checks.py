"""Checks of the arguments of gated linear attention, and the limits of its kernels."""

import torch
from mezzo_core.ops.checks import check_floating, check_number
from torch import Tensor

MAX_K, MAX_V = 512, 1024
"""The widest heads that the kernels support."""


def check_inputs(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    *,
    sizes: str,
    gates: str = "g",
) -> None:
    """Raise a ValueError or TypeError that names the argument which does not fit the others.

    `sizes` names the axes of q in messages; all tensors share the first ones. `gates` is the name
    of g in messages.
    """
    named = (("q", q), ("k", k), ("v", v), (gates, g))
    for name, x in named:
        check_floating(op, name, x)
    check_number(op, "scale", scale)
    if q.ndim != sizes.count(",") + 1:
        raise ValueError(f"{op}: q must be {sizes}, got {tuple(q.shape)}")
    *axes, HQ, K = q.shape
    H = k.shape[-2] if k.ndim == q.ndim else 0
    if not H or not HQ or HQ % H or k.shape != (*axes, H, K):
        raise ValueError(
            f"{op}: k must be ({_listed(axes)}, H, {K}) with H a divisor of {HQ}, "
            f"got {tuple(k.shape)}"
        )
    if v.ndim != q.ndim or v.shape[:-1] != (*axes, H):
        raise ValueError(f"{op}: v must be ({_listed(axes)}, {H}, V), got {tuple(v.shape)}")
    if g.shape not in ((*axes, H, K), (*axes, H, 1)):
        raise ValueError(
            f"{op}: {gates} must be {(*axes, H, K)} or {(*axes, H, 1)}, got {tuple(g.shape)}"
        )
    for name, x in named:
        if x.device != q.device:
            raise ValueError(f"{op}: {name} is on {x.device}, q on {q.device}")
        if not x.shape[-1]:
            raise ValueError(f"{op}: the last size of {name} must not be 0: {tuple(x.shape)}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{op}: {name} must have the dtype of q, {q.dtype}, got {x.dtype}")


def _listed(axes: list[int]) -> str:
    return ", ".join(map(str, axes))  # for messages only: torch.compile cannot trace str(size)


def unsupported(q: Tensor, v: Tensor) -> str | None:
    """Return why the kernels do not support this call, or None if they do."""
    K, V = q.shape[-1], v.shape[-1]
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{q.dtype}; supported: float32, bfloat16, float16"
    if K > MAX_K or V > MAX_V:
        return f"heads of K = {K}, V = {V}; supported: K up to {MAX_K}, V up to {MAX_V}"
    return "empty tensors" if q.numel() == 0 or v.numel() == 0 else None
