"""One decoding step of ABC, in place."""

import torch
from jaxtyping import Float
from mezzo_core.ops.checks import check_floating, check_no_gradients
from mezzo_core.ops.impl import Impl
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_gsa.ops.abc.state import ABCState, shapes_of
from mezzo_gsa.ops.abc.strengths import Reading, check_reading, gates_and_strengths
from mezzo_gsa.ops.decoding.checks import check_memory, check_parts
from mezzo_gsa.ops.gsa.arguments import GSAState, check_inputs
from mezzo_gsa.ops.gsa.step import step_gsa_


def step_abc_(
    q: Float[Tensor, "B HQ K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H V"],
    s: Float[Tensor, "B H M"],
    state: ABCState,
    *,
    reading: Reading = "text",
    scale: float = 1.0,
    impl: Impl = "auto",
) -> Float[Tensor, "B HQ V"]:
    """Process one token of every row, and overwrite the state with the state after it.

    This equals `recurrent_abc` with T = 1; the arguments have no axis of tokens. It has no
    gradients, never waits for the GPU, and can be captured in a CUDA graph.

    The state is float32 (float64 for float64 inputs), and `impl` is as in `step_gsa_`. The other
    arguments and the errors are those of `chunk_abc`; also a RuntimeError if a gradient would be
    needed.
    """
    op = "step_abc_"
    check_floating(op, "s", s)
    check_inputs(op, q, k, v, None, s, scale, "softmax", sizes="(B, HQ, K)")
    check_reading(op, reading)
    check_parts(op, "state", state, ABCState, shapes_of(s.shape, k, v), q, check_memory)
    check_no_gradients(op, q, k, v, s, *state)
    s = s.to(accumulation_dtype(q.dtype))
    z = torch.logaddexp(state.z, s)
    gates = gates_and_strengths(s, state.z, z, reading)
    out = step_gsa_(q, k, v, *gates, GSAState(state.k, state.v), scale=scale, impl=impl)
    state.z.copy_(z)
    return out
