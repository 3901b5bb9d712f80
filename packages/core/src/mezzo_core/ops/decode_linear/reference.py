"""The definition of a decoding step's linear layer, in eager PyTorch: any device, any dtype."""

from torch import Tensor
from torch.nn import functional as F

from mezzo_core.ops.precision import accumulation_dtype


def decode_linear_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_eps: float
) -> Tensor:
    """Return y (..., N) = norm(x) Wᵀ + bias of x (..., K) and W (N, K).

        norm(x) = x / sqrt(mean(x²) + eps) * norm_weight          (without norm_weight: x)

    The norm runs in float32 (float64 for float64), and its result is rounded to the dtype of W.
    """
    if norm_weight is not None:
        wide = accumulation_dtype(x.dtype)
        x = F.rms_norm(x.to(wide), norm_weight.shape, norm_weight.to(wide), norm_eps)
    return F.linear(x.to(weight.dtype), weight, bias)
