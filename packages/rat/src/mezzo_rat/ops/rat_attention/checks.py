"""What the arguments of RAT attention must be, for all its forms."""

from typing import Literal

import torch
from mezzo_core.ops.packed import check_cu_seqlens
from torch import Tensor

from mezzo_rat.ops.rat_attention.reference import RATForm
from mezzo_rat.ops.rat_attention.state import RATState


def check_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    chunk_size: int,
    gate_bias: Tensor | None,
    z: Tensor | None,
    rope: Literal["chunk", "token"] | None,
    rope_base: float,
    scale: float | None,
) -> RATForm:
    """Check what both forms take, and return what they compute."""
    if v.ndim != 4:
        raise ValueError(f"v must be (B, T, H, D), got {tuple(v.shape)}")
    B, T, H, D = v.shape
    if q.ndim != 4 or (*q.shape[:2], q.shape[3]) != (B, T, D) or q.shape[2] < 1 or H % q.shape[2]:
        raise ValueError(
            f"q must be ({B}, {T}, G, {D}) with G a divisor of {H}, got {tuple(q.shape)}"
        )
    for name, x, shape in (
        ("k", k, q.shape),
        ("g", g, v.shape),
        ("z", z, v.shape),
        ("gate_bias", gate_bias, v.shape[2:]),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(x.shape)}")
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("z", z), ("gate_bias", gate_bias)):
        if x is not None and not x.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")
        if x is not None and x.device != v.device:
            raise ValueError(f"{name} must be on {v.device} as v is, got {x.device}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be an integer of 1 or more, got {chunk_size!r}")
    if rope not in ("chunk", "token", None):
        raise ValueError(f'rope must be "chunk", "token" or None, got {rope!r}')
    if rope is not None and D % 2:
        raise ValueError(f"rope needs an even head dimension D, got {D}")
    return RATForm(chunk_size, rope, rope_base, D**-0.5 if scale is None else scale)


def check_rows(
    v: Tensor, state: RATState | None, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Check what says where the rows of v continue, end or are packed."""
    B, _, H, D = v.shape
    if state is not None:
        for name, shape in (("k", (B, H, D)), ("v", (B, H, D)), ("lengths", (B,))):
            got = tuple(getattr(state, name).shape)
            if got != shape:
                raise ValueError(f"state.{name} must be {shape}, got {got}")
        ends = state.k_ends
        if ends.shape != (B, ends.shape[1], H, D) or state.v_ends.shape != ends.shape:
            raise ValueError(
                f"state.k_ends and state.v_ends must be ({B}, N, {H}, {D}), "
                f"got {tuple(ends.shape)} and {tuple(state.v_ends.shape)}"
            )
    if lengths is not None and state is None:
        raise ValueError("lengths needs a state: start from init_state")
    if lengths is not None and (lengths.shape != (B,) or lengths.dtype != torch.int64):
        raise ValueError(
            f"lengths must be int64 of shape ({B},), got {lengths.dtype} {tuple(lengths.shape)}"
        )
    if cu_seqlens is not None:
        if state is not None:
            raise ValueError("cu_seqlens and state exclude each other: packed rows do not continue")
        check_cu_seqlens("chunk_rat_attention", cu_seqlens, v)
