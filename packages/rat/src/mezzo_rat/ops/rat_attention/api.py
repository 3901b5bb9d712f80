"""RAT attention: the public functions, and the choice of an implementation.

The arguments are the logits of the gates, and a rule for RoPE instead of tables. So the kernels
read the projection's output directly, which is half the bytes of float32 gates. They do the rest on
chip, and save nothing of width 2C in float32 for the backward. And 1 - sigmoid(g) can be computed
as sigmoid(-g), which keeps its digits when the gate is near one.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from mezzo_core.ops.checks import check_no_gradients
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.named_tuples import replaced
from mezzo_core.ops.padding import without_padding
from mezzo_core.ops.precision import without_autocast
from torch import Tensor

from mezzo_rat.ops.forget_gate import forget_gate
from mezzo_rat.ops.rat_attention import op as registered
from mezzo_rat.ops.rat_attention.arguments import (
    Parts,
    Request,
    check_request,
    check_state,
    split_projection,
    unsupported,
    unsupported_step,
)
from mezzo_rat.ops.rat_attention.chunked import chunk_reference
from mezzo_rat.ops.rat_attention.reference import recurrent_reference
from mezzo_rat.ops.rat_attention.state import RATState, init_state, reserve


class RATAttentionOutput(NamedTuple):
    """What RAT attention returns."""

    out: Tensor
    """(B, T, H, D) in the dtype of v."""
    final_state: RATState | None
    """The state after the last real token; None if no initial state was given."""


def chunk_rat_attention(
    q: Float[Tensor, "B T G D"],
    k: Float[Tensor, "B T G D"],
    v: Float[Tensor, "B T H D"],
    g: Float[Tensor, "B T H D"],
    *,
    chunk_size: int,
    gate_bias: Float[Tensor, "H D"] | None = None,
    z: Float[Tensor, "B T H D"] | None = None,
    rope: Literal["chunk", "token"] | None = "chunk",
    rope_base: float = 10_000.0,
    scale: float | None = None,
    initial_state: RATState | None = None,
    lengths: Int[Tensor, "B"] | None = None,
    cu_seqlens: Int[Tensor, "borders"] | None = None,
    impl: Impl = "auto",
) -> RATAttentionOutput:
    """Compute a gated recurrence inside chunks of L tokens, and attention over the chunks' ends.

    This is equation 3 of the RAT paper (section 2.3). For token l of chunk n, with the forget gate
    f = sigmoid(g + gate_bias), and with k~ and v~ zero before the start of a chunk:

        k~[n,l] = f[n,l] k~[n,l-1] + (1 - f[n,l]) k[n,l]        (v~ alike, with the same f)
        K = [k~[j,L-1] for j < n ; k~[n,l]]                     (V alike)
        out[n,l] = sigmoid(z[n,l]) softmax(scale q[n,l]·K) V

    RoPE rotates q and k~ after the recurrence. Gates, recurrence and softmax are in float32
    (float64 for float64 inputs); the matrix products of attention are in the dtype of the inputs.
    Any T and L >= 1 work, and a new T compiles nothing. The kernels use no atomics, so repeats are
    equal to the bit. A NaN or an infinity at a token changes no earlier token and no other
    sequence; in the padding it changes nothing. In eager code on a CPU it changes no gradient of
    other packed sequences either; elsewhere it may, as 0 times NaN is NaN.

    Args:
        q: queries of G groups; head h uses group h % G. G divides H.
        k: keys of G groups.
        v: values.
        g: logits of the forget gate.
        chunk_size: L. Chunks are counted from the start of each sequence.
        gate_bias: added to `g` in float32.
        z: logits of the output gate; None means no gate.
        rope: rotate by the index n of the chunk, by the position of the token, or not at all.
        rope_base: base of RoPE's frequencies.
        scale: multiplies the logits; any finite number (the kernels support positive ones).
            D**-0.5 by default.
        initial_state: the state to continue from; its gradients are computed too.
        lengths: int64, how many tokens of each row are real; the rest is padding on the right.
            Needs an initial state.
        cu_seqlens: borders of sequences packed in one row (B = 1, no state). They run from 0 to T
            and never decrease; each sequence begins a new chunk.
        impl: "auto", "reference" or "triton". The kernels support float16, bfloat16 and float32, D
            of 32, 64, 128 or 256, and any L.

    Raises:
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, an option, `lengths`, `cu_seqlens` or `impl` is wrong.
    """
    op = "chunk_rat_attention"
    parts = Parts(z, v, g, q, k)
    request = check_request(
        op, parts, gate_bias, chunk_size, rope, rope_base, scale, initial_state, lengths, cu_seqlens
    )
    if resolve_impl(op, impl, v.device, unsupported(request)) == "triton":
        zvgqk = torch.cat([part.flatten(2) for part in parts if part is not None], dim=-1)
        return _by_kernels(zvgqk, request)
    return _by_reference(request, impl)


def chunk_rat_attention_projected(
    zvgqk: Float[Tensor, "B T W"],
    *,
    num_heads: int,
    num_groups: int,
    chunk_size: int,
    gate_bias: Float[Tensor, "H D"] | None = None,
    rope: Literal["chunk", "token"] | None = "chunk",
    rope_base: float = 10_000.0,
    scale: float | None = None,
    initial_state: RATState | None = None,
    lengths: Int[Tensor, "B"] | None = None,
    cu_seqlens: Int[Tensor, "borders"] | None = None,
    impl: Impl = "auto",
) -> RATAttentionOutput:
    """Compute chunk_rat_attention from the output of one projection; its gradient is one tensor.

    `zvgqk` holds z, v and g of H·D channels each, then q and k of G·D channels each, side by side:
    W = (3 H + 2 G) D. The other arguments and the errors are those of `chunk_rat_attention`.
    """
    op = "chunk_rat_attention_projected"
    parts = split_projection(op, zvgqk, num_heads, num_groups)
    request = check_request(
        op, parts, gate_bias, chunk_size, rope, rope_base, scale, initial_state, lengths, cu_seqlens
    )
    if resolve_impl(op, impl, zvgqk.device, unsupported(request)) == "triton":
        return _by_kernels(zvgqk, request)
    return _by_reference(request, impl)


def recurrent_rat_attention(
    q: Float[Tensor, "B T G D"],
    k: Float[Tensor, "B T G D"],
    v: Float[Tensor, "B T H D"],
    g: Float[Tensor, "B T H D"],
    *,
    chunk_size: int,
    gate_bias: Float[Tensor, "H D"] | None = None,
    z: Float[Tensor, "B T H D"] | None = None,
    rope: Literal["chunk", "token"] | None = "chunk",
    rope_base: float = 10_000.0,
    scale: float | None = None,
    initial_state: RATState | None = None,
    lengths: Int[Tensor, "B"] | None = None,
    impl: Impl = "auto",
) -> RATAttentionOutput:
    """Compute what chunk_rat_attention does, one token at a time (Listing 2 of the paper).

    This is the definition of the op, and with T = 1 a decoding step. Arguments and errors are those
    of `chunk_rat_attention`, but sequences cannot be packed.
    """
    op = "recurrent_rat_attention"
    request = check_request(
        op, Parts(z, v, g, q, k), gate_bias, chunk_size, rope, rope_base, scale, initial_state,
        lengths,
    )  # fmt: skip
    resolve_impl(op, impl, v.device, "a loop over tokens; supported: reference")
    if v.shape[1] == 0:  # there is no step to take; the chunk form's empty results have gradients
        return _by_reference(replaced(request, lengths=None), "reference")
    return _by_steps(request)


def step_rat_attention_(
    zvgqk: Float[Tensor, "B 1 W"],
    state: RATState,
    *,
    num_heads: int,
    num_groups: int,
    chunk_size: int,
    gate_bias: Float[Tensor, "H D"] | None = None,
    rope: Literal["chunk", "token"] | None = "chunk",
    rope_base: float = 10_000.0,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "B 1 H D"]:
    """Decode one token of every row, and overwrite the state with the one after it.

    Arguments are those of `chunk_rat_attention_projected`. The state must be in buffers of its own
    (contiguous ones for the kernels), with a slot for every chunk that the token may close: call
    `reserve` first. The step has no gradients, and can be captured in a CUDA graph. When no slot is
    left, it raises an error on a CPU. On a GPU the check would have to wait, so there it only
    writes nothing out of bounds.

    Raises:
        RuntimeError: if a gradient would be needed.
        ValueError: also if a row has more than one token; on a CPU, if no slot is left.
    """
    op = "step_rat_attention_"
    parts = split_projection(op, zvgqk, num_heads, num_groups)
    request = check_request(op, parts, gate_bias, chunk_size, rope, rope_base, scale)
    check_state(op, "state", state, parts.v, request.form)
    if zvgqk.shape[1] != 1:
        raise ValueError(f"{op}: zvgqk must hold one token of each row, got {zvgqk.shape[1]}")
    check_no_gradients(op, zvgqk, gate_bias, *state)
    request = replaced(request, initial_state=state)
    no = unsupported_step(request, state)
    if resolve_impl(op, impl, zvgqk.device, no) == "triton":
        bias = None if gate_bias is None else gate_bias.contiguous()
        return registered.rat_attention_step_(zvgqk.contiguous(), bias, *state, *request.form)
    y, after = _by_steps(request)
    assert after is not None
    if after.k_ends.shape != state.k_ends.shape:
        raise ValueError(f"{op}: state has no slot left for another token: reserve more")
    for old, new in zip(state, after, strict=True):
        old.copy_(new)
    return y


def _by_steps(r: Request) -> RATAttentionOutput:
    z, v, g, q, k = _real(r.parts, r.lengths)
    B, _, H, D = v.shape
    state = r.initial_state
    if state is None:
        state = init_state(B, H, D, dtype=v.dtype, device=v.device)
    keep, write = forget_gate(g, r.gate_bias)
    state = _ready(state, v, r.form.chunk_size)
    with without_autocast(v.device):  # which would multiply in its own dtype
        y, after = recurrent_reference(q, k, v, keep, write, r.form, state, r.lengths)
    return RATAttentionOutput(_gated(y, z, v.dtype), None if r.initial_state is None else after)


def _by_reference(r: Request, impl: Impl) -> RATAttentionOutput:
    parts, state = _real(r.parts, r.lengths), r.initial_state
    if state is not None and parts.v.shape[1] > 0:
        state = _ready(state, parts.v, r.form.chunk_size)
    keep, write = forget_gate(parts.g, r.gate_bias)
    r = replaced(r, parts=parts, initial_state=state)
    with without_autocast(parts.v.device):  # which would multiply in its own dtype
        y, state = chunk_reference(r, keep, write, impl)
    return RATAttentionOutput(_gated(y, parts.z, parts.v.dtype), state)


def _by_kernels(zvgqk: Tensor, r: Request) -> RATAttentionOutput:
    bias = None if r.gate_bias is None else r.gate_bias.contiguous()
    if zvgqk.stride(-1) != 1:
        zvgqk = zvgqk.contiguous()
    if r.initial_state is None:
        (y,) = registered.differentiable_rat_attention(zvgqk, bias, r.cu_seqlens, *r.form)
        return RATAttentionOutput(y, None)
    if torch.is_grad_enabled():  # a NaN in the padding would reach gradients, multiplied by 0
        zvgqk = without_padding(zvgqk, r.lengths)
    state = _ready(r.initial_state, zvgqk, r.form.chunk_size)
    state = RATState(*(x.contiguous() for x in state))
    lengths = state.lengths
    if r.lengths is None:
        added = torch.full_like(lengths, zvgqk.shape[1])
    else:
        added = r.lengths.contiguous()  # kernels read the lengths one after another in memory
    y, k, v, *ends = registered.differentiable_continued(zvgqk, bias, *state, added, *r.form)
    # Copies without the unused slot, as a state may not keep more memory than it holds.
    k_ends, v_ends = (x[:, : state.k_ends.shape[1]].clone() for x in ends)
    return RATAttentionOutput(y, RATState(k, v, k_ends, v_ends, lengths + added))


def _real(parts: Parts, lengths: Tensor | None) -> Parts:
    """Return the parts with zeros in place of padding."""
    if lengths is None:
        return parts
    z = None if parts.z is None else without_padding(parts.z, lengths)
    v, g, q, k = (without_padding(part, lengths) for part in (parts.v, parts.g, parts.q, parts.k))
    return Parts(z, v, g, q, k)


def _gated(y: Tensor, z: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (y if z is None else z.sigmoid() * y).to(dtype)


def _ready(state: RATState, v: Tensor, chunk_size: int) -> RATState:
    """Return the state with slots for these tokens, and with ends in the dtype of v.

    Under autocast that dtype may differ from the state's.
    """
    state = reserve(state, v.shape[1], chunk_size)
    return replaced(state, k_ends=state.k_ends.to(v.dtype), v_ends=state.v_ends.to(v.dtype))
