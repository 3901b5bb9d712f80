"""Gradients of the linear scan: of torch.func, of no tokens, and beside a token that is NaN."""

import math

import pytest
import torch
from mezzo_core.ops.scan import linear_scan
from mezzo_core.testing import assert_close, grads

SHAPES = {"a": (2, 6, 3), "x": (2, 6, 3), "h": (2, 3)}


def scan(a, x, h):
    return linear_scan(a, x, initial_state=h, chunk_size=4).out


def test_the_gradient_of_torch_func_is_that_of_autograd():
    inputs = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    dout = torch.randn_like(scan(**inputs))
    _, expected = grads(scan, inputs, dout)
    found = torch.func.grad(lambda *args: (scan(*args) * dout).sum(), argnums=(0, 1, 2))(
        *inputs.values()
    )
    for name, gradient in zip(inputs, found, strict=True):
        assert_close(f"d{name}", gradient, expected[name], rtol=1e-6)


def test_a_second_gradient_is_refused_rather_than_zero():
    a, x, h = (torch.randn(shape) for shape in SHAPES.values())

    def slope(x):
        return torch.func.grad(lambda a: scan(a, x, h).square().sum())(a).sum()

    with pytest.raises(RuntimeError, match="no second gradient"):
        torch.func.grad(slope)(x)


def test_the_gradient_of_no_tokens_is_empty():
    inputs = {"a": torch.randn(2, 0, 3), "x": torch.randn(2, 0, 3), "h": torch.randn(2, 3)}
    _, gradients = grads(scan, inputs, torch.ones(2, 0, 3))
    assert [gradients[name].shape for name in inputs] == [(2, 0, 3), (2, 0, 3), (2, 3)]


@pytest.mark.parametrize("name", ["a", "x"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_scan_keeps_what_is_lost_in_its_chunk_and_in_its_sequence(name, bad):
    inputs = {"a": torch.rand(1, 12, 3), "x": torch.randn(1, 12, 3)}
    cu_seqlens = torch.tensor([0, 3, 3, 9, 12])
    clean = linear_scan(**inputs, cu_seqlens=cu_seqlens, chunk_size=4)
    for t in range(12):
        spoiled = {**inputs, name: inputs[name].clone()}
        spoiled[name][:, t] = bad
        out, final = linear_scan(**spoiled, cu_seqlens=cu_seqlens, chunk_size=4)
        start, end = ((0, 3), (3, 9), (9, 12))[(t >= 3) + (t >= 9)]
        end = min(end, start + 4) if t < start + 4 else end
        same = torch.ones(12, dtype=torch.bool)
        same[t:end] = False
        assert torch.equal(out[:, same], clean.out[:, same])
        if name == "x":
            assert not out[:, t].isfinite().any()
        others = [s for s, last in enumerate((3, 3, 9, 12)) if last != end]
        assert torch.equal(final[others], clean.final_state[others])
