"""RAT attention on a GPU: the launches of its kernels, in their order, and their constants.

The forward scans the chunks, which writes v~, the chunks' ends and the logit of each query with its
own k~. Then queries and ends are rotated. The attention to the ends includes each token's own k~,
v~ and the output gate.

The backward starts from the projection, the output, its log-sum-exp and the chunks' ends. The
forward saved nothing of width 2C in float32, so the scan runs again. Each gradient is written where
its input lies in the projection, so nothing is concatenated.

Rows that continue a state take the same kernels. The scan gives the ends of this call's chunks,
which are copied to their slots between the older ones. The backward takes the gradients of these
ends out of the slots again; what remains there goes to the older ends.

All launch on the current device: callers set it to the tensors' device.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mezzo_rat.ops.rat_attention.arguments import Pulled, Saved, SavedContinued
from mezzo_rat.ops.rat_attention.chunks import Plan, bias_parts
from mezzo_rat.ops.rat_attention.state import RATState
from mezzo_rat.ops.rat_attention.triton.elementwise import output_gate_bwd_kernel, rotate_kernel
from mezzo_rat.ops.rat_attention.triton.ends import (
    attend_ends_dkv_kernel,
    attend_ends_dq_kernel,
    attend_ends_fwd_kernel,
)
from mezzo_rat.ops.rat_attention.triton.scan import chunk_scan_bwd_kernel, chunk_scan_fwd_kernel

LOG2_E = math.log2(math.e)

# Tiles (BM tokens by BN ends), warps and stages of 16-bit kernels. A key is the largest head width
# of its entry. With few ends, the start and end of a program take much of its time; with many ends,
# only the products count.
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


class EndsGradients(NamedTuple):
    """The gradients that the backward of the attention hands to the backward of the scan."""

    dx: Tensor
    """(B, T, W): the gradient of the projection; only the part of z is complete."""
    do: Tensor
    """(B, T, H, D): the gradient of the output before its gate."""
    delta: Tensor
    """(B, H, T) float32: do · o."""
    dq: Tensor
    """(B, T, G, D) float32: the gradient of the rotated queries through the ends."""
    ds_past: Tensor
    """(B, H, T) float32: the sum of the gradients of each query's logits with the ends."""
    dk_ends: Tensor
    """(B, N, H, D) float32, rotated."""
    dv_ends: Tensor
    """(B, N, H, D) float32."""


class OpenChunk(NamedTuple):
    """Continued rows: the open chunk that they start from, and gradients, (B, H, D) each."""

    k: Tensor
    """k~ before the first token."""
    v: Tensor
    """v~ before the first token."""
    dk_last: Tensor
    """The gradient of k~ at the last token."""
    dv_last: Tensor
    """The gradient of v~ at the last token."""
    dk_first: Tensor
    """The gradient of `k`, where rows with tokens get theirs."""
    dv_first: Tensor
    """The gradient of `v`."""


class Continued(NamedTuple):
    """The results of rows that continue a state."""

    y: Tensor
    """(B, T, H, D)."""
    k: Tensor
    """(B, H, D): k~ at the last real token."""
    v: Tensor
    """(B, H, D): v~ at the last real token."""
    k_ends: Tensor
    """(B, N + 1, H, D): the slots of all chunks, and an unused one."""
    v_ends: Tensor
    """(B, N + 1, H, D)."""
    lse: Tensor
    """(B, H, T) float32, base 2."""


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
    launch(
        chunk_scan_fwd_kernel, (B * plan.N * sizes.G,),
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
    launch(
        attend_ends_fwd_kernel, (B * H * ceil_div(T, settings["BM"]),),
        rotated_queries(x, plan),
        tiled(scanned.k_ends, settings["BN"]), tiled(scanned.v_ends, settings["BN"]),
        scanned.v_run, scanned.own, x, plan.low, plan.high, plan.starts, y, lse,
        T, x.stride(0), x.stride(1), plan.form.scale * LOG2_E,
        HAS_Z=plan.form.has_z, **settings,
    )  # fmt: skip
    return y, lse


def ends_bwd(dy: Tensor, saved: Saved | SavedContinued, plan: Plan) -> EndsGradients:
    """Compute the gradients through the output gate and the attention to the ends."""
    x, y, lse, k_ends, v_ends = saved.x, saved.y, saved.lse, saved.k_ends, saved.v_ends
    sizes, N = plan.sizes, k_ends.shape[1]
    B, T, H, G, D = sizes.B, sizes.T, sizes.H, sizes.G, sizes.D
    dy = dy.contiguous()
    # The scan skips the padding of continued rows, which has no gradient.
    new = torch.zeros if plan.mode == "continued" else torch.empty
    dx = new((B, T, sizes.width), dtype=x.dtype, device=x.device)
    do = torch.empty_like(dy) if sizes.has_z else dy
    delta, ds_past = (torch.empty_like(lse) for _ in range(2))
    dq = torch.empty((B, T, G, D), dtype=torch.float32, device=x.device)
    dk_ends, dv_ends = (torch.empty(k_ends.shape, device=x.device) for _ in range(2))
    q = rotated_queries(x, plan)
    scales = (plan.form.scale, plan.form.scale * LOG2_E)
    rows, BM = B * T * H, max(4096 // D, 1)
    launch(
        output_gate_bwd_kernel, (ceil_div(rows, BM),),
        dy, y, x, dx, do, delta, rows, T, x.stride(0), x.stride(1),
        H=H, D=D, W=sizes.width, BM=BM, HAS_Z=sizes.has_z, num_warps=4,
    )  # fmt: skip
    settings = ends_settings(plan, x.dtype, "dq", N)
    launch(
        attend_ends_dq_kernel, (B * G * ceil_div(T, settings["BM"]),),
        q, *(tiled(e, settings["BN"]) for e in (k_ends, v_ends)), do, lse, delta,
        plan.low, plan.high, plan.starts, dq, ds_past, T, *scales, **settings,
    )  # fmt: skip
    settings = ends_settings(plan, x.dtype, "dkv", N)
    launch(
        attend_ends_dkv_kernel, (B * H * ceil_div(N, settings["BN"]),),
        tiled(q, settings["BM"]), k_ends, v_ends, tiled(do, settings["BM"]), lse, delta,
        plan.low, plan.high, plan.starts, plan.stops, plan.unseen, dk_ends, dv_ends,
        T, N, *scales, **settings,
    )  # fmt: skip
    return EndsGradients(dx, do, delta, dq, ds_past, dk_ends, dv_ends)


def scan_bwd(
    saved: Saved | SavedContinued,
    past: EndsGradients,
    plan: Plan,
    chunk: OpenChunk | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of the projection, (B, T, W), and that of the bias in parts, (·, H, D).

    Args:
        saved: what the forward has saved.
        past: its `dk_ends` and `dv_ends` are those of this call's chunks.
        plan: that of the forward.
        chunk: for continued rows; the gradients of its k and v are written into it.
    """
    x, bias, lse, sizes = saved.x, saved.gate_bias, saved.lse, plan.sizes
    k0, v0, dk_last, dv_last, dk0, dv0 = chunk or (None,) * 6
    p_own, ds_own = (torch.empty_like(lse) for _ in range(2))
    dq = turn(past.dq, plan.q_places, plan, torch.float32, inverse=True)
    dk_ends = turn(past.dk_ends, plan.k_places, plan, torch.float32, inverse=True)
    chunks = sizes.B * plan.N
    programs = bias_parts(chunks)
    dbias = None if bias is None else torch.empty((programs, sizes.H, sizes.D), device=x.device)
    launch(
        chunk_scan_bwd_kernel, (programs * sizes.G,),
        x, bias, k0, v0, plan.starts, plan.stops, past.do, lse, past.delta, dq, past.ds_past,
        dk_ends, past.dv_ends, dk_last, dv_last, p_own, ds_own, past.dx, dbias, dk0, dv0,
        sizes.T, plan.N, chunks, programs, x.stride(0), x.stride(1),
        plan.form.scale, plan.form.scale * LOG2_E, W=sizes.width, **scan_settings(plan),
    )  # fmt: skip
    return past.dx, dbias


def attend_continued(x: Tensor, bias: Tensor | None, state: RATState, plan: Plan) -> Continued:
    """Continue a state, which must have a slot for every chunk that these tokens reach."""
    scanned = scan_chunks(x, bias, plan, state.k, state.v)
    B, num_slots = state.k_ends.shape[:2]
    slots = _slots(plan, num_slots)
    # Slots of chunks that a row has not begun may hold NaN, and attention multiplies them by 0.
    begins = torch.arange(num_slots + 1, device=x.device) * plan.form.chunk_size
    unread = begins >= state.lengths[:, None]
    ends = []
    for old, new in ((state.k_ends, scanned.k_ends), (state.v_ends, scanned.v_ends)):
        grown = torch.cat([old, old.new_zeros(B, 1, *old.shape[2:])], dim=1)
        grown.masked_fill_(unread[..., None, None], 0)
        ends.append(grown.scatter_(1, slots.expand_as(new), new))
    k_ends, v_ends = ends
    y, lse = attend_ends(x, scanned._replace(k_ends=k_ends, v_ends=v_ends), plan)
    assert scanned.k_last is not None
    assert scanned.v_last is not None
    return Continued(y, scanned.k_last, scanned.v_last, k_ends, v_ends, lse)


def attend_continued_bwd(
    pulled: Pulled, saved: SavedContinued, plan: Plan
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the projection, the bias, and the old k, v, k_ends and v_ends.

    Args:
        pulled: those of `Continued`.
        saved: what the forward has saved.
        plan: that of the forward.
    """
    past = ends_bwd(pulled.dy, saved, plan)
    num_slots = saved.k_ends.shape[1] - 1
    index = _slots(plan, num_slots).expand(-1, -1, *saved.k_ends.shape[2:])
    new = []
    for total, given in ((past.dk_ends, pulled.dk_ends), (past.dv_ends, pulled.dv_ends)):
        if given is not None:
            total += given
        new.append(total.gather(1, index))
        total.scatter_(1, index, 0.0)  # the old ends of these chunks were overwritten
    # A row without tokens passes its open chunk on.
    dk, dv = pulled.dk, pulled.dv
    chunk = OpenChunk(saved.k, saved.v, dk, dv, dk.clone(), dv.clone())
    dx, dbias = scan_bwd(saved, past._replace(dk_ends=new[0], dv_ends=new[1]), plan, chunk)
    ends, dtype = (past.dk_ends, past.dv_ends), saved.k_ends.dtype
    dk_old, dv_old = (d[:, :num_slots].to(dtype).contiguous() for d in ends)
    if dbias is not None and saved.gate_bias is not None:
        dbias = dbias.sum(0).to(saved.gate_bias.dtype)
    return dx, dbias, chunk.dk_first, chunk.dv_first, dk_old, dv_old


def _slots(plan: Plan, num_slots: int) -> Tensor:
    """Return the slot of each chunk of this call, (B, N, 1, 1), or `num_slots` if it got no token.

    So chunks without tokens are written to an extra slot at the end, which is not read.
    """
    seen, added, L = plan.starts, plan.stops, plan.form.chunk_size
    assert seen is not None
    assert added is not None
    slot = (seen // L)[:, None] + torch.arange(plan.N, device=seen.device)
    first = (slot * L - seen[:, None]).clamp(min=0)
    return torch.where(first < added[:, None], slot, num_slots)[..., None, None]


def turn(
    x: Tensor, places: Tensor, plan: Plan, dtype: torch.dtype, *, inverse: bool = False
) -> Tensor:
    """Rotate x by the plan's angles, if it has any, or rotate it back.

    Args:
        x: (B, T, H, D). The heads of a token must be adjacent in memory; rows and tokens may have
            any stride.
        places: (1 or B, T) int32, the row of `plan.angles` for each token.
        plan: it has the angles.
        dtype: of the result.
        inverse: rotate back.

    Returns:
        (B, T, H, D), contiguous.
    """
    if plan.angles is None:
        return x.to(dtype).contiguous()
    B, T, H, D = x.shape
    y = torch.empty((B, T, H, D), dtype=dtype, device=x.device)
    rows, BM = B * T * H, max(4096 // D, 1)
    if rows:
        launch(
            rotate_kernel, (ceil_div(rows, BM),),
            x, y, places, *plan.angles, rows, T, x.stride(0), x.stride(1),
            places.stride(0) if places.shape[0] > 1 else 0,
            H=H, D=D, INVERSE=inverse, BM=BM, num_warps=4,
        )  # fmt: skip
    return y


def rotated_queries(x: Tensor, plan: Plan) -> Tensor:
    """Return the rotated queries (B, T, G, D) of a projection, contiguous."""
    start = plan.sizes.offsets["OQ"]
    G, D = plan.sizes.G, plan.sizes.D
    q = x[..., start : start + G * D].unflatten(-1, (G, D))
    return turn(q, plan.q_places, plan, x.dtype)


def scan_settings(plan: Plan) -> dict[str, Any]:
    """Return the constants of the scan's kernels."""
    sizes = plan.sizes
    H, G, D = sizes.H, sizes.G, sizes.D
    BR = next_power_of_2(H // G)
    # At least two warps: with one, the LLVM inside Triton 3.6 aborts on a tile of 4 by 128.
    return {
        "L": plan.form.chunk_size, "G": G, "R": H // G, "D": D, "BR": BR,
        "MODE": plan.mode, "num_warps": min(max(BR * D // 512, 2), 8), **sizes.offsets,
    }  # fmt: skip


def ends_settings(
    plan: Plan, dtype: torch.dtype, kernel: Literal["fwd", "dq", "dkv"], num_ends: int
) -> dict[str, Any]:
    """Return the constants of one kernel of the attention to `num_ends` ends a row."""
    sizes = plan.sizes
    tiles = (TILES_FEW if num_ends <= FEW_ENDS else TILES_MANY)[kernel]
    width = next(width for width in tiles if width >= sizes.D)
    fit = TILES_FLOAT32 if dtype == torch.float32 else tiles[width]
    BM, BN, num_warps, num_stages = fit
    return {
        "L": plan.form.chunk_size, "G": sizes.G, "H": sizes.H, "D": sizes.D, "BM": BM, "BN": BN,
        "MODE": plan.mode, "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": num_warps, "num_stages": num_stages,
    }  # fmt: skip


def tiled(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe x (B, T, H, D), contiguous, for loads of one head of `rows` tokens."""
    B, T, H, D = x.shape
    if x.data_ptr() % 16:  # bulk copies need this alignment; a part of a wider gradient may lack it
        x = x.clone()
    return TensorDescriptor(x, [B, T, H * D], [T * H * D, H * D, 1], [1, rows, D])
