"""ABC, token by token: the definition (section 2.2 of the GSA paper, in two readings)."""

from functools import partial

import torch
from torch import Tensor

from mezzo_gsa.ops.abc.state import ABCState
from mezzo_gsa.ops.abc.strengths import Reading, gates_and_strengths
from mezzo_gsa.ops.gla.reference import run_tokens
from mezzo_gsa.ops.gsa.arguments import GSAState
from mezzo_gsa.ops.gsa.reference import gsa_step


def recurrent_abc_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    scale: float,
    reading: Reading,
    initial_state: ABCState,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, ABCState]:
    """Run the recurrence. Arguments are as in `recurrent_abc`, with s and the state in float32."""
    step = partial(abc_step, scale=scale, reading=reading)
    return run_tokens(step, (q, k, v, s), initial_state, cu_seqlens)


def abc_step(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, scale: float, reading: Reading, state: ABCState
) -> tuple[Tensor, ABCState]:
    """Process one token by equations 3 and 4, or by the average that the program keeps.

    The shapes are q (B, HQ, K), k (B, H, K), v (B, H, V), s (B, H, M).

    Returns:
        o (B, HQ, V) in the state's dtype, and the next state.
    """
    z = torch.logaddexp(state.z, s)
    g, write = gates_and_strengths(s, state.z, z, reading)
    g = torch.zeros_like(s) if g is None else g
    write = -torch.expm1(g) if write is None else write
    memory = GSAState(state.k, state.v)
    out, after = gsa_step(q, k, v, g, write, scale, "softmax", memory)
    return out, ABCState(*after, z)
