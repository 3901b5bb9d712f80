"""One decoding step of gated linear attention, in place: from q, k, v, g, or from projections.

First the public functions, then the registered ops, which kernels compute.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from mezzo_core.ops.checks import check_floating, check_no_gradients
from mezzo_core.ops.form import schema_of
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.precision import accumulation_dtype, without_autocast
from mezzo_core.ops.shapes import Shapes
from mezzo_core.positions import rotate
from torch import Tensor
from torch.nn import functional as F

from mezzo_gsa.ops.decoding.checks import check_memory
from mezzo_gsa.ops.gates.elementwise import bounded_gate, log_gate
from mezzo_gsa.ops.gla.arguments import (
    LayerForm,
    check_form,
    check_inputs,
    check_log_bounds,
    unsupported,
)
from mezzo_gsa.ops.gla.reference import gla_step

_LAYER = Shapes(norm_weight="D", z="B C | None", places="int: B | None")


def step_gla_(
    q: Float[Tensor, "B HQ K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H V"],
    g: Float[Tensor, "B H K_or_1"],
    state: Float[Tensor, "B H K V"],
    *,
    scale: float = 1.0,
    impl: Impl = "auto",
) -> Float[Tensor, "B HQ V"]:
    """Process one token of every row, and overwrite the state with the state after it.

    This equals `recurrent_gla` with T = 1; the arguments have no axis of tokens. It has no
    gradients, never waits for the GPU, and can be captured in a CUDA graph.

    Args:
        q: (B, HQ, K) queries; query head h uses head h // (HQ // H).
        k: (B, H, K) keys.
        v: (B, H, V) values.
        g: (B, H, K), the log of the forget gate of each key channel, or (B, H, 1), that of each
            head; at most 0.
        state: (B, H, K, V), float32 (float64 for float64 inputs); overwritten.
        scale: multiplies q.
        impl: "auto", "reference" or "triton". Triton has float32, bfloat16 and float16, K up to
            512, V up to 1024, and a contiguous state.

    Returns:
        out (B, HQ, V) in the dtype of q.

    Raises:
        RuntimeError: if a gradient would be needed.
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, `scale` or `impl` is wrong.
    """
    op = "step_gla_"
    _check(op, q, k, v, g, scale, state)
    check_no_gradients(op, q, k, v, g, state)
    g = g.to(state.dtype)
    if resolve_impl(op, impl, q.device, _unsupported(q, v, state)) == "triton":
        return gla_step_(q, k, v, g, state, scale)
    return _reference(q, k, v, g, state, scale).to(q.dtype)


def step_gla_layer_(
    q: Float[Tensor, "B HQ K"],
    k: Float[Tensor, "B H K"] | None,
    v: Float[Tensor, "B H V"],
    gates: Float[Tensor, "B H K_or_1"],
    state: Float[Tensor, "B H K V"],
    form: LayerForm,
    *,
    norm_weight: Float[Tensor, "D"],
    z: Float[Tensor, "B C"] | None = None,
    places: Int[Tensor, "B"] | None = None,
    log_bounds: Float[Tensor, "2 H_times_K"] | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "B C"]:
    """Process one token of every row: all operations of a layer between its projections.

    These are the form's feature map, gates and RoPE, then `step_gla_`, then RMSNorm(o) ⊙ swish(z).
    On a GPU they are two kernels. The inputs may be views into one wide projection; they are not
    copied.

    Args:
        q: (B, HQ, K) queries as projected.
        k: (B, H, K) keys as projected. None: the keys are 1 - α of the forget gates α, as in HGRN2.
        v: (B, H, V) values.
        gates: (B, H, K) or (B, H, 1), logits or log gates, depending on `form.damping`. Without k
            they must be (B, H, K).
        state: (B, H, K, V), overwritten.
        form: the layer's options.
        norm_weight: (V,) for a norm over each head, or (HQ·V,) for a norm over all heads.
        z: (B, HQ·V) logits of the output gate; None: no gate.
        places: (B,) integers, how many tokens each row has had before; needed with RoPE.
        log_bounds: (2, H·K) float32 or float64: log β and log(1 - β) of each channel, in place of
            `form.lower_bound`, which must be 0. The gates must be (B, H, K).
        impl: as in `step_gla_`.

    Returns:
        y (B, C) in the dtype of q, C = HQ·V.

    Raises:
        RuntimeError, TypeError, ValueError: as `step_gla_`, naming the argument.
    """
    op = "step_gla_layer_"
    check_form(op, form)
    check_floating(op, "q", q)
    check_floating(op, "gates", gates)
    if k is None and (gates.shape[-1] != q.shape[-1] or gates.dtype != q.dtype):
        raise ValueError(
            f"{op}: without k, gates must have the width and the dtype of q, "
            f"{tuple(q.shape)} {q.dtype}, got {tuple(gates.shape)} {gates.dtype}"
        )
    _check(op, q, gates if k is None else k, v, gates, form.scale, state, gates="gates")
    _check_layer(op, q, v, norm_weight, z, places, form)
    if log_bounds is not None:
        check_log_bounds(op, log_bounds, state.shape[1] * state.shape[2], state.device)
        if gates.shape[2] != state.shape[2]:
            raise ValueError(f"{op}: log_bounds go with gates (B, H, K), got {tuple(gates.shape)}")
        if form.lower_bound:
            raise ValueError(
                f"{op}: with log_bounds, form.lower_bound must be 0, got {form.lower_bound}"
            )
    check_no_gradients(op, q, k, v, gates, state, norm_weight, z, log_bounds)
    if resolve_impl(op, impl, q.device, _unsupported(q, v, state)) == "triton":
        return gla_step_layer_(q, k, v, gates, state, norm_weight, z, places, log_bounds, *form)
    g = gates.to(state.dtype) if form.damping is None else log_gate(gates, form.damping)
    left, g = bounded_gate(g, form.lower_bound if log_bounds is None else log_bounds)
    q, k = _featured(q, places, form), left if k is None else _featured(k, places, form)
    out = _reference(q, k, v, g, state, form.scale).to(q.dtype)
    return _normed(out.flatten(1), norm_weight, z, form.norm_eps)


def _reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    """Process one token; return out (B, HQ, V) in the state's dtype."""
    # Autocast would compute the products of a float32 state in 16 bits.
    with without_autocast(q.device):
        out, after = gla_step(q, k, v, g, scale, state)
    state.copy_(after)
    return out


def _featured(x: Tensor, places: Tensor | None, form: LayerForm) -> Tensor:
    """Apply the feature map and RoPE to queries or keys (B, H, K)."""
    if form.feature_map is not None:
        x = F.relu(x) if form.feature_map == "relu" else F.silu(x)
    if form.rope_base is None or places is None:
        return x
    return rotate(x[:, None], places[:, None], form.rope_base, form.scaling())[:, 0]


def _normed(out: Tensor, weight: Tensor, z: Tensor | None, eps: float) -> Tensor:
    """Return RMSNorm(o) ⊙ swish(z), (B, C), in the dtype of o."""
    dtype = accumulation_dtype(out.dtype)
    y = out.to(dtype).unflatten(1, (-1, weight.shape[0]))
    y = F.rms_norm(y, weight.shape, weight.to(dtype), eps).flatten(1)
    return (y if z is None else y * F.silu(z.to(dtype))).to(out.dtype)


def _check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    state: Tensor,
    gates: str = "g",
) -> None:
    check_inputs(op, q, k, v, g, scale, sizes="(B, HQ, K)", gates=gates)
    check_memory(op, "state", state, (*k.shape, v.shape[2]), q)


def _check_layer(
    op: str,
    q: Tensor,
    v: Tensor,
    norm_weight: Tensor,
    z: Tensor | None,
    places: Tensor | None,
    form: LayerForm,
) -> None:
    (B, HQ, K), V = q.shape, v.shape[2]
    sizes = _LAYER.check(op, norm_weight, z, places, device=q.device, B=B, C=HQ * V)
    if sizes["D"] != V and sizes["D"] != HQ * V:
        raise ValueError(f"{op}: norm_weight must be ({V},) or ({HQ * V},), got ({sizes['D']},)")
    if (places is None) != (form.rope_base is None):
        raise ValueError(f"{op}: places and form.rope_base must be given both or neither")
    if places is not None and K % 2:
        raise ValueError(f"{op}: q must have an even width to be turned, got {tuple(q.shape)}")


def _unsupported(q: Tensor, v: Tensor, state: Tensor) -> str | None:
    """Return why the kernels do not support this call, or None if they do."""
    return unsupported(q, v) if state.is_contiguous() else "a state that is not contiguous"


@torch.library.custom_op("mezzo_gsa::gla_step_", mutates_args=("state",))
def gla_step_(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    """Process one token by a kernel; return out (B, HQ, V)."""
    from mezzo_gsa.ops.gla.triton import step

    return step.run_step(q, k, v, g, state, LayerForm(scale))


@gla_step_.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


def _step_layer(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    gates: Tensor,
    state: Tensor,
    norm_weight: Tensor,
    z: Tensor | None,
    places: Tensor | None,
    log_bounds: Tensor | None,
    *form: Any,
) -> Tensor:
    """Process one token by kernels; return the input of the output projection, (B, C)."""
    from mezzo_gsa.ops.gla.triton import step

    return step.run_layer_step(
        q, k, v, gates, state, norm_weight, z, places, log_bounds, LayerForm(*form)
    )


def _step_layer_fake(q: Tensor, k: Tensor | None, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * v.shape[2])


gla_step_layer_ = torch.library.custom_op(
    "mezzo_gsa::gla_step_layer_",
    _step_layer,
    mutates_args=("state",),
    schema="(Tensor q, Tensor? k, Tensor v, Tensor gates, Tensor(a!) state, Tensor norm_weight, "
    f"Tensor? z, Tensor? places, Tensor? log_bounds, {schema_of(LayerForm)}) -> Tensor",
)
gla_step_layer_.register_fake(_step_layer_fake)
