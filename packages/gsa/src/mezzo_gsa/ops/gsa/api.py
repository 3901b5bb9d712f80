"""The public ops of gated slot attention.

They check their arguments, fill in defaults, and choose an implementation.
"""

from functools import partial

import torch
from jaxtyping import Float, Int
from mezzo_core.ops.checks import check_floating, check_lengths, check_no_gradients
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.named_tuples import replaced
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor
from torch.nn import functional as F

from mezzo_gsa.ops.eager.op import EagerForm, eager_op
from mezzo_gsa.ops.gates.elementwise import log_gate
from mezzo_gsa.ops.gates.padding import skip_padding
from mezzo_gsa.ops.gsa.arguments import (
    Between,
    Form,
    GSAOutput,
    GSAState,
    Keep,
    StepForm,
    check_inputs,
    check_state,
    split_projection,
    split_step,
    unsupported,
)
from mezzo_gsa.ops.gsa.chunked import chunked_gsa
from mezzo_gsa.ops.gsa.op import differentiable_gsa
from mezzo_gsa.ops.gsa.reference import recurrent_gsa_reference
from mezzo_gsa.ops.gsa.request import Tensors
from mezzo_gsa.ops.gsa.step import check_projected, gsa_recurrent_projected, unsupported_step
from mezzo_gsa.ops.norms import gated_norm


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
    gates = check_inputs("recurrent_gsa", q, k, v, g, s, scale, between)
    check_state("recurrent_gsa", initial_state, q, k, v, gates, cu_seqlens)
    return _by_eager(_recurrent, q, k, v, g, s, scale, between, initial_state, cu_seqlens)


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
    through both results; the kernels have no double backward.

    NaN and infinities at a token change no earlier token, no other row and no other packed
    sequence; but on a GPU they may change earlier tokens of the same chunk.

    Kernels keep the memories between chunks in the dtype of q. If little decays, large strengths s
    make large memories, and with 16 bits their rounding costs digits of the gradients.

    Args:
        q: (B, T, HQ, K) queries; query head h uses head h // (HQ // H).
        k: (B, T, H, K) keys, in the dtype of q.
        v: (B, T, H, V) values, likewise.
        g: (B, T, H, M) log of the forget gate, at most 0, float32 (other dtypes are converted);
            None: nothing decays, and s must be given.
        s: (B, T, H, M) write strength; None: 1 - exp(g). A token with g = 0 and without s leaves
            the memories as they are.
        scale: multiplies q; any finite number.
        between: the function that makes the weights of the slots from K~ q. "softmax" is GSA;
            "none", "swish", "relu" and "relu_squared" are the paper's ablation (Table 2).
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
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, `scale`, `between`, `cu_seqlens` or `impl` is wrong, or
            neither g nor s is given.
    """
    gates = check_inputs("chunk_gsa", q, k, v, g, s, scale, between)
    check_state("chunk_gsa", initial_state, q, k, v, gates, cu_seqlens)
    no = unsupported(q, gates.shape[3], k.shape[3], v.shape[3])
    if resolve_impl("chunk_gsa", impl, q.device, no) == "reference":
        return _by_eager(_chunked, q, k, v, g, s, scale, between, initial_state, cu_seqlens)
    g = torch.zeros_like(gates, dtype=torch.float32) if g is None else g.float()
    s = None if s is None else s.float()
    form = Form(scale, between, "states" if keep_states else "weights")
    return _by_kernels(form, initial_state, cu_seqlens, q=q, k=k, v=v, g=g, s=s)


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
    """Compute `chunk_gsa` directly from the output of one projection; its gradient is one tensor.

    x has q, k, v and the gate's logits side by side. This equals
    `chunk_gsa(swish(q), swish(k), swish(v), logsigmoid(logits) / damping)`. The kernels compute the
    gate while they load its logits.

    x has W = (HQ + 2 H) D + H M channels: HQ = `num_heads` heads of queries, H = `num_kv_heads`
    heads of keys and values (H divides HQ), M = `num_slots` slots. Without `swish`, q, k and v are
    taken as they are. The other arguments, the results and the errors are those of `chunk_gsa`.
    """
    op = "chunk_gsa_projected"
    keep: Keep = "states" if keep_states else "weights"
    form = Form(scale, between, keep, damping, swish, num_heads, num_kv_heads, num_slots)
    q, k, v, logits = split_projection(op, x, form)
    check_inputs(op, q, k, v, logits, None, scale, between)
    check_state(op, initial_state, q, k, v, logits, cu_seqlens)
    no = unsupported(q, num_slots, k.shape[3], v.shape[3])
    if resolve_impl(op, impl, x.device, no) == "triton":
        return _by_kernels(form, initial_state, cu_seqlens, x=x)
    if swish:
        q, k, v = (F.silu(part) for part in (q, k, v))
    g = log_gate(logits, damping)
    return _by_eager(_chunked, q, k, v, g, None, scale, between, initial_state, cu_seqlens)


def recurrent_gsa_projected(
    x: Float[Tensor, "B T W"],
    state: GSAState,
    *,
    num_heads: int,
    damping: float,
    gate_logits: Float[Tensor, "HM"] | None = None,
    norm_weight: Float[Tensor, "C"] | None = None,
    norm_eps: float = 1e-5,
    swish: bool = True,
    scale: float = 1.0,
    between: Between = "softmax",
    lengths: Int[Tensor, "B"] | None = None,
    certain: Int[Tensor, "B"] | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Tensor, "B T C"], GSAState]:
    """Process a few tokens of every row: all operations of a GSA layer between its projections.

    This equals `step_gsa_projected_` for token after token, but the given state stays as it is. It
    has no gradients. On a GPU all tokens are two or three kernels, fewer than in the form by
    chunks, and the memories stay on chip from token to token. But these kernels have no matrix
    products, so this is for a few tokens.

    x has T tokens of each row, at least one. The first `lengths` (B,) int64 of them are real: the
    others change no state, and their y is zero. The new state has read the first `certain` (B,)
    int64, at most `lengths`. None stands for all. The other arguments and the errors are those of
    `step_gsa_projected_`.

    Returns:
        y (B, T, C) in the dtype of x, and the state after the last certain token of each row.
    """
    op, form = "recurrent_gsa_projected", StepForm(scale, between, damping, swish, norm_eps)
    check_floating(op, "x", x)
    if x.ndim != 3 or x.shape[1] == 0:
        raise ValueError(f"{op}: x must be (B, T, W) with T at least 1, got {tuple(x.shape)}")
    check_projected(op, x[:, 0], state, num_heads, gate_logits, norm_weight, form)
    for name, counts in (("lengths", lengths), ("certain", certain)):
        if counts is not None:
            check_lengths(op, counts, x, name)
    check_no_gradients(op, x, gate_logits, norm_weight, *state, because="is for decoding")
    if resolve_impl(op, impl, x.device, unsupported_step(x, state)) == "triton":
        tensors = (x, lengths, certain, gate_logits, norm_weight, *state)
        y, *last = gsa_recurrent_projected(*tensors, num_heads, *form)
        return y, GSAState(*last)
    parts = split_step(x.flatten(0, 1), state, num_heads, gate_logits)
    q, k, v, logits = (part.unflatten(0, x.shape[:2]) for part in parts)
    if swish:
        q, k, v = (F.silu(part) for part in (q, k, v))
    q, k, v, g = skip_padding(lengths, q, k, v, log_gate(logits, damping))
    read = partial(recurrent_gsa, scale=scale, between=between, initial_state=state)
    out, after = read(q, k, v, g)
    (out,) = skip_padding(lengths, out)
    if certain is not None:
        after = read(q, *skip_padding(certain, k, v, g)).final_state
    return gated_norm(out.flatten(2), norm_weight, norm_eps), after


def _by_kernels(
    form: Form, initial_state: GSAState | None, cu_seqlens: Tensor | None, **inputs: Tensor | None
) -> GSAOutput:
    first = (None, None) if initial_state is None else tuple(h.float() for h in initial_state)
    t = Tensors(**inputs, k0=first[0], v0=first[1], cu_seqlens=cu_seqlens)
    if not torch.is_grad_enabled() or all(x is None or not x.requires_grad for x in t):
        form = replaced(form, keep="nothing")
    out, k_last, v_last = differentiable_gsa(*t, *form)
    return GSAOutput(out, GSAState(k_last, v_last))


def _by_eager(
    compute: EagerForm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    s: Tensor | None,
    scale: float,
    between: Between,
    initial_state: GSAState | None,
    cu_seqlens: Tensor | None,
) -> GSAOutput:
    """Compute in the reference's precision, with defaults filled in."""
    dtype = accumulation_dtype(q.dtype)
    if g is None:
        assert s is not None
        g = torch.zeros_like(s)
    g = g.to(dtype)
    s = -torch.expm1(g) if s is None else s.to(dtype)
    S = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        shape = (S, *g.shape[2:])
        states = [x.new_zeros(*shape, x.shape[3], dtype=dtype) for x in (k, v)]
    else:
        states = [x.to(dtype) for x in initial_state]
    out, *last = compute([q, k, v, g, s], states, cu_seqlens, scale, between)
    return GSAOutput(out, GSAState(*last))


_recurrent = eager_op("recurrent_gsa", recurrent_gsa_reference, GSAState)
_chunked = eager_op("chunk_gsa", chunked_gsa, GSAState)
