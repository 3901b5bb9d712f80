"""RAT attention that continues a state, on a GPU: old and new chunks' ends, and their gradients.

The kernels are those of rows that start with their first token. The scan gives the ends of this
call's chunks, which are copied to their slots between the older ones. The backward takes the
gradients of these ends out of the slots again; what remains there goes to the older ends.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mezzo_rat.ops.rat_attention.chunks import Plan
from mezzo_rat.ops.rat_attention.saved import SavedContinued
from mezzo_rat.ops.rat_attention.state import RATState
from mezzo_rat.ops.rat_attention.triton.launches import (
    OpenChunk,
    attend_ends,
    ends_bwd,
    scan_bwd,
    scan_chunks,
)


class Continued(NamedTuple):
    """The results of rows that continue a state."""

    y: Tensor
    """(B, T, H, D)."""
    k: Tensor
    """(B, H, D): k~ at the last real token."""
    v: Tensor
    """(B, H, D): v~ at the last real token."""
    k_ends: Tensor
    """(B, N + 1, H, D): the slots of all chunks, and one that holds nothing."""
    v_ends: Tensor
    """(B, N + 1, H, D)."""
    lse: Tensor
    """(B, H, T) float32, base 2."""


def attend_continued(x: Tensor, bias: Tensor | None, state: RATState, plan: Plan) -> Continued:
    """Continue a state, which must have a slot for every chunk that these tokens reach."""
    scanned = scan_chunks(x, bias, plan, state.k, state.v)
    slots = _slots(plan, state.k_ends.shape[1])
    ends = []
    for old, new in ((state.k_ends, scanned.k_ends), (state.v_ends, scanned.v_ends)):
        grown = torch.cat([old, old.new_zeros(old.shape[0], 1, *old.shape[2:])], dim=1)
        ends.append(grown.scatter_(1, slots.expand_as(new), new))
    k_ends, v_ends = ends
    y, lse = attend_ends(x, scanned._replace(k_ends=k_ends, v_ends=v_ends), plan)
    assert scanned.k_last is not None
    assert scanned.v_last is not None
    return Continued(y, scanned.k_last, scanned.v_last, k_ends, v_ends, lse)


def attend_continued_bwd(
    dy: Tensor,
    dk: Tensor,
    dv: Tensor,
    dk_ends: Tensor | None,
    dv_ends: Tensor | None,
    saved: SavedContinued,
    plan: Plan,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the projection, the bias, and the old k, v, k_ends and v_ends.

    Args:
        dy: gradient of `Continued.y`.
        dk: of `Continued.k`.
        dv: of `Continued.v`.
        dk_ends: of `Continued.k_ends`; None: zeros.
        dv_ends: of `Continued.v_ends`; None: zeros.
        saved: what the forward has saved.
        plan: that of the forward.
    """
    past = ends_bwd(dy, saved, plan)
    num_slots = saved.k_ends.shape[1] - 1
    index = _slots(plan, num_slots).expand(-1, -1, *saved.k_ends.shape[2:])
    new = []
    for total, given in ((past.dk_ends, dk_ends), (past.dv_ends, dv_ends)):
        if given is not None:
            total += given
        new.append(total.gather(1, index))
        total.scatter_(1, index, 0.0)  # the old ends of these chunks were overwritten
    # A row without tokens passes its open chunk on.
    chunk = OpenChunk(saved.k, saved.v, dk, dv, dk.clone(), dv.clone())
    dx, dbias = scan_bwd(saved, past._replace(dk_ends=new[0], dv_ends=new[1]), plan, chunk)
    dk_old, dv_old = (d[:, :num_slots].to(saved.k_ends.dtype) for d in (past.dk_ends, past.dv_ends))
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
