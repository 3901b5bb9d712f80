"""The arguments of gated linear attention: a layer's form, checks, and the kernels' limits."""

from typing import Any, Literal, NamedTuple, get_args

import torch
from mezzo_core.ops.checks import check_number
from mezzo_core.ops.shapes import Shapes
from mezzo_core.positions import RopeScaling
from torch import Tensor

from mezzo_gsa.ops.decoding import checks

StepMap = Literal["relu", "swish"]

MAX_K, MAX_V = 512, 1024
"""The widest heads that the kernels support."""

_SHAPES = {name: checks.head_shapes(**{name: "H M"}) for name in ("g", "gates")}
_LOG_BOUNDS = Shapes(log_bounds="two channels")


class LayerForm(NamedTuple):
    """What a GLA, HGRN2 or RetNet layer does between its projections, for `step_gla_layer_`."""

    scale: float = 1.0
    """Multiplies the queries."""
    feature_map: StepMap | None = None
    """Applied to queries and keys."""
    damping: float | None = None
    """τ of the gates exp(g) = sigmoid(logits)^(1 / τ). None: the gates are given as g."""
    lower_bound: float = 0.0
    """β of the forget gates β + (1 - β) exp(g)."""
    rope_base: float | None = None
    """Base of RoPE, which rotates queries and keys (`mezzo_core.positions`); None: no RoPE."""
    norm_eps: float = 1e-5
    rope_scaling: tuple[float, ...] | None = None
    """The fields of a `RopeScaling` (`mezzo_core.positions`)."""

    def scaling(self) -> RopeScaling | None:
        """Return the scaling of RoPE; a property would not compile with torch 2.8."""
        return None if self.rope_scaling is None else RopeScaling(*self.rope_scaling)


def check_form(op: str, form: Any) -> None:
    """Raise a ValueError or TypeError that names the invalid field of a `LayerForm`."""
    if not isinstance(form, LayerForm):
        raise TypeError(f"{op}: form must be a LayerForm, got {type(form).__name__}")
    maps = get_args(StepMap)
    if form.feature_map is not None and form.feature_map not in maps:
        raise ValueError(
            f"{op}: form.feature_map must be None or one of {maps}, got {form.feature_map!r}"
        )
    check_number(op, "form.norm_eps", form.norm_eps, positive=True)
    for name in ("damping", "rope_base"):
        if getattr(form, name) is not None:
            check_number(op, f"form.{name}", getattr(form, name), positive=True)
    check_number(op, "form.scale", form.scale)
    check_number(op, "form.lower_bound", form.lower_bound)
    if not 0 <= form.lower_bound < 1:
        raise ValueError(f"{op}: form.lower_bound must be in [0, 1), got {form.lower_bound}")


def check_log_bounds(op: str, log_bounds: Any, channels: int, device: torch.device) -> None:
    """Raise a ValueError or TypeError unless these are log β and log(1 - β) of each channel."""
    _LOG_BOUNDS.check(op, log_bounds, device=device, channels=channels, two=2)


def check_inputs(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    *,
    sizes: str = "(B, T, HQ, K)",
    gates: str = "g",
) -> None:
    """Raise a ValueError or TypeError that names the argument which does not fit the others.

    `sizes` names the axes of q in messages; all tensors share the first ones. `gates` is the name
    of g in messages.
    """
    checks.check_inputs(op, _SHAPES[gates][sizes], q, k, v, g, scale=scale)
    if g.shape[-1] not in (k.shape[-1], 1):
        raise ValueError(
            f"{op}: {gates} must be {tuple(k.shape)} or {(*k.shape[:-1], 1)}, got {tuple(g.shape)}"
        )


def unsupported(q: Tensor, v: Tensor) -> str | None:
    """Return why the kernels do not support this call, or None if they do."""
    K, V = q.shape[-1], v.shape[-1]
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{q.dtype}; supported: float32, bfloat16, float16"
    if K > MAX_K or V > MAX_V:
        return f"heads of K = {K}, V = {V}; supported: K up to {MAX_K}, V up to {MAX_V}"
    return "empty tensors" if q.numel() == 0 or v.numel() == 0 else None
