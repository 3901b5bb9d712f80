"""Decoding steps of gated slot attention: one token in place, from q, k, v, g or a projection.

First the public functions, then the registered ops of their kernels, of which one reads several
tokens of a projection.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from mezzo_core.ops.checks import (
    FLOATING,
    check_floating,
    check_no_gradients,
    check_number,
    check_size,
)
from mezzo_core.ops.form import schema_of
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.precision import without_autocast
from mezzo_core.ops.shapes import Shapes
from torch import Tensor
from torch.nn import functional as F

from mezzo_gsa.ops.decoding.checks import check_kind, check_memory, check_parts
from mezzo_gsa.ops.gates.elementwise import log_gate
from mezzo_gsa.ops.gsa.arguments import (
    Between,
    GSAState,
    StepForm,
    check_between,
    check_inputs,
    split_step,
    unsupported,
)
from mezzo_gsa.ops.gsa.reference import gsa_step
from mezzo_gsa.ops.norms import gated_norm

_STATE = Shapes(k="B H M K", v="B H M V")
_VECTORS = Shapes(gate_logits="HM | None", norm_weight="C | None")


def step_gsa_(
    q: Float[Tensor, "B HQ K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H V"],
    g: Float[Tensor, "B H M"] | None,
    s: Float[Tensor, "B H M"] | None,
    state: GSAState,
    *,
    scale: float = 1.0,
    between: Between = "softmax",
    impl: Impl = "auto",
) -> Float[Tensor, "B HQ V"]:
    """Process one token of every row, and overwrite the state with the state after it.

    This equals `recurrent_gsa` with T = 1; the arguments have no axis of tokens. It has no
    gradients, never waits for the GPU, and can be captured in a CUDA graph.

    Args:
        q: (B, HQ, K) queries; query head h uses head h // (HQ // H).
        k: (B, H, K) keys.
        v: (B, H, V) values.
        g: (B, H, M) log of the forget gate, at most 0; None: nothing decays.
        s: (B, H, M) write strength; None: 1 - exp(g).
        state: K~ (B, H, M, K) and V~ (B, H, M, V), float32 (float64 for float64 inputs);
            overwritten.
        scale: multiplies q.
        between: as in `chunk_gsa`.
        impl: "auto", "reference" or "triton". Triton supports float32, bfloat16 and float16, M up
            to 128, K and V up to 512, and a contiguous state.

    Returns:
        out (B, HQ, V) in the dtype of q.

    Raises:
        RuntimeError: if a gradient would be needed.
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, `scale`, `between` or `impl` is wrong, or neither
            g nor s is given.
    """
    op = "step_gsa_"
    gates = check_inputs(op, q, k, v, g, s, scale, between, sizes="(B, HQ, K)")
    shapes = [(*gates.shape, x.shape[2]) for x in (k, v)]
    check_parts(op, "state", state, GSAState, shapes, q, check_memory)
    check_no_gradients(op, q, k, v, g, s, *state)
    if resolve_impl(op, impl, q.device, unsupported_step(q, state)) == "triton":
        g, s = (x if x is None else x.float() for x in (g, s))
        return gsa_step_(q, k, v, g, s, *state, scale, between)
    return _reference(q, k, v, g, s, state, scale, between)


def step_gsa_projected_(
    x: Float[Tensor, "B W"],
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
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "B C"]:
    """Process one token of every row: all operations of a GSA layer between its two projections.

    These are swish on q, k and v, g = logsigmoid(logits) / damping, `step_gsa_`, and
    RMSNorm(swish(o)). On a GPU they are three kernels, or two without the norm.

    Args:
        x: (B, W), the output of the layer's first projection: HQ·K channels of q, H·K of k, H·V
            of v, and H·M gate logits unless `gate_logits` are given. H, M, K and V are the sizes of
            the state.
        state: K~ (B, H, M, K) and V~ (B, H, M, V), overwritten.
        num_heads: HQ, heads of queries.
        damping: τ.
        gate_logits: (H·M,) logits that are the same for every token.
        norm_weight: (HQ·V,) of the norm; None: no norm.
        norm_eps: of the norm.
        swish: whether q, k and v get swish; the output always does.
        scale: multiplies q after its swish.
        between: as in `chunk_gsa`.
        out_dtype: of y; None: that of x. If the norm follows later, y should be float32.
        impl: as in `step_gsa_`.

    Returns:
        y (B, C), C = HQ·V.

    Raises:
        RuntimeError, TypeError, ValueError: as `step_gsa_`, naming the argument.
    """
    op, form = "step_gsa_projected_", StepForm(scale, between, damping, swish, norm_eps, out_dtype)
    check_projected(op, x, state, num_heads, gate_logits, norm_weight, form)
    check_no_gradients(op, x, gate_logits, norm_weight, *state)
    if resolve_impl(op, impl, x.device, unsupported_step(x, state)) == "triton":
        return gsa_step_projected_(x, gate_logits, norm_weight, *state, num_heads, *form)
    q, k, v, logits = split_step(x, state, num_heads, gate_logits)
    if swish:
        q, k, v = (F.silu(part) for part in (q, k, v))
    out = _reference(q, k, v, log_gate(logits, damping), None, state, scale, between)
    return gated_norm(out.flatten(1), norm_weight, norm_eps, out_dtype)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    s: Tensor | None,
    state: GSAState,
    scale: float,
    between: Between,
) -> Tensor:
    """Process one token in eager PyTorch; return out (B, HQ, V) in the dtype of q."""
    if g is None:
        assert s is not None
        g = torch.zeros_like(s)
    g = g.to(state.k.dtype)
    s = -torch.expm1(g) if s is None else s.to(g.dtype)
    # Autocast would compute the products of a float32 state in 16 bits.
    with without_autocast(q.device):
        out, after = gsa_step(q, k, v, g, s, scale, between, state)
    for old, new in zip(state, after, strict=True):
        old.copy_(new)
    return out.to(q.dtype)


def check_projected(
    op: str,
    x: Tensor,
    state: GSAState,
    num_heads: int,
    gate_logits: Tensor | None,
    norm_weight: Tensor | None,
    form: StepForm,
) -> None:
    """Check the arguments of steps from a projection, with x (B, W) of one token."""
    check_kind(op, "state", state, GSAState)
    check_floating(op, "x", x)
    sizes = _STATE.check(op, *state, of="state.")
    H, M, K, V = (sizes[letter] for letter in "HMKV")
    check_size(op, "num_heads", num_heads)
    if H < 1 or num_heads % H:
        raise ValueError(f"{op}: num_heads must be a multiple of the state's {H}, got {num_heads}")
    W = (num_heads + H) * K + H * V + (H * M if gate_logits is None else 0)
    if x.ndim != 2 or x.shape[1] != W:
        raise ValueError(f"{op}: x must be (B, {W}) for this state, got {tuple(x.shape)}")
    _VECTORS.check(op, gate_logits, norm_weight, device=x.device, HM=H * M, C=num_heads * V)
    check_between(op, form.between)
    check_number(op, "scale", form.scale)
    check_number(op, "damping", form.damping, positive=True)
    check_number(op, "norm_eps", form.norm_eps, positive=True)
    if form.out_dtype is not None and form.out_dtype not in FLOATING:
        raise TypeError(f"{op}: out_dtype must be a floating-point dtype, got {form.out_dtype!r}")
    shapes = [(x.shape[0], H, M, width) for width in (K, V)]
    check_parts(op, "state", state, GSAState, shapes, x, check_memory)


def unsupported_step(x: Tensor, state: GSAState) -> str | None:
    """Return why the kernels do not support this call, or None if they do."""
    if not all(part.is_contiguous() for part in state):
        return "a state that is not contiguous"
    return unsupported(x, state.k.shape[2], state.k.shape[3], state.v.shape[3])


@torch.library.custom_op("mezzo_gsa::gsa_step_", mutates_args=("slots_k", "slots_v"))
def gsa_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    s: Tensor | None,
    slots_k: Tensor,
    slots_v: Tensor,
    scale: float,
    between: str,
) -> Tensor:
    """Process one token by kernels; return out (B, HQ, V)."""
    from mezzo_gsa.ops.gsa.triton import step

    form = StepForm(scale, cast(Between, between))
    return step.run_step(q, k, v, g, s, GSAState(slots_k, slots_v), form)


@gsa_step_.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


def _step_projected(
    x: Tensor,
    gate_logits: Tensor | None,
    norm_weight: Tensor | None,
    slots_k: Tensor,
    slots_v: Tensor,
    num_heads: int,
    *form: Any,
) -> Tensor:
    """Process one token by kernels; return the input of the output projection, (B, C)."""
    from mezzo_gsa.ops.gsa.triton import step

    state = GSAState(slots_k, slots_v)
    parts = split_step(x, state, num_heads, gate_logits)
    return step.run_layer_steps(parts, norm_weight, state, state, None, None, StepForm(*form))


def _step_projected_fake(x: Tensor, *rest: Any) -> Tensor:
    _gate_logits, _norm_weight, _slots_k, slots_v, num_heads, *form = rest
    return x.new_empty(x.shape[0], num_heads * slots_v.shape[3], dtype=StepForm(*form).out_dtype)


gsa_step_projected_ = torch.library.custom_op(
    "mezzo_gsa::gsa_step_projected_",
    _step_projected,
    mutates_args=("slots_k", "slots_v"),
    schema="(Tensor x, Tensor? gate_logits, Tensor? norm_weight, Tensor(a!) slots_k, "
    f"Tensor(b!) slots_v, int num_heads, {schema_of(StepForm)}) -> Tensor",
)
gsa_step_projected_.register_fake(_step_projected_fake)


def _recurrent_projected(
    x: Tensor,
    lengths: Tensor | None,
    certain: Tensor | None,
    gate_logits: Tensor | None,
    norm_weight: Tensor | None,
    slots_k: Tensor,
    slots_v: Tensor,
    num_heads: int,
    *form: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Process a few tokens by kernels; return y (B, T, C) and the state after the certain ones."""
    from mezzo_gsa.ops.gsa.triton import step

    state = GSAState(slots_k, slots_v)
    after = GSAState(*(torch.empty_like(part) for part in state))
    parts = split_step(x.flatten(0, 1), state, num_heads, gate_logits)
    y = step.run_layer_steps(parts, norm_weight, state, after, lengths, certain, StepForm(*form))
    return y.unflatten(0, x.shape[:2]), *after


def _recurrent_projected_fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _lengths, _certain, _gate_logits, _norm_weight, slots_k, slots_v, num_heads, *_form = rest
    y = x.new_empty(*x.shape[:2], num_heads * slots_v.shape[3])
    return y, torch.empty_like(slots_k), torch.empty_like(slots_v)


gsa_recurrent_projected = torch.library.custom_op(
    "mezzo_gsa::gsa_recurrent_projected",
    _recurrent_projected,
    mutates_args=(),
    schema="(Tensor x, Tensor? lengths, Tensor? certain, Tensor? gate_logits, Tensor? norm_weight, "
    f"Tensor slots_k, Tensor slots_v, int num_heads, {schema_of(StepForm)})"
    " -> (Tensor, Tensor, Tensor)",
)
gsa_recurrent_projected.register_fake(_recurrent_projected_fake)
