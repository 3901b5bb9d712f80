"""The public op `attention`: checks its arguments and picks a backend."""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mezzo_core.ops.attention import blocked, flash, flex, sdpa
from mezzo_core.ops.attention.reference import attention_reference
from mezzo_core.ops.attention.request import AttentionOutput, Request, is_plain
from mezzo_core.ops.checks import check_number, check_size, in_transform
from mezzo_core.ops.packed import check_borders, check_cu_seqlens
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.ops.shapes import Shapes, check_heads, check_one_dtype

SMALL_MASK = 1024 * 1024
"""Queries times keys. Up to this number, sdpa with a full mask is faster than "blocked" on a CPU,
and on a GPU "flex" is not worth its compilation."""

AttentionImpl = Literal["auto", "reference", "sdpa", "blocked", "flex", "flash"]


_SHAPES = Shapes(
    q="B T HQ K", k="B S H K", v="B S H V", alibi_slopes="HQ | None", filled="HQ H K V"
)
_POSITIONS = Shapes(q_positions="int: q_rows T", k_positions="int: k_rows S")


class _Backend(NamedTuple):
    run: Callable[[Request], AttentionOutput]
    unsupported: Callable[[Request], str | None]


_BACKENDS = {
    "reference": _Backend(attention_reference, lambda r: None),
    "sdpa": _Backend(sdpa.attention_sdpa, sdpa.unsupported),
    "blocked": _Backend(blocked.attention_blocked, blocked.unsupported),
    "flex": _Backend(flex.attention_flex, flex.unsupported),
    "flash": _Backend(flash.attention_flash, flash.unsupported),
}


def attention(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B S H K"],
    v: Float[Tensor, "B S H V"],
    *,
    causal: bool = True,
    window_size: int | None = None,
    alibi_slopes: Float[Tensor, " HQ"] | None = None,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, " N"] | None = None,
    q_positions: Int[Tensor, "#B T"] | None = None,
    k_positions: Int[Tensor, "#B S"] | None = None,
    return_lse: bool = False,
    impl: AttentionImpl = "auto",
) -> AttentionOutput:
    """Attend: softmax(scale q·k - slope · distance) v over the keys that each query sees.

    Query head h reads key and value head h // (HQ/H). `reference.py` is the definition. The output
    and the lse are differentiable in q, k and v, but only once, and not in the slopes. On a CPU a
    NaN, an infinity or a very large number in a token, or in its gradient, only affects tokens that
    see it or that it sees. On a GPU it may affect its whole row.

    Args:
        q: queries.
        k: keys, in the dtype of q.
        v: values, likewise; their width may differ from the keys'.
        causal: a query sees no key after its own position.
        window_size: W; a query sees the keys less than W positions before it. With W = 1 it sees
            only its own key.
        alibi_slopes: slope of each query head (`mezzo_core.positions.alibi_slopes`).
        scale: factor of the products q·k, any finite number; None for K^-0.5.
        cu_seqlens: borders of sequences packed in one row (B = 1): from 0 to T, never decreasing.
            Each sequence only sees itself. The values are checked on the CPU only, where reading
            them does not wait.
        q_positions: positions of the queries, in place of 0..T-1, with any values in any order.
            Must be given together with `k_positions`.
        k_positions: positions of the keys, likewise. A key with a negative position is hidden.
        return_lse: also return the log-sum-exp of the scores, by which `ops.online_softmax.merge`
            merges results over several sets of keys.
        impl: the backend. "auto" takes the fastest that supports the request; on a Hopper GPU that
            is often "flash", if the package flash-attn-4 is installed. An explicit backend is used
            or raises an error; it is never replaced.

    Returns:
        AttentionOutput(out, lse). A query that sees no key gets out 0 and lse -inf.

    Raises:
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, an option, `cu_seqlens` or `impl` is wrong, or arguments
            exclude each other.
    """
    if not isinstance(impl, str) or impl not in get_args(AttentionImpl):
        raise ValueError(f"attention: impl must be one of {get_args(AttentionImpl)}, got {impl!r}")
    _SHAPES.check("attention", q, k, v, alibi_slopes)
    check_one_dtype("attention", q=q, k=k, v=v)
    check_heads("attention", q.shape[2], k.shape[2])
    _check_options(causal, return_lse, window_size, scale)
    if alibi_slopes is not None:
        # In half precision a slope times a long distance would be rounded, or overflow.
        alibi_slopes = alibi_slopes.detach().to(accumulation_dtype(q.dtype))
    _check_places(q, k, causal, cu_seqlens, q_positions, k_positions)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    elif scale <= 0:
        # Backends scale scores after masking them with -inf, so a scale that is negative or 0 would
        # spoil the mask. Move the sign, or the 0, into q.
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    request = Request(
        q,
        k,
        v,
        causal,
        window_size,
        alibi_slopes,
        scale,
        cu_seqlens,
        q_positions,
        k_positions,
        return_lse,
    )
    return _BACKENDS[_resolve(request, impl)].run(request)


def _resolve(r: Request, impl: AttentionImpl) -> str:
    """Return the backend to run; raise an error if an explicit one cannot do the request."""
    if impl == "auto":
        return _fastest(r)
    reason = _BACKENDS[impl].unsupported(r)
    if reason is not None:
        able = [name for name, backend in _BACKENDS.items() if backend.unsupported(r) is None]
        raise ValueError(
            f"attention: impl={impl!r} does not support {reason}; this request can be done by "
            + ", ".join(f"{name!r}" for name in able)
        )
    return impl


def _fastest(r: Request) -> str:
    """Pick the backend for "auto".

    On a CPU, sdpa takes a sixth of the reference's time at (B, T, H, D) = (8, 512, 4, 32).
    """
    if r.q.numel() == 0 or r.k.numel() == 0:
        return "reference"
    able = sdpa.unsupported(r) is None
    if torch.onnx.is_in_onnx_export():  # it has no rules for our ops
        return "sdpa" if able else "reference"
    # An exported program runs for any number of tokens, so it must not branch on it.
    is_small = not torch.compiler.is_exporting() and r.q.shape[1] * r.k.shape[1] <= SMALL_MASK
    # Short sequences mostly wait for the host, and sdpa has the least work there.
    if not (is_plain(r) and is_small) and flash.is_fastest(r):
        return "flash"
    placed_few = r.q_positions is not None and is_small
    if not is_plain(r) and not placed_few and flex.unsupported(r) is None:
        return "flex"
    # A compiled graph cannot look for scores that overflow, and torch's masks do not hide these.
    small = is_plain(r) or (is_small and not torch.compiler.is_compiling())
    # The blocked op has no rule for vmap: there torch's ops are used.
    suits_sdpa = (able and small) or in_transform()
    if not suits_sdpa and blocked.unsupported(r) is None:
        return "blocked"
    return "sdpa" if able else "reference"


def _check_options(
    causal: bool, return_lse: bool, window_size: int | None, scale: float | None
) -> None:
    for name, value in (("causal", causal), ("return_lse", return_lse)):
        if not isinstance(value, bool):
            raise TypeError(f"attention: {name} must be True or False, got {value!r}")
    if window_size is not None:
        check_size("attention", "window_size", window_size)
    if scale is not None:
        check_number("attention", "scale", scale)


def _check_places(
    q: Tensor,
    k: Tensor,
    causal: bool,
    cu_seqlens: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
) -> None:
    """Check `cu_seqlens` and the positions of queries and keys."""
    (B, T), S = q.shape[:2], k.shape[1]
    if (q_positions is None) != (k_positions is None):
        raise ValueError("attention: q_positions and k_positions are given together or not at all")
    if cu_seqlens is not None:
        if q_positions is not None:
            raise ValueError("attention: cu_seqlens and positions exclude each other")
        check_cu_seqlens("attention", cu_seqlens, q)
        if S != T:
            raise ValueError(f"attention: cu_seqlens needs as many keys as queries, got {S}, {T}")
        check_borders("attention", cu_seqlens, T)
    if q_positions is None or k_positions is None:
        if causal and T != S:
            raise ValueError(
                f"attention: causal needs as many keys as queries, or q_positions and "
                f"k_positions; got T = {T}, S = {S}"
            )
        return
    rows = _POSITIONS.check("attention", q_positions, k_positions, device=q.device, T=T, S=S)
    for name in ("q", "k"):
        found = rows[f"{name}_rows"]
        if found != 1 and found != B:  # `in` compares no symbols, which a compiler traces with
            raise ValueError(
                f"attention: {name}_positions must have one row, or {B} as q, got {found}"
            )
