"""Checks of the arguments of RAT attention, shared by all its forms."""

from typing import Any, Literal

import torch
from mezzo_core.ops.checks import check_floating, check_lengths, check_number, check_size
from mezzo_core.ops.packed import check_cu_seqlens
from torch import Tensor

from mezzo_rat.ops.rat_attention.form import Form
from mezzo_rat.ops.rat_attention.request import Parts
from mezzo_rat.ops.rat_attention.state import RATState, check_slots

LONGEST = 2**31 - 1
"""The longest chunk that kernels can count in 32 bits; no row has more tokens."""


def check_form(
    op: str,
    parts: Parts,
    gate_bias: Tensor | None,
    chunk_size: int,
    rope: Literal["chunk", "token"] | None,
    rope_base: float,
    scale: float | None,
) -> Form:
    """Check the arguments that all forms of the op share, and return their Form."""
    z, v, g, q, k = parts.z, parts.v, parts.g, parts.q, parts.k
    given = {"q": q, "k": k, "v": v, "g": g, "z": z, "gate_bias": gate_bias}
    for name, x in given.items():
        if x is not None or name in ("q", "k", "v", "g"):
            check_floating(op, name, x)
    if v.ndim != 4 or 0 in v.shape[2:]:
        raise ValueError(f"{op}: v must be (B, T, H, D), H, D >= 1, got {tuple(v.shape)}")
    B, T, H, D = v.shape
    if q.ndim != 4 or (*q.shape[:2], q.shape[3]) != (B, T, D) or q.shape[2] < 1 or H % q.shape[2]:
        raise ValueError(
            f"{op}: q must be ({B}, {T}, G, {D}) with G a divisor of {H}, got {tuple(q.shape)}"
        )
    shapes = {"k": q.shape, "g": v.shape, "z": v.shape, "gate_bias": v.shape[2:]}
    for name, x in given.items():
        if x is None:
            continue
        if name in shapes and x.shape != shapes[name]:
            raise ValueError(f"{op}: {name} must be {tuple(shapes[name])}, got {tuple(x.shape)}")
        if x.device != v.device:
            raise ValueError(f"{op}: {name} is on {x.device}, other inputs on {v.device}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{op}: q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    check_numbers(op, chunk_size, rope, rope_base)
    if rope is not None and D % 2:
        raise ValueError(f"{op}: rope needs an even head dimension D, got {D}")
    if scale is not None:
        check_number(op, "scale", scale)
    scale = D**-0.5 if scale is None else scale
    L = min(chunk_size, LONGEST)
    return Form(H, q.shape[2], z is not None, L, rope, rope_base, scale)


def check_numbers(op: str, chunk_size: Any, rope: Any, rope_base: Any) -> None:
    """Check the chunk size and the options of RoPE; the mixer uses this check too."""
    check_size(op, "chunk_size", chunk_size)
    if rope not in ("chunk", "token", None):
        raise ValueError(f'{op}: rope must be "chunk", "token" or None, got {rope!r}')
    check_number(op, "rope_base", rope_base, positive=True)


def check_rows(
    op: str,
    v: Tensor,
    form: Form,
    initial_state: RATState | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Check the state, the lengths and the packing borders against the rows of v."""
    if initial_state is not None:
        check_state(op, "initial_state", initial_state, v, form)
    if lengths is not None:
        if initial_state is None:
            raise ValueError(f"{op}: lengths needs an initial_state: start from init_state")
        check_lengths(op, lengths, v)
    if cu_seqlens is not None:
        if initial_state is not None:
            raise ValueError(
                f"{op}: cu_seqlens and initial_state exclude each other: "
                "packed rows do not continue"
            )
        check_cu_seqlens(op, cu_seqlens, v)


def check_state(op: str, argument: str, state: RATState, v: Tensor, form: Form) -> None:
    """Check a state against the rows of v that continue it; messages use the argument's name."""
    if not isinstance(state, RATState):
        raise TypeError(f"{op}: {argument} must be a RATState, got {type(state).__name__}")
    B, _, H, D = v.shape
    for name in ("k", "v", "k_ends", "v_ends"):
        check_floating(op, f"{argument}.{name}", getattr(state, name))
    if not isinstance(state.lengths, Tensor) or state.lengths.dtype != torch.int64:
        got = getattr(state.lengths, "dtype", type(state.lengths).__name__)
        raise TypeError(f"{op}: {argument}.lengths must be an int64 tensor, got {got}")
    ends = state.k_ends
    for name, shape in (("k", (B, H, D)), ("v", (B, H, D)), ("lengths", (B,))):
        got = tuple(getattr(state, name).shape)
        if got != shape:
            raise ValueError(f"{op}: {argument}.{name} must be {shape}, got {got}")
    if ends.ndim != 4 or ends.shape != (B, ends.shape[1], H, D) or state.v_ends.shape != ends.shape:
        raise ValueError(
            f"{op}: {argument}.k_ends and {argument}.v_ends must be ({B}, N, {H}, {D}), "
            f"got {tuple(ends.shape)} and {tuple(state.v_ends.shape)}"
        )
    for name, field in zip(RATState._fields, state, strict=True):
        if field.device != v.device:
            raise ValueError(f"{op}: {argument}.{name} must be on {v.device}, got {field.device}")
    check_slots(op, argument, state, form.chunk_size)
