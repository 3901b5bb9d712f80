"""The public ops of gated linear attention: they check arguments and choose an implementation."""

from typing import NamedTuple

from jaxtyping import Float, Int
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.packed import check_cu_seqlens
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_gsa.ops.decoding.checks import check_state
from mezzo_gsa.ops.eager.op import eager_op
from mezzo_gsa.ops.gla.arguments import check_inputs, unsupported
from mezzo_gsa.ops.gla.chunked import chunk_gla_reference
from mezzo_gsa.ops.gla.op import differentiable_gla
from mezzo_gsa.ops.gla.reference import recurrent_gla_reference


class GLAOutput(NamedTuple):
    """What `chunk_gla` and `recurrent_gla` return."""

    out: Float[Tensor, "B T HQ V"]
    final_state: Float[Tensor, "S H K V"]


def recurrent_gla(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K_or_1"],
    *,
    scale: float = 1.0,
    initial_state: Float[Tensor, "S H K V"] | None = None,
    cu_seqlens: Int[Tensor, "borders"] | None = None,
) -> GLAOutput:
    """Compute gated linear attention token by token, as it is defined (GSA paper, section 2.3).

    For each head, with S (K, V) and α = exp(g):

        S[t] = Diag(α[t]) S[t-1] + k[t] ⊗ v[t]        o[t] = scale S[t]ᵀ q[t]

    Arguments, results and errors are those of `chunk_gla`. Use `chunk_gla` for training.
    """
    g, state = _prepare("recurrent_gla", q, k, v, g, scale, initial_state, cu_seqlens)
    state = _zeros(k, v, g, cu_seqlens) if state is None else state
    return GLAOutput(*_recurrent([q, k, v, g], [state], cu_seqlens, scale, ""))


def chunk_gla(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K_or_1"],
    *,
    scale: float = 1.0,
    initial_state: Float[Tensor, "S H K V"] | None = None,
    cu_seqlens: Int[Tensor, "borders"] | None = None,
    impl: Impl = "auto",
) -> GLAOutput:
    """Compute gated linear attention by chunks, for training and prefill.

    It equals `recurrent_gla` for any gates, -inf included. Differentiable in q, k, v, g and the
    initial state, through both results; the kernels have no double backward.

    NaN and infinities at a token change no earlier token, no other row and no other packed
    sequence; but on a GPU they may change earlier tokens of the same chunk.

    Args:
        q: (B, T, HQ, K) queries; query head h uses head h // (HQ // H).
        k: (B, T, H, K) keys, in the dtype of q.
        v: (B, T, H, V) values, likewise.
        g: (B, T, H, K), the log of the forget gate of each key channel, or (B, T, H, 1), that of
            each head; at most 0, float32 (other dtypes are converted). A token with g = 0 and
            k = 0 leaves the state as it is.
        scale: multiplies q; any finite number.
        initial_state: S before the first token, (B, H, K, V), or (S, H, K, V) when packed. None:
            zeros.
        cu_seqlens: (S + 1,) int32 or int64 borders of S sequences packed in one row (B = 1). They
            start at 0, end at T and never decrease. Their values are checked on the CPU only.
        impl: "auto", "reference" or "triton". Triton supports float32, bfloat16 and float16, K up
            to 512 and V up to 1024.

    Returns:
        out: (B, T, HQ, V) in the dtype of q, so infinite in float16 where it exceeds 65,504.
        final_state: the state after each sequence's last token, float32 (float64 for float64); a
        sequence without tokens keeps its initial state.

    Raises:
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, `scale`, `cu_seqlens` or `impl` is wrong.
    """
    g, state = _prepare("chunk_gla", q, k, v, g, scale, initial_state, cu_seqlens)
    if resolve_impl("chunk_gla", impl, q.device, unsupported(q, v)) == "triton":
        return GLAOutput(*differentiable_gla(q, k, v, g, state, cu_seqlens, scale))
    state = _zeros(k, v, g, cu_seqlens) if state is None else state
    return GLAOutput(*_chunked([q, k, v, g], [state], cu_seqlens, scale, ""))


def _prepare(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments; return g and the initial state in float32 (float64 for float64)."""
    check_inputs(op, q, k, v, g, scale)
    if cu_seqlens is not None:
        check_cu_seqlens(op, cu_seqlens, q)
    dtype = accumulation_dtype(q.dtype)
    if initial_state is None:
        return g.to(dtype), None
    check_state(op, "initial_state", initial_state, _state_shape(k, v, cu_seqlens), q)
    return g.to(dtype), initial_state.to(dtype)


def _state_shape(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    num_states = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return num_states, k.shape[2], k.shape[3], v.shape[3]


def _zeros(k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the initial state of a call that has none."""
    return g.new_zeros(_state_shape(k, v, cu_seqlens))


_recurrent = eager_op("recurrent_gla", recurrent_gla_reference)
_chunked = eager_op("chunk_gla", chunk_gla_reference)
