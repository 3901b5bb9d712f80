"""The public op `linear_scan`: argument checks and dispatch."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mezzo_core.ops.checks import check_floating, check_size
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.packed import count_sequences
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.ops.scan.doubling import doubling_scan
from mezzo_core.ops.scan.op import differentiable_linear_scan


class ScanOutput(NamedTuple):
    """What `linear_scan` returns."""

    out: Float[Tensor, "B T *D"]
    final_state: Float[Tensor, "S *D"]


def linear_scan(
    a: Float[Tensor, "B T *#D"],
    x: Float[Tensor, "B T *D"],
    *,
    initial_state: Float[Tensor, "S *D"] | None = None,
    chunk_size: int | None = None,
    cu_seqlens: Int[Tensor, "borders"] | None = None,
    impl: Impl = "auto",
) -> ScanOutput:
    """Compute h[t] = a[t] ⊙ h[t-1] + x[t]: the state decays by a, and each token adds x.

    Accumulates in float32 (float64 for float64), so rounding does not grow with T. Differentiable
    in `a`, `x` and `initial_state`, through both results, but only once: there is no double
    backward. With a chunk_size it is the recurrence inside RAT's chunks (equation 3 of the RAT
    paper). A NaN reaches only later tokens of its own sequence; the Triton form may carry it past
    the start of a chunk. For decays in log space, pass `g.exp()`.

    Args:
        a: (B, T, *) decays: any real numbers, in any floating-point dtype. An axis of 1 after T is
            repeated: (B, T, H, 1) has one decay for all channels of a head.
        x: (B, T, *) inputs, in any floating-point dtype.
        initial_state: (B, *), or (S, *) when packed: the state before the first token. None: zeros.
        chunk_size: L. The state becomes zero again before every token t with t % L == 0, t > 0.
            Chunks are counted from the start of each packed sequence; its last may be short. None:
            one chunk.
        cu_seqlens: (S + 1,) int32 or int64 borders of S sequences packed in one row (B = 1). They
            start at 0, end at T and never decrease. Their values are checked on the CPU only.
        impl: "auto", "reference" or "triton".

    Returns:
        out: (B, T, *) in x's dtype, the states h. final_state: (B, *) or (S, *), float32 (float64
        for float64), the state after each sequence's last token; a sequence without tokens keeps
        its initial state.

    Raises:
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, `chunk_size`, `cu_seqlens` or `impl` is wrong.
    """
    _check(a, x, initial_state, chunk_size, cu_seqlens)
    B, T, *dims = x.shape
    num_states = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    D = math.prod(dims)
    if initial_state is not None:
        initial_state = initial_state.to(accumulation_dtype(x.dtype)).reshape(num_states, D)
    # ONNX knows no registered op.
    scan = doubling_scan if torch.onnx.is_in_onnx_export() else differentiable_linear_scan
    out, final_state = scan(
        (a if a.shape == x.shape else a.expand(x.shape)).reshape(B, T, D),
        x.reshape(B, T, D),
        initial_state,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        chunk_size or 0,
        resolve_impl("linear_scan", impl, x.device),
    )
    return ScanOutput(out.reshape(x.shape), final_state.reshape(num_states, *dims))


def _check(
    a: Tensor,
    x: Tensor,
    initial_state: Tensor | None,
    chunk_size: int | None,
    cu_seqlens: Tensor | None,
) -> None:
    check_floating("linear_scan", "a", a)
    check_floating("linear_scan", "x", x)
    if initial_state is not None:
        check_floating("linear_scan", "initial_state", initial_state)
    fits = a.ndim == x.ndim >= 2 and a.shape[:2] == x.shape[:2]
    if not fits or any(n != 1 and n != m for n, m in zip(a.shape[2:], x.shape[2:], strict=True)):
        raise ValueError(
            "linear_scan: a and x must have one shape (B, T, *), where a may have axes of 1 "
            f"after T, got a {tuple(a.shape)} and x {tuple(x.shape)}"
        )
    if chunk_size is not None:
        check_size("linear_scan", "chunk_size", chunk_size)
    expected = (count_sequences("linear_scan", cu_seqlens, x), *x.shape[2:])
    if initial_state is not None and initial_state.shape != expected:
        raise ValueError(
            f"linear_scan: initial_state must be {expected}, got {tuple(initial_state.shape)}"
        )
    for name, value in (("a", a), ("initial_state", initial_state)):
        if value is not None and value.device != x.device:
            raise ValueError(f"linear_scan: {name} is on {value.device}, x on {x.device}")
