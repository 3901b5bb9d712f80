"""Gradients that every op must have: of torch.func, and of others than the NaN's."""

import pytest
import torch
from mezzo_core.ops.linear_cross_entropy import linear_cross_entropy
from mezzo_core.testing import assert_close, grads


def head_loss(x, weight):
    return linear_cross_entropy(x, weight, torch.tensor([1, 0, 6, 2, -100])).loss


PROBLEMS = {head_loss: {"x": (5, 4), "weight": (7, 4)}}
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
