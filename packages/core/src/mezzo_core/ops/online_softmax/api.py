"""The public merge: arguments checked, implementation chosen, gradients registered."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from mezzo_core.ops.checks import check_floating
from mezzo_core.ops.gradients import register_gradient
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.online_softmax import reference
from mezzo_core.ops.precision import accumulation_dtype


class SoftmaxPart(NamedTuple):
    """What softmax attention over some of the keys gave: enough to add the other keys later."""

    out: Float[Tensor, "*rows D"]
    lse: Float[Tensor, "*rows"]


def merge_softmax(a: SoftmaxPart, b: SoftmaxPart, *, impl: Impl = "auto") -> SoftmaxPart:
    """Merge attention over two disjoint sets of keys into attention over their union, exactly.

    Associative and commutative; a part without keys (lse = -inf, its `out` is never looked at) is
    the neutral element, and merging two of those gives out 0 and lse -inf, with gradients 0.
    Differentiable in all four tensors, not twice. Source: Milakov and Gimelshein, "Online
    normalizer calculation for softmax" (2018), Section 3.1; RAT's Listing 1 merges so.

    Args:
        a: out (B, T, H, D), or any leading axes, in any floating-point dtype; lse (B, T, H), the
            natural log of the sum of exponentials, float32 (float64 if out is).
        b: the same of the other keys, of the same shapes, dtypes and device.
        impl: "auto", "reference" or "triton".

    Returns:
        The merged out and lse, in the dtypes of `a`.

    Raises:
        TypeError: if a dtype is not as above.
        ValueError: if a shape, a device or `impl` is not as above.
    """
    _check(a, b)
    chosen = resolve_impl("merge_softmax", impl, a.out.device)
    return SoftmaxPart(*_differentiable(a.out, a.lse, b.out, b.lse, chosen))


def _check(a: SoftmaxPart, b: SoftmaxPart) -> None:
    for name, part in (("a", a), ("b", b)):
        if not isinstance(part, SoftmaxPart):
            raise TypeError(
                f"merge_softmax: {name} must be a SoftmaxPart, got {type(part).__name__}"
            )
        check_floating("merge_softmax", f"{name}.out", part.out)
        check_floating("merge_softmax", f"{name}.lse", part.lse)
    lse_dtype = accumulation_dtype(a.out.dtype)
    for name, part in (("a", a), ("b", b)):
        if part.out.dtype != a.out.dtype:
            raise TypeError(
                "merge_softmax: a.out and b.out must have one floating-point dtype, "
                f"got {a.out.dtype} and {b.out.dtype}"
            )
        if part.lse.dtype != lse_dtype:
            raise TypeError(
                f"merge_softmax: {name}.lse must be {lse_dtype} when out is {a.out.dtype}, "
                f"got {part.lse.dtype}"
            )
        if part.out.ndim < 2 or part.out.shape != a.out.shape:
            raise ValueError(
                "merge_softmax: a.out and b.out must have one shape (B, T, H, D), "
                f"got {tuple(a.out.shape)} and {tuple(b.out.shape)}"
            )
        if part.lse.shape != a.out.shape[:-1]:
            raise ValueError(
                f"merge_softmax: {name}.lse must be {tuple(a.out.shape[:-1])}, "
                f"got {tuple(part.lse.shape)}"
            )
        for field, value in (("out", part.out), ("lse", part.lse)):
            if value.device != a.out.device:
                raise ValueError(
                    f"merge_softmax: {name}.{field} is on {value.device}, a.out on {a.out.device}"
                )


@torch.library.custom_op("mezzo::merge_softmax", mutates_args=())
def _merge_softmax(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, impl: str
) -> tuple[Tensor, Tensor]:
    parts = [t.contiguous() for t in (out_a, lse_a, out_b, lse_b)]
    if impl == "triton":
        from mezzo_core.ops.online_softmax import triton

        return triton.merge_softmax_fwd(*parts)
    return reference.merge_softmax_fwd(*parts)


@_merge_softmax.register_fake
def _(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, impl: str
) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


@torch.library.custom_op("mezzo::merge_softmax_bwd", mutates_args=())
def _merge_softmax_bwd(
    dout: Tensor,
    dlse: Tensor,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = [t.contiguous() for t in (dout, dlse, out_a, lse_a, out_b, lse_b)]
    if impl == "triton":
        from mezzo_core.ops.online_softmax import triton

        return triton.merge_softmax_bwd(*tensors)
    return reference.merge_softmax_bwd(*tensors)


@_merge_softmax_bwd.register_fake
def _(
    dout: Tensor,
    dlse: Tensor,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    da, dlse_a = out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)
    return da, dlse_a, out_b.new_empty(out_b.shape), lse_b.new_empty(lse_b.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *parts, ctx.impl = inputs
    ctx.save_for_backward(*parts)


def _backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    return (*_merge_softmax_bwd(dout, dlse, *ctx.saved_tensors, ctx.impl), None)


_differentiable = register_gradient(_merge_softmax, _backward, _save)
