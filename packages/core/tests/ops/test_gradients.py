"""Gradients that every op must have: of torch.func, of nothing, and of others than the NaN's."""

import math

import pytest
import torch
from mezzo_core.ops.linear_scan import linear_scan
from mezzo_core.ops.online_softmax import SoftmaxPart, merge_softmax
from mezzo_core.testing import assert_close, grads


def scan(a, x, h):
    return linear_scan(a, x, initial_state=h, chunk_size=4).out


def merge(a, b, lse):
    return merge_softmax(SoftmaxPart(a, lse), SoftmaxPart(b, 1 - lse)).out


PROBLEMS = {
    scan: {"a": (2, 6, 3), "x": (2, 6, 3), "h": (2, 3)},
    merge: {"a": (2, 5, 3, 4), "b": (2, 5, 3, 4), "lse": (2, 5, 3)},
}
ops = pytest.mark.parametrize("op", PROBLEMS, ids=lambda op: op.__name__)


@ops
def test_the_gradient_of_torch_func_is_that_of_autograd(op):
    inputs = {name: torch.randn(shape) for name, shape in PROBLEMS[op].items()}
    dout = torch.randn_like(op(**inputs))
    _, expected = grads(op, inputs, dout)
    names = list(inputs)
    found = torch.func.grad(
        lambda *args: (op(*args) * dout).sum(), argnums=tuple(range(len(names)))
    )(*inputs.values())
    for name, gradient in zip(names, found, strict=True):
        assert_close(f"d{name}", gradient, expected[name], rtol=1e-6)


@ops
def test_a_second_gradient_is_refused_rather_than_zero(op):
    first, *others = [torch.randn(shape) for shape in PROBLEMS[op].values()]

    def slope(other):
        return torch.func.grad(lambda x: op(x, other, *others[1:]).square().sum())(first).sum()

    with pytest.raises(RuntimeError, match="no second gradient"):
        torch.func.grad(slope)(others[0])


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


def test_a_lost_row_of_a_merge_is_lost_alone():
    parts = [torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3)]
    clean = merge(*parts)
    for i in range(3):
        spoiled = [x.clone() for x in parts]
        spoiled[i][1, 2, 0] = math.nan
        hit = torch.zeros(2, 5, 3, dtype=torch.bool)
        hit[1, 2, 0] = True
        out = merge(*spoiled)
        assert torch.equal(out[~hit], clean[~hit])
        assert out[hit].isnan().all()
