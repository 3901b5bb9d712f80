"""The forward pass: a scan of the chunks, then attention to their ends.

The scan writes v~, the chunks' ends and the logit of each query with its own k~. Then queries and
ends are rotated. The attention to the ends includes each token's own k~, v~ and the output gate.
"""

from typing import NamedTuple

import torch
from mezzo_core.ops.sizes import ceil_div
from torch import Tensor

from mezzo_rat.ops.rat_attention.triton.ends import attend_ends_fwd_kernel
from mezzo_rat.ops.rat_attention.triton.plan import Plan
from mezzo_rat.ops.rat_attention.triton.rope import rotated_queries, turn
from mezzo_rat.ops.rat_attention.triton.scan import chunk_scan_fwd_kernel
from mezzo_rat.ops.rat_attention.triton.tiles import LOG2_E, ends_settings, scan_settings, tiled


class Scanned(NamedTuple):
    """The results of the scan, for the attention and for the next call."""

    v_run: Tensor
    """(B, T, H, D): v~ at each token."""
    k_ends: Tensor
    """(B, N, H, D): k~ at the end of each chunk, rotated."""
    v_ends: Tensor
    """(B, N, H, D): v~ at the end of each chunk."""
    own: Tensor
    """(B, H, T) float32: the logit of each query with its own k~, base 2."""
    k_last: Tensor | None
    """Continued rows: (B, H, D) float32, k~ at the last token."""
    v_last: Tensor | None
    """Continued rows: (B, H, D) float32, v~ at the last token."""


def scan_chunks(
    x: Tensor,
    bias: Tensor | None,
    plan: Plan,
    k0: Tensor | None = None,
    v0: Tensor | None = None,
) -> Scanned:
    """Scan the chunks of a projection.

    Args:
        x: (B, T, W) projection.
        bias: (H, D), or None.
        plan: what to compute, and the positions of the chunks.
        k0: (B, H, D) float32 state that a continued row's first chunk starts from.
        v0: like `k0`.
    """
    sizes = plan.sizes
    B, T, H, D = sizes.B, sizes.T, sizes.H, sizes.D
    ends = (B, plan.N, H, D)
    # The scan skips the padding of continued rows, which must be finite all the same.
    new = torch.zeros if plan.mode == "continued" else torch.empty
    v_run = new((B, T, H, D), dtype=x.dtype, device=x.device)
    own = new((B, H, T), dtype=torch.float32, device=x.device)
    k_ends = torch.empty(ends, dtype=torch.float32, device=x.device)
    v_ends = torch.empty(ends, dtype=x.dtype, device=x.device)
    k_last, v_last = (None if s is None else s.clone() for s in (k0, v0))
    with torch.cuda.device_of(x):
        chunk_scan_fwd_kernel[(B * plan.N * sizes.G,)](
            x, bias, k0, v0, plan.starts, plan.stops, v_run, k_ends, v_ends, own, k_last, v_last,
            T, plan.N, x.stride(0), x.stride(1), plan.form.scale * LOG2_E,
            **scan_settings(plan),
        )  # fmt: skip
    k_ends = turn(k_ends, plan.k_places, plan, x.dtype)
    return Scanned(v_run, k_ends, v_ends, own, k_last, v_last)


def attend_ends(x: Tensor, scanned: Scanned, plan: Plan) -> tuple[Tensor, Tensor]:
    """Attend to the ends and to the own k~, v~; return y (B, T, H, D) and lse (B, H, T), base 2."""
    B, T, H = plan.sizes.B, plan.sizes.T, plan.sizes.H
    y, lse = torch.empty_like(scanned.v_run), torch.empty_like(scanned.own)
    settings = ends_settings(plan, x.dtype, "fwd", scanned.k_ends.shape[1])
    with torch.cuda.device_of(x):
        attend_ends_fwd_kernel[(B * H * ceil_div(T, settings["BM"]),)](
            rotated_queries(x, plan),
            tiled(scanned.k_ends, settings["BN"]), tiled(scanned.v_ends, settings["BN"]),
            scanned.v_run, scanned.own, x, plan.low, plan.high, plan.starts, y, lse,
            T, x.stride(0), x.stride(1), plan.form.scale * LOG2_E,
            HAS_Z=plan.form.has_z, **settings,
        )  # fmt: skip
    return y, lse
