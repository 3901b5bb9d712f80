"""RAT attention: the public functions, their checks, and who computes them.

The gates come as logits, and RoPE as a rule instead of as tables. A fused kernel can then read the
projection's output as it is (half the bytes of float32 gates), do the rest on chip, and keep
nothing of width 2C for the backward pass; and 1 - sigmoid(g) is computed as sigmoid(-g), which
keeps its digits when the gate is near one.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.packed import check_cu_seqlens
from torch import Tensor

from mezzo_rat.ops.forget_gate import forget_gate
from mezzo_rat.ops.rat_attention.chunked import chunk_reference
from mezzo_rat.ops.rat_attention.reference import RATForm, recurrent_reference
from mezzo_rat.ops.rat_attention.state import RATState, init_state, reserve


class RATAttentionOutput(NamedTuple):
    """What RAT attention returns."""

    out: Tensor
    """(B, T, H, D) in the dtype of v."""
    final_state: RATState | None
    """The state after the last real token; None if none was given."""


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
    state: RATState | None = None,
    lengths: Int[Tensor, "B"] | None = None,
    cu_seqlens: Int[Tensor, "borders"] | None = None,
    impl: Impl = "auto",
) -> RATAttentionOutput:
    """Gated recurrence inside chunks of L tokens, softmax attention over the chunks' ends.

    With f = sigmoid(g + gate_bias), token l of chunk n, and k~, v~ zero before a chunk's start
    (equation 3 of the RAT paper, section 2.3; f is its forget gate, here by logits):

        k~[n,l] = f[n,l] k~[n,l-1] + (1 - f[n,l]) k[n,l]        (v~ alike, with the same f)
        K = [k~[j,L-1] for j < n ; k~[n,l]]                     (V alike)
        out[n,l] = sigmoid(z[n,l]) softmax(scale q[n,l]·K) V

    RoPE turns q and k~ after the recurrence. Gates, recurrence and softmax are float32 (float64 for
    float64 inputs), the products of attention are in the dtype of the inputs. Any T, L >= 1.

    Args:
        q: queries of G groups; head h reads group h % G. G divides H.
        k: keys of G groups.
        v: values.
        g: logits of the forget gate.
        chunk_size: L, counted from the start of each sequence.
        gate_bias: added to `g` in float32.
        z: logits of the output gate; None means no gate.
        rope: rotate by the index n of the chunk, by the position of the token, or not at all.
        rope_base: base of RoPE's frequencies.
        scale: of the logits; D**-0.5 by default.
        state: continue from here; its gradients are computed too.
        lengths: int64, how many tokens of each row are real, the rest being padding on the right;
            needs a state.
        cu_seqlens: borders of sequences packed in one row (B = 1, no state), from 0 to T, never
            decreasing; each sequence begins a new chunk.
        impl: "auto" or "reference": there is no kernel of this op yet. On a GPU "auto" runs the
            scan inside it in Triton.

    Raises:
        ValueError, TypeError: naming the argument that does not fit.
    """
    form = _form(q, k, v, g, chunk_size, gate_bias, z, rope, rope_base, scale)
    _check_rows(v, state, lengths, cu_seqlens)
    resolve_impl("chunk_rat_attention", impl, v.device, _NO_KERNEL)
    if v.shape[1] == 0:
        return RATAttentionOutput(v, state)
    if state is not None:
        state = _ready(state, v, chunk_size)
    keep, write = forget_gate(g, gate_bias)
    y, state = chunk_reference(q, k, v, keep, write, form, state, lengths, cu_seqlens, impl)
    return RATAttentionOutput(_gated(y, z, v.dtype), state)


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
    state: RATState | None = None,
    lengths: Int[Tensor, "B"] | None = None,
    impl: Impl = "auto",
) -> RATAttentionOutput:
    """Compute what chunk_rat_attention does, one token at a time (Listing 2 of the paper).

    The definition of the op, and the step of a decoder (T = 1). Arguments and errors are those of
    `chunk_rat_attention`; sequences cannot be packed.
    """
    form = _form(q, k, v, g, chunk_size, gate_bias, z, rope, rope_base, scale)
    _check_rows(v, state, lengths, None)
    resolve_impl("recurrent_rat_attention", impl, v.device, _NO_KERNEL)
    if v.shape[1] == 0:
        return RATAttentionOutput(v, state)
    B, _, H, D = v.shape
    begin = init_state(B, H, D, dtype=v.dtype, device=v.device) if state is None else state
    begin = _ready(begin, v, chunk_size)
    keep, write = forget_gate(g, gate_bias)
    y, after = recurrent_reference(q, k, v, keep, write, form, begin, lengths)
    return RATAttentionOutput(_gated(y, z, v.dtype), None if state is None else after)


_NO_KERNEL = "this op yet (no kernel is written); supported: reference"


def _gated(y: Tensor, z: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (y if z is None else z.sigmoid() * y).to(dtype)


def _ready(state: RATState, v: Tensor, chunk_size: int) -> RATState:
    """Give the state room for these tokens, in their dtype (autocast may have changed it)."""
    state = reserve(state, v.shape[1], chunk_size)
    return state._replace(k_ends=state.k_ends.to(v.dtype), v_ends=state.v_ends.to(v.dtype))


def _form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    chunk_size: int,
    gate_bias: Tensor | None,
    z: Tensor | None,
    rope: Literal["chunk", "token"] | None,
    rope_base: float,
    scale: float | None,
) -> RATForm:
    """Check what both forms take, and return what they compute."""
    if v.ndim != 4:
        raise ValueError(f"v must be (B, T, H, D), got {tuple(v.shape)}")
    B, T, H, D = v.shape
    if q.ndim != 4 or (*q.shape[:2], q.shape[3]) != (B, T, D) or q.shape[2] < 1 or H % q.shape[2]:
        raise ValueError(
            f"q must be ({B}, {T}, G, {D}) with G a divisor of {H}, got {tuple(q.shape)}"
        )
    for name, x, shape in (
        ("k", k, q.shape),
        ("g", g, v.shape),
        ("z", z, v.shape),
        ("gate_bias", gate_bias, v.shape[2:]),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(x.shape)}")
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("z", z), ("gate_bias", gate_bias)):
        if x is not None and not x.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")
        if x is not None and x.device != v.device:
            raise ValueError(f"{name} must be on {v.device} as v is, got {x.device}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be an integer of 1 or more, got {chunk_size!r}")
    if rope not in ("chunk", "token", None):
        raise ValueError(f'rope must be "chunk", "token" or None, got {rope!r}')
    if rope is not None and D % 2:
        raise ValueError(f"rope needs an even head dimension D, got {D}")
    return RATForm(chunk_size, rope, rope_base, D**-0.5 if scale is None else scale)


def _check_rows(
    v: Tensor, state: RATState | None, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    B, _, H, D = v.shape
    if state is not None:
        for name, shape in (("k", (B, H, D)), ("v", (B, H, D)), ("lengths", (B,))):
            got = tuple(getattr(state, name).shape)
            if got != shape:
                raise ValueError(f"state.{name} must be {shape}, got {got}")
        ends = state.k_ends
        if ends.shape != (B, ends.shape[1], H, D) or state.v_ends.shape != ends.shape:
            raise ValueError(
                f"state.k_ends and state.v_ends must be ({B}, N, {H}, {D}), "
                f"got {tuple(ends.shape)} and {tuple(state.v_ends.shape)}"
            )
    if lengths is not None and state is None:
        raise ValueError("lengths needs a state: start from init_state")
    if lengths is not None and (lengths.shape != (B,) or lengths.dtype != torch.int64):
        raise ValueError(
            f"lengths must be int64 of shape ({B},), got {lengths.dtype} {tuple(lengths.shape)}"
        )
    if cu_seqlens is not None:
        if state is not None:
            raise ValueError("cu_seqlens and state exclude each other: packed rows do not continue")
        check_cu_seqlens("chunk_rat_attention", cu_seqlens, v)
