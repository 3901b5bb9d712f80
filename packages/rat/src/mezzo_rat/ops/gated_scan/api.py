"""The public gated scan: it checks its arguments and chooses an implementation."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from mezzo_core.ops.checks import check_lengths
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.packed import check_borders, count_sequences
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.ops.shapes import Shapes
from torch import Tensor

from mezzo_rat.ops.gated_scan.op import differentiable_gated_scan
from mezzo_rat.ops.gated_scan.reference import gated_scan_reference

_PROJECTION = Shapes(zvg="B T 3C", filled="3C")
_SHAPES = Shapes(zvg="B T 3C", gate_bias="C | None", initial_state="S C | None")


class GatedScanOutput(NamedTuple):
    """What `gated_scan` returns."""

    out: Float[Tensor, "B T C"]
    final_state: Float[Tensor, "S C"]


def gated_scan(
    zvg: Float[Tensor, "B T three_C"],
    *,
    gate_bias: Float[Tensor, "C"] | None = None,
    initial_state: Float[Tensor, "S C"] | None = None,
    cu_seqlens: Int[Tensor, "borders"] | None = None,
    lengths: Int[Tensor, "B"] | None = None,
    impl: Impl = "auto",
) -> GatedScanOutput:
    """Compute the gated linear RNN directly from the output of its input projection.

    With f = sigmoid(g + gate_bias), equation 3 of the RAT paper over one chunk:

        h[t] = f[t] h[t-1] + (1 - f[t]) v[t]        out[t] = sigmoid(z[t]) h[t]

    Gates and states are float32 (float64 for float64). Differentiable in `zvg`, `gate_bias` and
    `initial_state`, through both results; there is no double backward.

    Args:
        zvg: (B, T, 3C): z, v and g side by side. A logit of +inf in g keeps the whole state, -inf
            keeps nothing.
        gate_bias: (C,), added to g in float32.
        initial_state: (B, C), or (S, C) when packed: h before the first token. None: zeros.
        cu_seqlens: (S + 1,) int32 or int64 borders of S sequences packed in one row (B = 1). They
            start at 0, end at T and never decrease. Their values are checked on the CPU only: on a
            GPU the check would wait for the stream.
        lengths: (B,) int64, how many tokens of each row are real. The rest is padding on the right:
            it leaves the state as it is, and its outputs are 0.
        impl: "auto", "reference" or "triton"; Triton has no float64.

    Returns:
        out: (B, T, C) in the dtype of zvg. final_state: (B, C) or (S, C), float32 (float64 for
        float64), h after the last real token; without real tokens, the initial state.

    Raises:
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, `cu_seqlens`, `lengths` or `impl` is wrong.
    """
    _check(zvg, gate_bias, initial_state, cu_seqlens, lengths)
    unsupported = "float64; supported: float32, bfloat16, float16"
    if cu_seqlens is not None:
        check_borders("gated_scan", cu_seqlens, zvg.shape[1])
    chosen = resolve_impl(
        "gated_scan", impl, zvg.device, unsupported if zvg.dtype == torch.float64 else None
    )
    dtype = accumulation_dtype(zvg.dtype)
    gate_bias = None if gate_bias is None else gate_bias.to(dtype)
    initial_state = None if initial_state is None else initial_state.to(dtype)
    if chosen == "reference":
        return GatedScanOutput(
            *gated_scan_reference(zvg, gate_bias, initial_state, cu_seqlens, lengths)
        )
    differentiable = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (zvg, gate_bias, initial_state)
    )
    out, final_state, _ = differentiable_gated_scan(
        zvg, gate_bias, initial_state, cu_seqlens, lengths, differentiable
    )
    return GatedScanOutput(out, final_state)


def _check(
    zvg: Tensor,
    gate_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
) -> None:
    W = _PROJECTION.check("gated_scan", zvg)["3C"]
    if W % 3:
        raise ValueError(f"gated_scan: zvg must be (B, T, 3C), got {tuple(zvg.shape)}")
    S = count_sequences("gated_scan", cu_seqlens, zvg)
    _SHAPES.check("gated_scan", zvg, gate_bias, initial_state, C=W // 3, S=S)
    if lengths is not None:
        if cu_seqlens is not None:
            raise ValueError("gated_scan: lengths and cu_seqlens exclude each other")
        check_lengths("gated_scan", lengths, zvg)
