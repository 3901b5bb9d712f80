"""The definition of RAT attention, a loop over tokens (the paper's equation 3 and Listing 2)."""

import torch
from torch import Tensor

from mezzo_rat.ops.divide import floor_divide
from mezzo_rat.ops.rat_attention.arguments import Form
from mezzo_rat.ops.rat_attention.state import RATState


def recurrent_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    write: Tensor,
    form: Form,
    state: RATState,
    lengths: Tensor | None,
) -> tuple[Tensor, RATState]:
    """Run one token after another.

    Args:
        q: (B, T, G, D) queries; head h = r G + j reads group j.
        k: (B, T, G, D) keys.
        v: (B, T, H, D) values.
        keep: (B, T, H, D) forget gates.
        write: (B, T, H, D), 1 - keep.
        form: everything else.
        state: it must have a slot for every chunk that these tokens reach.
        lengths: (B,) real tokens of each row, or None if all are.

    Returns:
        y (B, T, H, D), before the output gate, and the state after the last real token.
    """
    R, L = v.shape[2] // q.shape[2], form.chunk_size
    outputs = []
    for t in range(v.shape[1]):
        n = floor_divide(state.lengths, L)
        opens = (state.lengths % L == 0)[:, None, None]
        # The R heads of a group share a key but have their own gates, so each has its own k~.
        k_run = keep[:, t] * state.k.masked_fill(opens, 0.0) + write[:, t] * k[:, t].repeat(1, R, 1)
        v_run = keep[:, t] * state.v.masked_fill(opens, 0.0) + write[:, t] * v[:, t]
        q_t, k_t = q[:, t, None].repeat(1, 1, R, 1), k_run[:, None]
        q_t, k_t = (form.rotate(x, n[:, None], state.lengths[:, None]) for x in (q_t, k_t))
        # The slot of the open chunk holds its k~ and v~ so far, so it needs no special case.
        slot = n[:, None, None, None].expand(-1, 1, *v.shape[2:])
        k_ends = state.k_ends.scatter(1, slot, k_t.to(k.dtype))
        v_ends = state.v_ends.scatter(1, slot, v_run[:, None].to(v.dtype))
        logits = torch.einsum("bthd,bnhd->bhn", *widened(q_t, k_ends))
        logits = logits.to(k_run.dtype) * form.scale
        future = torch.arange(k_ends.shape[1], device=v.device) > n[:, None]
        weights = logits.masked_fill(future[:, None], float("-inf")).softmax(-1)
        seen = v_ends.masked_fill(future[..., None, None], 0.0)  # 0 times NaN would be NaN
        outputs.append(torch.einsum("bhn,bnhd->bhd", weights.to(v.dtype), seen))
        after = RATState(k_run, v_run, k_ends, v_ends, state.lengths + 1)
        state = after if lengths is None else _where(t < lengths, after, state)
    return torch.stack(outputs, dim=1), state


def widened(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k in float32 where they are float16, whose product could overflow there."""
    return (q.float(), k.float()) if q.dtype == torch.float16 else (q, k)


def _where(row: Tensor, after: RATState, before: RATState) -> RATState:
    """Take the rows of `after` where `row` (B,) is true, else those of `before`."""
    return RATState(
        *(
            new.where(row.view(-1, *[1] * (new.ndim - 1)), old)
            for new, old in zip(after, before, strict=True)
        )
    )
