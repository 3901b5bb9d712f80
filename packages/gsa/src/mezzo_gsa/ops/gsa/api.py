"""The public ops of gated slot attention.

They check their arguments, fill in defaults, and choose an implementation.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from mezzo_core.ops.checks import check_floating
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor
from torch.nn import functional as F

from mezzo_gsa.ops.eager.op import EagerForm, eager_op
from mezzo_gsa.ops.gates.elementwise import log_gate
from mezzo_gsa.ops.gsa.between import Between
from mezzo_gsa.ops.gsa.checks import check_inputs, check_projection, check_state, unsupported
from mezzo_gsa.ops.gsa.chunked import chunked_gsa
from mezzo_gsa.ops.gsa.form import Form, Keep
from mezzo_gsa.ops.gsa.op import differentiable_gsa, differentiable_gsa_projected
from mezzo_gsa.ops.gsa.projection import Projection
from mezzo_gsa.ops.gsa.reference import recurrent_gsa_reference
from mezzo_gsa.ops.gsa.state import GSAOutput, GSAState


def recurrent_gsa(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H M"] | None = None,
    s: Float[Tensor, "B T H M"] | None = None,
    *,
    scale: float = 1.0,
    between: Between = "softmax",
    initial_state: GSAState | None = None,
    cu_seqlens: Int[Tensor, "borders"] | None = None,
) -> GSAOutput:
    """Compute gated slot attention token by token, as it is defined (GSA paper, section 3.1).

    For each head, with α = exp(g), and with the slots as rows of the two memories K~ and V~:

        K~[t] = Diag(α[t]) K~[t-1] + s[t] ⊗ k[t]
        V~[t] = Diag(α[t]) V~[t-1] + s[t] ⊗ v[t]        o[t] = V~[t]ᵀ between(scale K~[t] q[t])

    Arguments, results and errors are those of `chunk_gsa`. Use `chunk_gsa` for training.
    """
    _check("recurrent_gsa", q, k, v, g, s, scale, between, initial_state, cu_seqlens)
    g, s, state = _fill_in(q, k, v, g, s, initial_state, cu_seqlens)
    out, *last = _recurrent([q, k, v, g, s], [*state], cu_seqlens, scale, between)
    return GSAOutput(out, GSAState(*last))


def chunk_gsa(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H M"] | None = None,
    s: Float[Tensor, "B T H M"] | None = None,
    *,
    scale: float = 1.0,
    between: Between = "softmax",
    initial_state: GSAState | None = None,
    cu_seqlens: Int[Tensor, "borders"] | None = None,
    keep_states: bool = False,
    impl: Impl = "auto",
) -> GSAOutput:
    """Compute gated slot attention by chunks, for training and prefill (GSA paper, algorithm 1).

    It equals `recurrent_gsa` for any gates. Differentiable in q, k, v, g, s and the initial state,
    through both results; there is no double backward.

    NaN and infinities at a token change no earlier token, no other row and no other packed
    sequence; but on a GPU they may change earlier tokens of the same chunk.

    Kernels keep the memories between chunks in the dtype of q. If little decays, large strengths s
    make large memories, and with 16 bits their rounding costs digits of the gradients.

    Args:
        q: (B, T, HQ, K) queries; query head h uses head h // (HQ // H).
        k: (B, T, H, K) keys.
        v: (B, T, H, V) values.
        g: (B, T, H, M) log of the forget gate, at most 0, float32 (other dtypes are converted);
            None: nothing decays, and s must be given.
        s: (B, T, H, M) write strength; None: 1 - exp(g). A token with g = 0 and without s leaves
            the memories as they are.
        scale: multiplies q; any finite number.
        between: the function that makes the weights of the slots from K~ q. "softmax" is GSA; the
            others are the paper's ablation (Table 2).
        initial_state: K~ and V~ before the first token, (B, H, M, K) and (B, H, M, V), with S in
            place of B when packed. None: zeros.
        cu_seqlens: (S + 1,) int32 or int64 borders of S sequences packed in one row (B = 1). They
            start at 0, end at T and never decrease. Their values are checked on the CPU only.
        keep_states: save the memories at the chunks' borders for the backward, which otherwise
            computes them again. This is faster, but each chunk and head needs 2 M (K + V) more
            bytes (in bfloat16).
        impl: "auto", "reference" or "triton". Triton supports float32, bfloat16 and float16, M up
            to 128 (64 for float16 on a GPU), and K and V up to 512.

    Returns:
        out: (B, T, HQ, V) in the dtype of q. final_state: float32 (float64 for float64).

    Raises:
        TypeError: if an argument or a tensor's dtype is not of the kinds above.
        ValueError: if a shape, a device, `scale`, `between`, `cu_seqlens` or `impl` is not as
            above, or neither g nor s is given.
    """
    _check("chunk_gsa", q, k, v, g, s, scale, between, initial_state, cu_seqlens)
    gates = s if g is None else g
    assert gates is not None
    sizes = gates.shape[3], k.shape[3], v.shape[3]
    no = unsupported(q.dtype, q.shape[:2], *sizes, on_gpu=q.is_cuda)
    if resolve_impl("chunk_gsa", impl, q.device, no) == "reference":
        g, s, state = _fill_in(q, k, v, g, s, initial_state, cu_seqlens)
        out, *last = _chunked([q, k, v, g, s], [*state], cu_seqlens, scale, between)
        return GSAOutput(out, GSAState(*last))
    g = torch.zeros_like(gates, dtype=torch.float32) if g is None else g.float()
    s = None if s is None else s.float()
    first = (None, None) if initial_state is None else tuple(h.float() for h in initial_state)
    form = Form(scale, between, None, False, _kept(keep_states, q, k, v, g, s, *first))
    out, k_last, v_last, *_ = differentiable_gsa(q, k, v, g, s, *first, cu_seqlens, *form)
    return GSAOutput(out, GSAState(k_last, v_last))


def chunk_gsa_projected(
    x: Float[Tensor, "B T W"],
    *,
    num_heads: int,
    num_kv_heads: int,
    num_slots: int,
    damping: float = 8.0,
    scale: float = 1.0,
    between: Between = "softmax",
    swish: bool = True,
    initial_state: GSAState | None = None,
    cu_seqlens: Int[Tensor, "borders"] | None = None,
    keep_states: bool = False,
    impl: Impl = "auto",
) -> GSAOutput:
    """Compute `chunk_gsa` directly from the output of one projection, which gets one gradient.

    x has q, k, v and the gate's logits side by side. The result is that of
    `chunk_gsa(swish(q), swish(k), swish(v), logsigmoid(logits) / damping)`. The kernels compute the
    gate while they load its logits.

    Args:
        x: (B, T, W), W = (HQ + 2 H) D + H M: q, k, v of heads of D channels, and H·M logits.
        num_heads: HQ.
        num_kv_heads: H, which divides HQ.
        num_slots: M.
        damping: τ, which divides the log of the gate.
        scale: see `chunk_gsa`.
        between: see `chunk_gsa`.
        swish: whether swish is applied to q, k and v.
        initial_state: see `chunk_gsa`.
        cu_seqlens: see `chunk_gsa`.
        keep_states: see `chunk_gsa`.
        impl: see `chunk_gsa`.

    Returns:
        out (B, T, HQ, D) and the final state.

    Raises:
        TypeError: as `chunk_gsa`; also if a number of heads or slots is not an int.
        ValueError: as `chunk_gsa`; also if W does not fit the heads, or a number of heads or slots
            or the damping is not positive.
    """
    check_floating("chunk_gsa_projected", "x", x)
    check_projection(
        "chunk_gsa_projected",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_slots=num_slots,
        damping=damping,
    )
    heads = num_heads + 2 * num_kv_heads
    width = x.shape[-1] - num_kv_heads * num_slots if x.ndim == 3 else 0
    if width < heads or width % heads:
        raise ValueError(
            "chunk_gsa_projected: x must be (B, T, W) with W = "
            f"({num_heads} + 2 · {num_kv_heads}) D + {num_kv_heads} · {num_slots}, "
            f"got {tuple(x.shape)}"
        )
    projection = Projection(num_heads, num_kv_heads, num_slots)
    q, k, v, logits = projection.split(x)
    _check("chunk_gsa_projected", q, k, v, logits, None, scale, between, initial_state, cu_seqlens)
    D = q.shape[3]
    no = unsupported(x.dtype, x.shape[:2], num_slots, D, D, on_gpu=x.is_cuda)
    if resolve_impl("chunk_gsa_projected", impl, x.device, no) == "reference":
        if swish:
            q, k, v = (F.silu(part) for part in (q, k, v))
        return chunk_gsa(
            q, k, v, log_gate(logits, damping), scale=scale, between=between,
            initial_state=initial_state, cu_seqlens=cu_seqlens, impl="reference",
        )  # fmt: skip
    first = (None, None) if initial_state is None else tuple(h.float() for h in initial_state)
    form = Form(scale, between, damping, swish, _kept(keep_states, x, *first))
    out, k_last, v_last, *_ = differentiable_gsa_projected(
        x, *first, cu_seqlens, *projection, *form
    )
    return GSAOutput(out, GSAState(k_last, v_last))


def _check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    s: Tensor | None,
    scale: float,
    between: str,
    initial_state: GSAState | None,
    cu_seqlens: Tensor | None,
) -> None:
    check_inputs(op, q, k, v, g, s, scale, between, sizes="(B, T, HQ, K)")
    H, M = (g if g is not None else s).shape[2:]  # type: ignore[union-attr]
    check_state(op, initial_state, q, cu_seqlens, (H, M, k.shape[3], v.shape[3]))


def _fill_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    s: Tensor | None,
    initial_state: GSAState | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, GSAState]:
    """Return g, s and the initial state in the reference's precision, with defaults filled in."""
    dtype = accumulation_dtype(q.dtype)
    if g is None:
        assert s is not None
        g = torch.zeros_like(s)
    g = g.to(dtype)
    s = -torch.expm1(g) if s is None else s.to(dtype)
    if initial_state is not None:
        return g, s, GSAState(*(x.to(dtype) for x in initial_state))
    S = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    H, M = g.shape[2:]
    return g, s, GSAState(*(x.new_zeros(S, H, M, x.shape[3], dtype=dtype) for x in (k, v)))


def _eager(name: str, compute: Callable[..., tuple[Tensor, GSAState]]) -> EagerForm:
    """Register a form in eager PyTorch by `eager_op`, and adapt its arguments to it."""

    def run(
        inputs: list[Tensor],
        states: list[Tensor],
        cu_seqlens: Tensor | None,
        scale: float,
        between: str,
    ) -> list[Tensor]:
        out, last = compute(*inputs, scale, between, GSAState(*states), cu_seqlens)
        return [out, *last]

    return eager_op(name, run)


_recurrent = _eager("recurrent_gsa", recurrent_gsa_reference)
_chunked = _eager("chunk_gsa", chunked_gsa)


def _kept(keep_states: bool, *tensors: Tensor | None) -> Keep:
    """Return what the forward must save: nothing, if no gradient is needed."""
    if not torch.is_grad_enabled() or all(x is None or not x.requires_grad for x in tensors):
        return "nothing"
    return "states" if keep_states else "weights"
