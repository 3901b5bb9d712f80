"""The backward pass, from the projection, the output, its log-sum-exp and the chunks' ends.

The forward saved nothing of width 2C in float32, so the scan runs again. Each gradient is written
at the place that its input has in the projection, so nothing has to be concatenated at the end.
"""

import torch
from mezzo_core.ops.sizes import ceil_div
from torch import Tensor

from mezzo_rat.ops.rat_attention.saved import Saved
from mezzo_rat.ops.rat_attention.triton.ends import attend_ends_dkv_kernel, attend_ends_dq_kernel
from mezzo_rat.ops.rat_attention.triton.gates import output_gate_bwd_kernel
from mezzo_rat.ops.rat_attention.triton.plan import Plan
from mezzo_rat.ops.rat_attention.triton.rope import rotated_queries, turn
from mezzo_rat.ops.rat_attention.triton.scan import chunk_scan_bwd_kernel
from mezzo_rat.ops.rat_attention.triton.tiles import LOG2_E, ends_settings, scan_settings, tiled

# Programs of the scan's backward pass; each sums a share of the gradient of the bias.
SCAN_PROGRAMS = 1024


def attend_bwd(dy: Tensor, saved: Saved, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the projection (B, T, W) and of the bias (H, D)."""
    x, bias, y, lse = saved.x, saved.gate_bias, saved.y, saved.lse
    k_ends, v_ends, sizes = saved.k_ends, saved.v_ends, plan.sizes
    B, T, H, G, D = sizes.B, sizes.T, sizes.H, sizes.G, sizes.D
    dy = dy.contiguous()
    dx = torch.empty((B, T, sizes.width), dtype=x.dtype, device=x.device)
    do = torch.empty_like(dy) if sizes.has_z else dy
    delta, ds_past, p_own, ds_own = (torch.empty_like(lse) for _ in range(4))
    dq = torch.empty((B, T, G, D), dtype=torch.float32, device=x.device)
    dk_ends, dv_ends = (torch.empty(k_ends.shape, device=x.device) for _ in range(2))
    q = rotated_queries(x, plan)
    scales = (plan.form.scale, plan.form.scale * LOG2_E)
    with torch.cuda.device_of(x):
        rows, BM = B * T * H, max(4096 // D, 1)
        output_gate_bwd_kernel[(ceil_div(rows, BM),)](
            dy, y, x, dx, do, delta, rows, T, x.stride(0), x.stride(1),
            H=H, D=D, W=sizes.width, BM=BM, HAS_Z=sizes.has_z, num_warps=4,
        )  # fmt: skip
        settings = ends_settings(plan, x.dtype, "dq", plan.N)
        attend_ends_dq_kernel[(B * G * ceil_div(T, settings["BM"]),)](
            q, *(tiled(e, settings["BN"]) for e in (k_ends, v_ends)), do, lse, delta,
            plan.low, plan.high, dq, ds_past, T, *scales, **settings,
        )  # fmt: skip
        settings = ends_settings(plan, x.dtype, "dkv", plan.N)
        attend_ends_dkv_kernel[(B * H * ceil_div(plan.N, settings["BN"]),)](
            tiled(q, settings["BM"]), k_ends, v_ends, tiled(do, settings["BM"]), lse, delta,
            plan.low, plan.high, plan.stops, plan.unseen, dk_ends, dv_ends,
            T, plan.N, *scales, **settings,
        )  # fmt: skip
        dq = turn(dq, plan.q_places, plan, torch.float32, inverse=True)
        dk_ends = turn(dk_ends, plan.k_places, plan, torch.float32, inverse=True)
        chunks = B * plan.N
        programs = min(chunks, SCAN_PROGRAMS)
        dbias = None if bias is None else torch.empty((programs, H, D), device=x.device)
        chunk_scan_bwd_kernel[(programs * G,)](
            x, bias, plan.starts, plan.stops, do, lse, delta, dq, ds_past, dk_ends, dv_ends,
            p_own, ds_own, dx, dbias,
            T, plan.N, chunks, programs, x.stride(0), x.stride(1), *scales,
            W=sizes.width, **scan_settings(plan),
        )  # fmt: skip
    return dx, None if dbias is None or bias is None else dbias.sum(0).to(bias.dtype)
