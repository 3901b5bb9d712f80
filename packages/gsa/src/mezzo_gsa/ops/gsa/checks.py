"""Checks of the arguments of gated slot attention, and the limits of its kernels."""

from typing import Any, get_args

import torch
from mezzo_core.ops.checks import check_floating, check_number, check_size
from mezzo_core.ops.packed import check_cu_seqlens
from torch import Tensor

from mezzo_gsa.ops.decoding import checks
from mezzo_gsa.ops.gsa.between import Between
from mezzo_gsa.ops.gsa.state import GSAState


def check_inputs(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    s: Tensor | None,
    scale: float,
    between: str,
    *,
    sizes: str,
) -> None:
    """Raise a ValueError or TypeError that names the argument which does not fit the others.

    `sizes` names the axes of q in messages.
    """
    check_between(op, between)
    check_number(op, "scale", scale)
    if g is None and s is None:
        raise ValueError(f"{op}: g or s must be given, got neither")
    named = [("q", q), ("k", k), ("v", v)]
    named += [(name, x) for name, x in (("g", g), ("s", s)) if x is not None]
    for name, x in named:
        check_floating(op, name, x)
    if q.ndim != sizes.count(",") + 1:
        raise ValueError(f"{op}: q must be {sizes}, got {tuple(q.shape)}")
    for name, x in named:
        if x.ndim != q.ndim or x.shape[:-2] != q.shape[:-2]:
            raise ValueError(
                f"{op}: {name} must have the batch and tokens of q {tuple(q.shape)}, "
                f"got {tuple(x.shape)}"
            )
        if x.device != q.device:
            raise ValueError(f"{op}: {name} is on {x.device}, q on {q.device}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{op}: {name} must have the dtype of q, {q.dtype}, got {x.dtype}")
    _check_sizes(op, q, k, named)


def _check_sizes(op: str, q: Tensor, k: Tensor, named: list[tuple[str, Tensor]]) -> None:
    H = k.shape[-2]
    if k.shape[-1] != q.shape[-1] or H < 1 or q.shape[-2] < 1 or q.shape[-2] % H:
        raise ValueError(
            f"{op}: k must be as wide as q, with a number of heads that divides q's: "
            f"q is {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    M = named[3][1].shape[-1]
    for name, x in named[2:]:
        width = x.shape[-1] if name == "v" else M
        if x.shape[-2:] != (H, width):
            raise ValueError(
                f"{op}: {name} must end in (H, {'M' if name != 'v' else 'V'}) = {(H, width)}, "
                f"got {tuple(x.shape)}"
            )
    for name, x in named:
        if not x.shape[-1]:
            raise ValueError(f"{op}: the last size of {name} must not be 0: {tuple(x.shape)}")


def check_between(op: str, between: Any) -> None:
    """Raise a ValueError if there is no such function between the two passes."""
    if between not in get_args(Between):
        raise ValueError(f"{op}: between must be one of {get_args(Between)}, got {between!r}")


def check_projection(
    op: str, *, num_heads: int, num_kv_heads: int, num_slots: int, damping: float
) -> None:
    """Raise an error if a number of heads or slots or the damping is invalid; it names which."""
    for name, count in (("num_kv_heads", num_kv_heads), ("num_slots", num_slots)):
        check_size(op, name, count)
    check_size(op, "num_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{op}: num_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}"
        )
    check_number(op, "damping", damping, positive=True)


def check_state(
    op: str,
    state: GSAState | None,
    q: Tensor,
    cu_seqlens: Tensor | None,
    sizes: tuple[int, int, int, int],
) -> None:
    """Raise an error if the borders are invalid, or the state does not fit (H, M, K, V)."""
    num_states = q.shape[0]
    if cu_seqlens is not None:
        check_cu_seqlens(op, cu_seqlens, q)
        num_states = cu_seqlens.shape[0] - 1
    if state is None:
        return
    if not isinstance(state, GSAState):
        raise TypeError(f"{op}: initial_state must be a GSAState, got {type(state).__name__}")
    H, M, K, V = sizes
    for name, x, D in (("k", state.k, K), ("v", state.v, V)):
        checks.check_state(op, f"initial_state.{name}", x, (num_states, H, M, D), q)


def unsupported(
    dtype: torch.dtype,
    rows: tuple[int, ...],
    M: int,
    K: int,
    V: int,
    *,
    on_gpu: bool = False,
) -> str | None:
    """Return why the kernels do not support a request, or None if they do.

    `rows` are B and T, or B alone for a step. `on_gpu` tells whether the kernels run with the GPU's
    matrix instructions, which ptxas 12.9 still compiles wrong in one case.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{dtype}; supported: float32, bfloat16, float16"
    if 0 in rows:
        return "no rows, or rows of no tokens"
    if M > 128 or max(K, V) > 512:
        return f"M = {M}, K = {K}, V = {V}; supported: M up to 128, K and V up to 512"
    if on_gpu and dtype == torch.float16 and M > 64:
        return f"float16 with M = {M} on a GPU; supported there: M up to 64, or bfloat16"
    return None
