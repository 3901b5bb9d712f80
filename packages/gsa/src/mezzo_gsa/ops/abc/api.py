"""The public ops of ABC: from raw scores to GSA's form by chunks, which has the kernels."""

from jaxtyping import Float, Int
from mezzo_core.ops.checks import check_floating
from mezzo_core.ops.impl import Impl
from mezzo_core.ops.packed import check_borders, count_sequences
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_gsa.ops.abc.reference import recurrent_abc_reference
from mezzo_gsa.ops.abc.state import ABCOutput, ABCState, shapes_of
from mezzo_gsa.ops.abc.strengths import Reading, check_reading, gates_and_strengths, running_lse
from mezzo_gsa.ops.decoding.checks import check_parts
from mezzo_gsa.ops.eager.op import eager_op
from mezzo_gsa.ops.gsa.api import chunk_gsa
from mezzo_gsa.ops.gsa.arguments import GSAState, check_inputs


def recurrent_abc(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    s: Float[Tensor, "B T H M"],
    *,
    reading: Reading = "text",
    scale: float = 1.0,
    initial_state: ABCState | None = None,
    cu_seqlens: Int[Tensor, "borders"] | None = None,
) -> ABCOutput:
    """Compute ABC token by token, as it is defined (GSA paper, section 2.2).

    For each head and slot, with z[t] = log Σ_{j≤t} exp(s[j]):

        text:  K~[t] = K~[t-1] + φ[t] ⊗ k[t],                φ[t] = exp(s[t] - z[t])
        code:  K~[t] = α[t] K~[t-1] + (1 - α[t]) ⊗ k[t],     α[t] = exp(z[t-1] - z[t])

    V~ likewise, and o[t] = V~[t]ᵀ softmax(scale K~[t] q[t]).

    Arguments, results and errors are those of `chunk_abc`. Use `chunk_abc` for training.
    """
    s, state = _prepare("recurrent_abc", q, k, v, s, reading, scale, initial_state, cu_seqlens)
    out, *last = _recurrent([q, k, v, s], [*state], cu_seqlens, scale, reading)
    return ABCOutput(out, ABCState(*last))


def chunk_abc(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    s: Float[Tensor, "B T H M"],
    *,
    reading: Reading = "text",
    scale: float = 1.0,
    initial_state: ABCState | None = None,
    cu_seqlens: Int[Tensor, "borders"] | None = None,
    impl: Impl = "auto",
) -> ABCOutput:
    """Compute ABC from raw scores by chunks, for training and prefill.

    It equals `recurrent_abc`: `chunk_gsa` with the gates and strengths that follow from the scores.
    Differentiable in q, k, v, s and the initial state, through both results.

    Args:
        q: (B, T, HQ, K) queries; query head h uses head h // (HQ // H).
        k: (B, T, H, K) keys.
        v: (B, T, H, V) values.
        s: (B, T, H, M) raw scores, the logs of the weights α in equation 4; any size, used in
            float32. A token whose scores are -inf leaves the state as it is.
        reading: "text" is the paper's equations 3 and 4: slots sum what is written. "code" is its
            authors' program: slots average what is written, weighted by exp(s).
        scale: multiplies q; the paper has none, its authors' program K^-1/2.
        initial_state: the state before the first token, with S in place of B when packed. None: no
            token yet.
        cu_seqlens: (S + 1,) borders of packed sequences; see `chunk_gsa`.
        impl: see `chunk_gsa`.

    Returns:
        out: (B, T, HQ, V) in the dtype of q. final_state: float32 (float64 for float64).

    Raises:
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, `reading`, `scale`, `cu_seqlens` or `impl` is wrong.
    """
    s, state = _prepare("chunk_abc", q, k, v, s, reading, scale, initial_state, cu_seqlens)
    before, z, last = running_lse(s, state.z, cu_seqlens)
    gates = gates_and_strengths(s, before, z, reading)
    memory = None if initial_state is None else GSAState(state.k, state.v)
    out, after = chunk_gsa(
        q, k, v, *gates, scale=scale, initial_state=memory, cu_seqlens=cu_seqlens, impl=impl
    )
    return ABCOutput(out, ABCState(*after, last))


def _prepare(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    reading: Reading,
    scale: float,
    initial_state: ABCState | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, ABCState]:
    """Check the arguments; return s and the first state in float32 (float64 for float64)."""
    check_floating(op, "s", s)
    check_inputs(op, q, k, v, None, s, scale, "softmax", sizes="(B, T, HQ, K)")
    check_reading(op, reading)
    S = count_sequences(op, cu_seqlens, q)
    if cu_seqlens is not None:
        check_borders(op, cu_seqlens, q.shape[1])
    slots, dtype = (S, *s.shape[2:]), accumulation_dtype(q.dtype)
    s = _detach_minus_infinity(s.to(dtype))
    if initial_state is None:
        k0, v0 = (x.new_zeros(*slots, x.shape[3], dtype=dtype) for x in (k, v))
        return s, ABCState(k0, v0, s.new_full(slots, float("-inf"), dtype=dtype))
    check_parts(op, "initial_state", initial_state, ABCState, shapes_of(slots, k, v), q)
    k0, v0, z0 = (x.to(dtype) for x in initial_state)
    return s, ABCState(k0, v0, _detach_minus_infinity(z0))


def _detach_minus_infinity(scores: Tensor) -> Tensor:
    """Give scores of -inf no gradient: that of an empty sum would be NaN."""
    return scores.masked_fill(scores == float("-inf"), float("-inf"))


_recurrent = eager_op("recurrent_abc", recurrent_abc_reference, ABCState)
