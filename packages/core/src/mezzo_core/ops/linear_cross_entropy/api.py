"""The public op `linear_cross_entropy`: argument checks and dispatch."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mezzo_core.ops.checks import check_size, is_read
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.linear_cross_entropy import op, reference
from mezzo_core.ops.precision import autocast_dtype
from mezzo_core.ops.shapes import Shapes

NO_TARGET = -100
"""The target where there is nothing to predict: torch's default `ignore_index`."""
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHAPES = Shapes(x="... C", weight="V C", targets="int64: ...", filled="V C")


class CrossEntropy(NamedTuple):
    """How well the logits predict the targets that count."""

    loss: Float[Tensor, ""]
    """Nats, summed, in float32 (float64 for float64 inputs)."""
    hits: Bool[Tensor, "*rows"]
    """Where the target has the row's largest logit."""


def linear_cross_entropy(
    x: Float[Tensor, "*rows C"],
    weight: Float[Tensor, "V C"],
    targets: Int64[Tensor, "*rows"],
    *,
    ignore_index: int = NO_TARGET,
    impl: Impl = "auto",
) -> CrossEntropy:
    """Return the summed cross entropy of the logits x Wᵀ, which are never all in memory.

    `reference.py` is the definition. A chunk of rows at a time, the logits become the loss and, if
    gradients are wanted, the gradients of x and W. The backward only multiplies these by the
    gradient of the loss. The idea is that of Liger Kernel (Hsu et al. 2024, arXiv 2410.10989), and
    of torch's own `linear_cross_entropy`, which torch.compile and torch.func cannot trace. Under
    autocast the products are in its dtype, and the gradient of W is accumulated in float32.

    Args:
        x: the input of the head.
        weight: the head's W, (V, C), in x's dtype outside autocast.
        targets: int64 in [0, V), or `ignore_index` where there is none. They are checked on the CPU
            only: on a GPU a wrong one makes the loss NaN, or is an error of CUDA.
        ignore_index: the target that does not count.
        impl: "auto" computes a chunk of rows at a time; on a GPU, a kernel computes the softmax if
            it supports the dtype. "triton" requires that kernel. "reference" computes all logits.

    Raises:
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, a target or `impl` is wrong.
    """
    dtype = _check(x, weight, targets, ignore_index)
    unsupported = None if dtype in TRITON_DTYPES else str(dtype)
    chosen = resolve_impl("linear_cross_entropy", impl, x.device, unsupported)
    rows, flat = x.reshape(-1, x.shape[-1]), targets.reshape(-1).contiguous()
    if impl == "reference":
        loss, hits = reference.linear_cross_entropy_fwd(rows, weight, flat, ignore_index)
        return CrossEntropy(loss, hits.view(targets.shape))
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss, hits, *_ = op.linear_cross_entropy(
        rows, weight, flat, rows[:0].clone(), ignore_index, dtype, wants_gradient,
        chosen == "triton",
    )  # fmt: skip
    return CrossEntropy(loss, hits.view(targets.shape))


def _check(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> torch.dtype:
    """Check the arguments, and return the dtype of the products."""
    name = "linear_cross_entropy"
    _SHAPES.check(name, x, weight, targets)
    check_size(name, "ignore_index", ignore_index, least=-(2**63))
    dtype, cast = x.dtype, autocast_dtype(x.device)
    if cast is not None and dtype != torch.float64:
        dtype = cast
    elif dtype != weight.dtype:
        raise TypeError(
            f"{name}: x and weight must have one dtype outside autocast, "
            f"got {x.dtype} and {weight.dtype}"
        )
    check_targets(f"{name}: targets", targets, weight.shape[0], ignore_index)
    return dtype


def check_targets(name: str, targets: Tensor, vocab: int, ignore_index: int = NO_TARGET) -> None:
    """Check on a CPU that all targets are in [0, vocab), or `ignore_index`.

    Raises:
        ValueError: if one is not; `name` begins the message.
    """
    if is_read(targets):
        wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= vocab))]
        if wrong.numel() > 0:
            raise ValueError(
                f"{name} must be in [0, {vocab}) or {ignore_index}, got {int(wrong[0])}"
            )
