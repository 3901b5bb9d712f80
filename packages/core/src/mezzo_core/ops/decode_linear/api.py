"""The public op `decode_linear`: argument checks and dispatch."""

import torch
from jaxtyping import Float
from torch import Tensor

from mezzo_core.ops.checks import check_number
from mezzo_core.ops.decode_linear import reference
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.shapes import Shapes, check_one_dtype

TRITON_MAX_K = 16_384
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_SHAPES = Shapes(x="... K", weight="N K", bias="N | None", norm_weight="K | None")


def decode_linear(
    x: Float[Tensor, "*rows K"],
    weight: Float[Tensor, "N K"],
    bias: Float[Tensor, " N"] | None = None,
    *,
    norm_weight: Float[Tensor, " K"] | None = None,
    norm_eps: float = 1e-6,
    impl: Impl = "auto",
) -> Float[Tensor, "*rows N"]:
    """Return norm(x) Wᵀ + bias, with a kernel for a single row; more rows use torch's product.

    `reference.py` is the definition. The kernel sums in float32. It has no backward, and its launch
    depends on shapes only, so it can be captured in a CUDA graph.

    Args:
        x: rows with any strides. x, or the result of the norm, is rounded to the dtype of `weight`;
            but the kernel keeps the result of the norm in float32.
        weight: W, as in `nn.Linear`.
        bias: in the dtype of `weight`.
        norm_weight: weight of the RMS norm, which is computed in float32; None for no norm.
        norm_eps: added to the mean of the squares.
        impl: "auto", "reference" or "triton" (float32, bfloat16 or float16; one row; K up to
            16,384; each row of W contiguous; no gradients, no autocast). The reference is
            differentiable and follows autocast, and "auto" takes it for all that Triton cannot do.

    Returns:
        y in the dtype of `weight`, or of autocast.

    Raises:
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, `norm_eps` or `impl` is wrong.
    """
    op = "decode_linear"
    check_number(op, "norm_eps", norm_eps)
    if norm_eps < 0:
        raise ValueError(f"{op}: norm_eps must be 0 or more, got {norm_eps}")
    _SHAPES.check(op, x, weight, bias, norm_weight)
    if bias is not None:
        check_one_dtype(op, weight=weight, bias=bias)
    unsupported = _unsupported(x, weight, bias, norm_weight)
    if resolve_impl(op, impl, x.device, unsupported) == "triton":
        return _decode_linear(x, weight, bias, norm_weight, norm_eps)
    return reference.decode_linear_fwd(x, weight, bias, norm_weight, norm_eps)


def _unsupported(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None
) -> str | None:
    """Say why the kernel cannot do the request, or None if it can."""
    K = weight.shape[1]
    tensors = [part for part in (x, weight, bias, norm_weight) if part is not None]
    for part in tensors:
        if part.dtype not in TRITON_DTYPES:
            return str(part.dtype)
    if x.shape[:-1].numel() != 1:
        return f"{x.shape[:-1].numel()} rows (it takes one)"
    if not 1 <= K <= TRITON_MAX_K:
        return f"K = {K} (it takes 1 to {TRITON_MAX_K})"
    if weight.stride(1) != 1 and K > 1:
        return "a weight whose rows are not contiguous"
    if torch.is_grad_enabled() and any(part.requires_grad for part in tensors):
        return "gradients: call it under torch.no_grad()"
    if torch.is_autocast_enabled("cuda"):
        return "autocast"
    return None


@torch.library.custom_op("mezzo::decode_linear", mutates_args=())
def _decode_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_eps: float
) -> Tensor:
    from mezzo_core.ops.decode_linear import triton

    return triton.decode_linear_fwd(x, weight, bias, norm_weight, norm_eps)


@_decode_linear.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_eps: float
) -> Tensor:
    return weight.new_empty(*x.shape[:-1], weight.shape[0])
