"""The tolerance that all kernels are tested with, and a helper that computes gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def assert_close(
    name: str,
    out: Tensor,
    ref: Tensor,
    *,
    rtol: float,
    low: Tensor | None = None,
    factor: float = 2.0,
    atol: float = 0.0,
) -> None:
    """Assert that `out` equals `ref` up to rounding, by two bounds that must both hold.

    The first is a bound of the norm: ||out - ref|| <= rtol ||ref||. The second, if `low` is given,
    is FlashAttention's bound of the largest error:
    max|out - ref| <= factor max|low - ref| + 2 max|(ref + 0.3) - 0.3 - ref|, where the last term is
    computed in the dtype of `out`. Infinities must be at the same places with the same signs. A NaN
    in either tensor fails.

    Args:
        name: name of the tensor in the message.
        out: the tensor under test.
        ref: the expected tensor of the same shape: the reference computed in float32 or float64.
        rtol: 5e-3 for bfloat16 and float16 (8e-3 for gradients of gates), 1e-5 for float32.
        low: the reference computed in the dtype of `out`; its error sets the second bound.
        factor: how many times the error of `low` is allowed; 3 for the backward of a recurrence.
        atol: additional root mean square error that is allowed, for a tensor whose exact value is
            zero (dq of a sequence of one token).

    Raises:
        AssertionError: if a bound is exceeded; the message has the numbers.
    """
    assert out.shape == ref.shape, f"{name}: shape {tuple(out.shape)}, expected {tuple(ref.shape)}"
    assert not out.isnan().any(), f"{name}: {int(out.isnan().sum())} of {out.numel()} are NaN"
    assert not ref.isnan().any(), f"{name}: the reference holds NaN"
    infinite = ref.isinf()
    same = torch.equal(out.isinf(), infinite) and torch.equal(
        out[infinite].double(), ref[infinite].double()
    )
    assert same, f"{name}: infinities differ from the reference's"
    finite = ~infinite
    ref64, error = ref[finite].double(), (out[finite].double() - ref[finite].double())
    if error.numel() == 0:
        return
    norm, allowed = error.norm().item(), rtol * ref64.norm().item() + atol * error.numel() ** 0.5
    assert norm <= allowed, (
        f"{name}: ||out - ref|| = {norm:.3e} > {allowed:.3e}, which is {rtol:g} ||ref||"
        + (f" + {atol:g} sqrt(numel)" if atol else "")
        + _where(out, ref)
    )
    if low is None:
        return
    rounded = ref[finite].to(out.dtype)
    rounding = (rounded + 0.3 - 0.3 - rounded).double().abs().max().item()
    spread = (low[finite].double() - ref64).abs().max().item()
    worst, limit = error.abs().max().item(), factor * spread + 2 * rounding
    assert worst <= limit, (
        f"{name}: max|out - ref| = {worst:.3e} > {limit:.3e}, which is {factor:g} max|low - ref| "
        f"({spread:.3e}) + 2 max rounding ({rounding:.3e}){_where(out, ref)}"
    )


def _where(out: Tensor, ref: Tensor) -> str:
    """Tell which part of a tensor holds all errors above a tenth of the largest."""
    error = (out.double() - ref.double()).abs().nan_to_num(0.0)
    large = (error > error.max() / 10).nonzero()
    first, last = large.amin(0).tolist(), large.amax(0).tolist()
    ranges = (f"{i}:{j + 1}" for i, j in zip(first, last, strict=True))
    return f"; the large errors lie in [{', '.join(ranges)}] of {tuple(out.shape)}"


def grads(
    fn: Callable[..., Any], inputs: Mapping[str, Tensor | None], dout: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Call `fn(**inputs)` and compute the gradients of its inputs from that of its output.

    Args:
        fn: returns a tensor, or a tuple of tensors and Nones.
        inputs: arguments by name. Gradients are computed for the floating-point tensors, on
            detached tensors with the same strides; the caller's tensors stay unchanged.
        dout: gradient of the output. For a tuple of outputs it is a tuple of the same length, with
            None for an output without a gradient.

    Returns:
        The result of `fn`, and the gradients by name, which are zeros for an unused input.
    """
    leaves = {
        name: value.detach().requires_grad_(value.is_floating_point())
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }
    outputs = fn(**leaves)
    single = isinstance(outputs, Tensor)
    pairs = [(outputs, dout)] if single else list(zip(outputs, dout, strict=True))
    pairs = [(out, d) for out, d in pairs if out is not None and d is not None]
    wanted = {
        name: value
        for name, value in leaves.items()
        if isinstance(value, Tensor) and value.requires_grad
    }
    found = torch.autograd.grad(
        [out for out, _ in pairs],
        list(wanted.values()),
        [d.to(out.dtype) for out, d in pairs],
        materialize_grads=True,
    )
    return outputs, dict(zip(wanted, found, strict=True))
