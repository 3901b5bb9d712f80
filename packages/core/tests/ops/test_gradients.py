"""Gradients of registered ops: by autograd and by torch.func, in eager code and when traced."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from mezzo_core.ops.gradients import register_gradient, undispatched
from mezzo_core.ops.linear_cross_entropy import linear_cross_entropy
from mezzo_core.testing import assert_close, grads
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


def head_loss(x, weight):
    return linear_cross_entropy(x, weight, torch.tensor([1, 0, 6, 2, -100])).loss


@pytest.fixture
def inputs():
    return {"x": torch.randn(5, 4), "weight": torch.randn(7, 4)}


def test_the_gradient_of_torch_func_is_that_of_autograd(inputs):
    _, expected = grads(head_loss, inputs, torch.ones(()))
    found = torch.func.grad(head_loss, argnums=(0, 1))(*inputs.values())
    for name, gradient in zip(inputs, found, strict=True):
        assert_close(f"d{name}", gradient, expected[name], rtol=1e-6)


@pytest.mark.parametrize("watched", [False, True])
def test_a_penalty_on_a_gradient_is_refused_whatever_has_gradients(inputs, watched):
    """The gradient from above is a constant, so only saved tensors tell that it is refused."""
    for wanted in ({"x"}, {"weight"}, {"x", "weight"}):
        given = {name: x.clone().requires_grad_(name in wanted) for name, x in inputs.items()}
        leaves = [given[name] for name in wanted]
        with Watch() if watched else nullcontext():
            found = torch.autograd.grad(head_loss(**given), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="no second gradient"):
            sum(gradient.square().sum() for gradient in found).backward()


def test_transforms_of_torch_func_refuse_it_too(inputs):
    def penalty(first, second, value):
        slope = torch.func.grad(lambda x: head_loss(**{**inputs, second: value, first: x}))
        return slope(value if first == second else inputs[first]).square().sum()

    for first, second in product(inputs, repeat=2):
        with pytest.raises(RuntimeError, match="no second gradient"):
            torch.func.grad(partial(penalty, first, second))(inputs[second])


calls = []


@torch.library.custom_op("mezzo_test::cube", mutates_args=())
def cube(x: Tensor, factor: float) -> Tensor:
    """Return factor x^3, and remember the call."""
    calls.append(factor)
    return factor * x**3


cube.register_fake(lambda x, factor: torch.empty_like(x))


def save(ctx, inputs, output):
    x, ctx.factor = inputs
    ctx.save_for_backward(x)


differentiable_cube = register_gradient(
    cube, lambda ctx, dy: (dy * 3 * ctx.factor * ctx.saved_tensors[0] ** 2, None), save
)


class Watch(TorchDispatchMode):
    """Remembers the ops that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def names_of(call):
    """Return the names of PyTorch's ops that are dispatched."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.name for event in profile.events()}


def test_in_eager_code_the_op_is_not_dispatched():
    x = torch.randn(3, requires_grad=True)
    assert "mezzo_test::cube" in names_of(lambda: cube(x, 2.0))
    for each in (x, x.detach(), torch.nn.Parameter(x.detach())):
        assert "mezzo_test::cube" not in names_of(lambda each=each: differentiable_cube(each, 2.0))


def test_the_gradient_in_eager_code_is_that_of_the_op():
    x = torch.randn(3, requires_grad=True)
    expected = torch.autograd.grad(cube(x, 2.0).sum(), x)[0]
    (found,) = torch.autograd.grad(differentiable_cube(x, 2.0).sum(), x, create_graph=True)
    assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match="no second gradient"):
        torch.autograd.grad(found.sum(), x)
    assert not differentiable_cube(x.detach(), 2.0).requires_grad
    with torch.no_grad():
        assert not differentiable_cube(x, 2.0).requires_grad


def test_whatever_watches_or_traces_sees_the_op():
    x = torch.randn(3)
    with Watch() as watch:
        differentiable_cube(x, 2.0)
    assert watch.seen == [torch.ops.mezzo_test.cube.default]
    calls.clear()
    assert differentiable_cube(x.to("meta"), 2.0).is_meta
    with FakeTensorMode() as mode:
        differentiable_cube(mode.from_tensor(x), 2.0)
    fake = mode.from_tensor(x)
    assert type(differentiable_cube(fake, 2.0)) is type(fake)  # outside of its mode
    assert not calls, "the body was run without data"


@torch.library.custom_op("mezzo_test::square_and_root", mutates_args=())
def square_and_root(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x^2, and what the backward needs: 2 x, and an empty tensor."""
    return x**2, 2 * x, x.new_empty(0)


square_and_root.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x), x.new_empty(0)))


def save_slope(ctx, inputs, output):
    _, slope, nothing = output
    assert nothing is None or not nothing.numel()
    ctx.save_for_backward(slope, nothing)


differentiable_square = register_gradient(
    square_and_root, lambda ctx, dy, *unused: (dy * ctx.saved_tensors[0],), save_slope,
    run=lambda x: (x**2, 2 * x, None), num_results=1,
)  # fmt: skip


def test_results_for_the_backward_alone_are_not_returned():
    """Nor need they be tensors in eager code."""
    x = torch.randn(3)
    expected = 2 * x
    for context in (nullcontext(), Watch()):
        leaf = x.clone().requires_grad_()
        with context:
            (found,) = differentiable_square(leaf)
            assert torch.equal(torch.autograd.grad(found.sum(), leaf)[0], expected)
            (found,) = differentiable_square(x)
            assert torch.equal(found, x**2)
    assert torch.equal(torch.func.grad(lambda x: differentiable_square(x)[0].sum())(x), expected)


def test_a_forward_gradient_is_refused_rather_than_lost():
    x = torch.randn(3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(3))
        with pytest.raises((NotImplementedError, RuntimeError)):
            differentiable_cube(dual, 2.0)
        with torch.no_grad(), pytest.raises((NotImplementedError, RuntimeError)):
            differentiable_cube(dual, 2.0)


def test_without_a_gradient_autograd_does_not_hear_of_the_call():
    x = torch.randn(3, requires_grad=True)
    assert "EagerGradient" in names_of(lambda: differentiable_cube(x, 2.0))
    assert "EagerGradient" not in names_of(lambda: differentiable_cube(x.detach(), 2.0))
    with torch.no_grad():
        assert "EagerGradient" not in names_of(lambda: differentiable_cube(x, 2.0))


def test_an_undispatched_op_is_dispatched_only_to_what_watches():
    call, x = undispatched(cube), torch.randn(3)
    assert "mezzo_test::cube" not in names_of(lambda: call(x, 2.0))
    with Watch() as watch:
        found = call(x, 2.0)
    assert torch.equal(found, 2 * x**3)
    assert watch.seen == [torch.ops.mezzo_test.cube.default]
    calls.clear()
    assert call(x.to("meta"), 2.0).is_meta
    assert not calls, "the body was run without data"
