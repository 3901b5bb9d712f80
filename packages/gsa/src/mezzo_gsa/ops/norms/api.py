"""The public op: a norm with a gate, by one kernel on a GPU, where PyTorch takes several."""

from typing import Any

import torch
from jaxtyping import Float
from mezzo_core.ops.checks import check_number
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.shapes import Shapes
from torch import Tensor

from mezzo_gsa.ops.norms.op import differentiable_gated_norm
from mezzo_gsa.ops.norms.reference import gated_norm_reference

MAX_WIDTH = 8192
"""The widest rows that the kernels support."""
_SHAPES = Shapes(o="... D", weight="D | None", z="... D | None")


def gated_norm(
    o: Float[Tensor, "*rows D"],
    weight: Float[Tensor, "D"] | None,
    eps: float,
    dtype: torch.dtype | None = None,
    *,
    z: Float[Tensor, "*rows D"] | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "*rows D"]:
    """Return RMSNorm(swish(o)), equation 9; with z, RMSNorm(o) ⊙ swish(z), as in GLA and RetNet.

    The norm is over the last dimension. All is computed in float32 (float64 for float64).

    Args:
        o: (..., D), the outputs of all heads side by side, or of each head.
        weight: (D,) of the norm; None: swish without the norm, which goes without z.
        eps: of the norm.
        dtype: of the result; None: that of o.
        z: (..., D), logits of the output gate, in the shape of o.
        impl: "auto", "reference" or "triton". Triton needs a weight, and has float32, bfloat16,
            float16 and D up to 8192. Under torch.compile "auto" takes the reference, which the
            compiler makes one kernel.

    Raises:
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, `eps` or `impl` is wrong.
    """
    _check(o, weight, eps, z)
    fuses = torch.compiler.is_compiling() and impl == "auto"
    chosen = resolve_impl("gated_norm", impl, o.device, _unsupported(o, weight))
    if weight is None or fuses or chosen == "reference":
        return gated_norm_reference(o, weight, eps, z).to(dtype or o.dtype)
    D = o.shape[-1]
    if z is not None:  # (tokens, heads, D)
        z = z.reshape(-1, o.shape[-2] if o.ndim > 1 else 1, D)
    y = differentiable_gated_norm(o.reshape(-1, D), weight, z, eps, dtype or o.dtype)
    return y.view(o.shape)


def _check(o: Any, weight: Any, eps: Any, z: Any) -> None:
    check_number("gated_norm", "eps", eps, positive=True)
    _SHAPES.check("gated_norm", o, weight, z)
    if weight is None and z is not None:
        raise ValueError("gated_norm: z goes with a weight")


def _unsupported(o: Tensor, weight: Tensor | None) -> str | None:
    """Return why the kernels do not support this call, or None if they do."""
    if weight is None:
        return "no weight"
    for x in (o, weight):
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{x.dtype}; supported: float32, bfloat16, float16"
    if o.shape[-1] > MAX_WIDTH:
        return f"rows of {o.shape[-1]}; supported: up to {MAX_WIDTH}"
    return "empty tensors" if o.numel() == 0 else None
