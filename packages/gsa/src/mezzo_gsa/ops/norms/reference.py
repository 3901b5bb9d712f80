"""The definition of the norm with a gate."""

from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor
from torch.nn import functional as F


def gated_norm_reference(o: Tensor, weight: Tensor | None, eps: float, z: Tensor | None) -> Tensor:
    """Return RMSNorm(swish(o)), or with z RMSNorm(o) ⊙ swish(z); see `gated_norm`."""
    wide = accumulation_dtype(o.dtype)
    y = o.to(wide) if z is not None else F.silu(o.to(wide))
    if weight is not None:
        y = F.rms_norm(y, weight.shape, weight.to(wide), eps)
    return y if z is None else y * F.silu(z.to(wide))
