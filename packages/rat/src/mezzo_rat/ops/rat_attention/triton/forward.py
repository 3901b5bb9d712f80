"""RAT attention on a GPU: which kernels run, in which order, on which buffers.

Forward: the chunk scan writes v~, the chunks' ends and each token's own logit; queries and ends are
rotated; attention over the ends merges the own part and the output gate. Backward: the projection,
the output, its log-sum-exp and the ends were kept (nothing of width 2C in float32); the scan runs
once more. Gradients are written where the projection has its inputs, so that nothing is joined.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mezzo_rat.ops.rat_attention.plan import Plan, Sizes
from mezzo_rat.ops.rat_attention.reference import RATForm
from mezzo_rat.ops.rat_attention.triton_ends import (
    attend_ends_dkv_kernel,
    attend_ends_dq_kernel,
    attend_ends_fwd_kernel,
    gate_bwd_kernel,
)
from mezzo_rat.ops.rat_attention.triton_rope import rotate
from mezzo_rat.ops.rat_attention.triton_scan import chunk_scan_bwd_kernel, chunk_scan_fwd_kernel

# The programs of the scan's backward pass, each of which sums its share of the bias's gradient.
SCAN_PROGRAMS = 1024

LOG2_E = math.log2(math.e)


def scan_chunks(
    x: Tensor,
    bias: Tensor | None,
    sizes: Sizes,
    form: RATForm,
    plan: Plan,
    k0: Tensor | None = None,
    v0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Scan the chunks of a projection.

    Args:
        x: (B, T, W) projection.
        bias: (H, D), or None.
        sizes: what x holds.
        form: what to compute.
        plan: where the chunks lie.
        k0: (B, H, D) float32 state that a continued row's first chunk starts from.
        v0: like `k0`.

    Returns:
        v~ (B, T, H, D), the ends of k~ (rotated) and of v~ (B, N, H, D), each token's own base-2
        logit (B, H, T) float32, and, for continued rows, the last k~ and v~ (B, H, D).
    """
    B, T, H, _, D, _ = sizes
    ends = (B, plan.N, H, D)
    new = torch.zeros if plan.mode == "continued" else torch.empty  # padding must be finite
    v_run = new((B, T, H, D), dtype=x.dtype, device=x.device)
    own = new((B, H, T), dtype=torch.float32, device=x.device)
    k_ends = torch.empty(ends, dtype=torch.float32, device=x.device)
    v_ends = torch.empty(ends, dtype=x.dtype, device=x.device)
    k_last, v_last = (None if s is None else s.clone() for s in (k0, v0))
    with torch.cuda.device_of(x):
        chunk_scan_fwd_kernel[(B * plan.N * sizes.G,)](
            x, bias, k0, v0, plan.starts, plan.stops, v_run, k_ends, v_ends, own, k_last, v_last,
            T, plan.N, x.stride(0), x.stride(1), form.scale * LOG2_E,
            **_scan_settings(sizes, form, plan),
        )  # fmt: skip
    k_ends = _turn(k_ends, plan.k_places, plan, x.dtype)
    return v_run, k_ends, v_ends, own, k_last, v_last


def attend_ends(
    x: Tensor,
    v_run: Tensor,
    k_ends: Tensor,
    v_ends: Tensor,
    own: Tensor,
    sizes: Sizes,
    form: RATForm,
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """Attend to the ends and to the own k~, v~; return y (B, T, H, D) and lse (B, H, T), base 2."""
    B, T, H, *_, has_z = sizes
    y, lse = torch.empty_like(v_run), torch.empty_like(own)
    settings = _ends_settings(sizes, form, plan, x.dtype, "fwd", k_ends.shape[1])
    with torch.cuda.device_of(x):
        attend_ends_fwd_kernel[(B * H * triton.cdiv(T, settings["BM"]),)](
            _queries(x, sizes, plan), *(_tiled(e, settings["BN"]) for e in (k_ends, v_ends)),
            v_run, own, x, plan.low, plan.high, plan.starts, y, lse,
            T, x.stride(0), x.stride(1), form.scale * LOG2_E, HAS_Z=has_z, **settings,
        )  # fmt: skip
    return y, lse


def attend_bwd(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    y: Tensor,
    lse: Tensor,
    k_ends: Tensor,
    v_ends: Tensor,
    sizes: Sizes,
    form: RATForm,
    plan: Plan,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the projection (B, T, W) and of the bias (H, D)."""
    B, T, H, G, D, has_z = sizes
    dy = dy.contiguous()
    dx = torch.empty((B, T, sizes.width), dtype=x.dtype, device=x.device)
    do = torch.empty_like(dy) if has_z else dy
    delta, ds_past, p_own, ds_own = (torch.empty_like(lse) for _ in range(4))
    dq = torch.empty((B, T, G, D), dtype=torch.float32, device=x.device)
    dk_ends, dv_ends = (torch.empty(k_ends.shape, device=x.device) for _ in range(2))
    q = _queries(x, sizes, plan)
    scales = (form.scale, form.scale * LOG2_E)
    with torch.cuda.device_of(x):
        rows, BM = B * T * H, max(4096 // D, 1)
        gate_bwd_kernel[(triton.cdiv(rows, BM),)](
            dy, y, x, dx, do, delta, rows, T, x.stride(0), x.stride(1),
            H=H, D=D, W=sizes.width, BM=BM, HAS_Z=has_z, num_warps=4,
        )  # fmt: skip
        settings = _ends_settings(sizes, form, plan, x.dtype, "dq", plan.N)
        attend_ends_dq_kernel[(B * G * triton.cdiv(T, settings["BM"]),)](
            q, *(_tiled(e, settings["BN"]) for e in (k_ends, v_ends)), do, lse, delta,
            plan.low, plan.high, dq, ds_past, T, *scales, **settings,
        )  # fmt: skip
        settings = _ends_settings(sizes, form, plan, x.dtype, "dkv", plan.N)
        attend_ends_dkv_kernel[(B * H * triton.cdiv(plan.N, settings["BN"]),)](
            _tiled(q, settings["BM"]), k_ends, v_ends, _tiled(do, settings["BM"]), lse, delta,
            plan.low, plan.high, plan.stops, plan.unseen, dk_ends, dv_ends,
            T, plan.N, *scales, **settings,
        )  # fmt: skip
        dq = _turn(dq, plan.q_places, plan, torch.float32, inverse=True)
        dk_ends = _turn(dk_ends, plan.k_places, plan, torch.float32, inverse=True)
        chunks = B * plan.N
        programs = min(chunks, SCAN_PROGRAMS)
        dbias = None if bias is None else torch.empty((programs, H, D), device=x.device)
        chunk_scan_bwd_kernel[(programs * G,)](
            x, bias, plan.starts, plan.stops, do, lse, delta, dq, ds_past, dk_ends, dv_ends,
            p_own, ds_own, dx, dbias,
            T, plan.N, chunks, programs, x.stride(0), x.stride(1), *scales,
            W=sizes.width, **_scan_settings(sizes, form, plan),
        )  # fmt: skip
    return dx, None if dbias is None or bias is None else dbias.sum(0).to(bias.dtype)


def _queries(x: Tensor, sizes: Sizes, plan: Plan) -> Tensor:
    """Return the rotated queries (B, T, G, D), contiguous."""
    start = sizes.offsets["OQ"]
    q = x[..., start : start + sizes.G * sizes.D].unflatten(-1, (sizes.G, sizes.D))
    return _turn(q, plan.q_places, plan, x.dtype)


def _turn(
    x: Tensor, places: Tensor, plan: Plan, dtype: torch.dtype, *, inverse: bool = False
) -> Tensor:
    if plan.angles is None:
        return x.to(dtype).contiguous()
    return rotate(x, places, plan.angles, dtype, inverse=inverse)


def _tiled(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe x (B, T, H, D) for loads of one head of `rows` tokens."""
    return TensorDescriptor.from_tensor(x.flatten(2), [1, rows, x.shape[3]])


def _scan_settings(sizes: Sizes, form: RATForm, plan: Plan) -> dict[str, Any]:
    _, _, H, G, D, _ = sizes
    BR = triton.next_power_of_2(H // G)
    # Two warps at least: for one, the LLVM inside Triton 3.6 aborts on a tile of 4 by 128.
    return {
        "L": form.chunk_size, "G": G, "R": H // G, "D": D, "BR": BR,
        "MODE": plan.mode, "num_warps": min(max(BR * D // 512, 2), 8), **sizes.offsets,
    }  # fmt: skip


# Tiles (BM tokens by BN ends), warps and stages of 16-bit kernels, by head width up to the key: for
# few ends, where starting and ending a program counts, and for many, where only the products do.
FEW_ENDS = 1024
TILES_FEW: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "fwd": {64: (64, 32, 4, 3), 128: (64, 32, 4, 3), 256: (64, 32, 4, 2)},
    "dq": {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 4, 2)},
    "dkv": {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (32, 64, 4, 2)},
}
TILES_MANY: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "fwd": {64: (128, 64, 4, 3), 128: (64, 64, 4, 3), 256: (64, 64, 4, 2)},
    "dq": {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (64, 32, 4, 2)},
    "dkv": {64: (64, 128, 4, 2), 128: (64, 64, 4, 2), 256: (32, 64, 4, 2)},
}
TILES_FLOAT32 = (32, 32, 4, 1)


def _ends_settings(
    sizes: Sizes, form: RATForm, plan: Plan, dtype: torch.dtype, kernel: str, num_ends: int
) -> dict[str, Any]:
    tiles = (TILES_FEW if num_ends <= FEW_ENDS else TILES_MANY)[kernel]
    width = next(width for width in tiles if width >= sizes.D)
    fit = TILES_FLOAT32 if dtype == torch.float32 else tiles[width]
    BM, BN, num_warps, num_stages = fit
    return {
        "L": form.chunk_size, "G": sizes.G, "H": sizes.H, "D": sizes.D, "BM": BM, "BN": BN,
        "MODE": plan.mode, "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": num_warps, "num_stages": num_stages,
    }  # fmt: skip
