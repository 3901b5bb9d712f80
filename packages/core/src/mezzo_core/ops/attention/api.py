"""The public op `attention`: checks its arguments and picks a backend."""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mezzo_core.ops.attention import blocked, flash, flex, sdpa
from mezzo_core.ops.attention.reference import attention_reference
from mezzo_core.ops.attention.request import AttentionOutput, Request, is_plain
from mezzo_core.ops.checks import check_floating, check_number, check_size, in_transform
from mezzo_core.ops.packed import check_borders, check_cu_seqlens
from mezzo_core.ops.precision import accumulation_dtype

SMALL_MASK = 1024 * 1024
"""Up to this number of queries times keys, sdpa with a full mask is faster on a CPU than blocks,
and on a GPU flex is not worth a compilation."""

AttentionImpl = Literal["auto", "reference", "sdpa", "blocked", "flex", "flash"]


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

    Query head h reads key and value head h // (HQ/H). `reference.py` is the definition. The outputs
    and the lse have gradients for q, k and v, but not for the slopes; there are no second
    gradients. On a CPU a NaN, an infinity or a very large number in a token, or in its gradient,
    only affects tokens that see it or that it sees. A GPU's kernels may let it affect its row.

    Args:
        q: queries.
        k: keys.
        v: values; their width may differ from the keys'.
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
            merges the results over several sets of keys. It can also add one to the denominator.
        impl: the backend. "auto" takes the fastest that supports the request; on a Hopper GPU that
            is "flash" where the package flash-attn-4 is installed. An explicit backend is used, or
            an error is raised; it is never replaced.

    Returns:
        AttentionOutput(out, lse). A query that sees no key gets out 0 and lse -inf.

    Raises:
        TypeError: if q, k and v do not have one floating dtype, positions or borders are not
            integers, or an option has the wrong type.
        ValueError: if shapes or devices disagree, arguments exclude each other, or `impl` cannot
            do the request.
    """
    if not isinstance(impl, str) or impl not in get_args(AttentionImpl):
        raise ValueError(f"attention: impl must be one of {get_args(AttentionImpl)}, got {impl!r}")
    _check_tensors(q, k, v)
    _check_options(causal, return_lse, window_size, scale)
    if alibi_slopes is not None:
        check_floating("attention", "alibi_slopes", alibi_slopes)
        if alibi_slopes.shape != (q.shape[2],):
            raise ValueError(
                f"attention: alibi_slopes must be ({q.shape[2]},), one for each query head; "
                f"got {tuple(alibi_slopes.shape)}"
            )
        _check_device("alibi_slopes", alibi_slopes, q)
        # In half precision a slope times a long distance would be rounded, or overflow.
        alibi_slopes = alibi_slopes.detach().to(accumulation_dtype(q.dtype))
    _check_places(q, k, causal, cu_seqlens, q_positions, k_positions)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    elif scale <= 0:
        # Backends set masked scores to -inf before they scale, so a scale that is negative or 0
        # would spoil the mask. Move the sign, or the 0, into q.
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
    # An exported program is for any number of tokens, so it must not ask for it.
    is_small = not torch.compiler.is_exporting() and r.q.shape[1] * r.k.shape[1] <= SMALL_MASK
    # For short sequences the host is what one waits for, and sdpa takes the least of it.
    if not (is_plain(r) and is_small) and flash.is_fastest(r):
        return "flash"
    placed_few = r.q_positions is not None and is_small
    if not is_plain(r) and not placed_few and flex.unsupported(r) is None:
        return "flex"
    # A graph cannot look at values, and torch's masks do not stop a score that overflows.
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


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating("attention", name, x)
        if x.ndim != 4:
            raise ValueError(
                f"attention: {name} must be (batch, tokens, heads, width), got {tuple(x.shape)}"
            )
        if x.dtype != q.dtype:
            raise TypeError(
                f"attention: q, k and v must have one floating dtype, got q {q.dtype}, "
                f"{name} {x.dtype}"
            )
        _check_device(name, x, q)
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            "attention: k must have q's batch and width, v must have k's batch, tokens and heads; "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if 0 in (q.shape[2], q.shape[3], k.shape[2], v.shape[3]):
        raise ValueError(
            "attention: q, k and v must have heads and widths of 1 and more, "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"attention: the heads of q must be a multiple of those of k and v, got {q.shape[2]} "
            f"and {k.shape[2]}"
        )


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
    for name, positions, length in (
        ("q_positions", q_positions, T),
        ("k_positions", k_positions, S),
    ):
        if not isinstance(positions, Tensor):
            raise TypeError(f"attention: {name} must be a tensor, got {type(positions).__name__}")
        if positions.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"attention: {name} must be int32 or int64, got {positions.dtype}")
        if positions.shape not in ((B, length), (1, length)):
            raise ValueError(
                f"attention: {name} must be ({B}, {length}) or (1, {length}), "
                f"got {tuple(positions.shape)}"
            )
        _check_device(name, positions, q)


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"attention: {name} is on {x.device}, q on {q.device}")
