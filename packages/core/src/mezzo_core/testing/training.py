"""The laws of training: gradients that are right, in every precision, with padding or no tokens."""

from copy import deepcopy

import torch
from torch import Tensor
from torch.func import functional_call, grad
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError, checkpoint

from mezzo_core.nn.contract import AbstractSequenceModule
from mezzo_core.testing.isolation import decode_step, normal
from mezzo_core.testing.numerics import assert_close


def check_training(module: AbstractSequenceModule) -> None:
    """Assert that one can train from a state made in inference mode, with the same gradients.

    The gradient of a gradient must exist, or be refused in our words. And computing activations
    again in the backward (activation checkpointing) must change no gradient.
    """
    x = normal(module, (2, 9, module.d_model), 0).requires_grad_()
    found: list[Tensor] = []
    for made in (torch.inference_mode, torch.no_grad):
        with made():
            _, state = module(x, module.init_state(2))
        found += torch.autograd.grad(module(x, state)[0].square().sum(), x, create_graph=True)
    assert_close("dx after inference mode", *found, rtol=1e-5)
    told = "no second gradient"
    try:
        torch.autograd.grad(found[1].square().sum(), x)
    except RuntimeError as error:
        told = str(error)
    assert "no second gradient" in told, told
    (plain,) = torch.autograd.grad(module(x)[0].square().sum(), x)
    try:
        y, _ = checkpoint(module, x, use_reentrant=False)
        (again,) = torch.autograd.grad(y.square().sum(), x)
    except CheckpointError as error:
        raise AssertionError(f"activations cannot be computed again: {error}") from error
    assert torch.equal(again, plain), "activations computed again gave another gradient"


def check_gradients(module: AbstractSequenceModule) -> None:
    """Assert that the gradients of the input and all weights are the derivatives, in float64.

    They are compared in a random direction with a difference quotient, and with those that
    `torch.func` and two segments give. This finds a detached part even if its weights have a
    gradient, and a detached state. The copy that is tested lies on the CPU.
    """
    module = deepcopy(module).cpu().double()
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    x, dy = (normal(module, (1, 70, module.d_model), i).double() for i in (0, 1))

    def loss(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        return (functional_call(module, weights, (x,))[0] * dy).sum()

    given = {"x": x.requires_grad_(), **dict(module.named_parameters())}
    found = torch.autograd.grad(
        (module(x)[0] * dy).sum(), list(given.values()), materialize_grads=True
    )
    dx, by_func = grad(loss, argnums=(0, 1))(x.detach(), weights)
    first, state = module(x[:, :33], module.init_state(1))
    rest, _ = module(x[:, 33:], state)
    in_two = torch.autograd.grad(
        (torch.cat([first, rest], 1) * dy).sum(), list(given.values()), materialize_grads=True
    )
    for name, ours, *others in zip(given, found, (dx, *by_func.values()), in_two, strict=True):
        for way, theirs in zip(("torch.func", "two segments"), others, strict=True):
            assert_close(f"d{name} by {way}", theirs, ours, rtol=1e-9, atol=1e-12)
    draw = torch.Generator().manual_seed(0)
    towards = [
        torch.randn(v.shape, generator=draw, dtype=v.dtype).to(v.device) for v in given.values()
    ]
    values, moved = [v.detach() for v in given.values()], []
    with torch.no_grad():
        for size in (1e-6, -1e-6):
            nearby, *others = (v + size * t for v, t in zip(values, towards, strict=True))
            moved.append(loss(nearby, dict(zip(weights, others, strict=True))).item())
    quotient = (moved[0] - moved[1]) / 2e-6
    slopes = torch.stack([(g * t).sum() for g, t in zip(found, towards, strict=True)])
    told, allowed = slopes.sum().item(), 1e-5 * slopes.norm().item()
    assert abs(quotient - told) <= allowed, (
        f"the gradients say {told:.6e} in a random direction, the outputs change by {quotient:.6e}"
    )


def check_padding_gradients(module: AbstractSequenceModule) -> None:
    """Assert that padding gets no gradient, and reaches none of the weights or the real tokens.

    The gradients are of the real outputs and of the state after them. Padding holds NaN, infinity
    and a large number, and must leave every gradient bit-equal.
    """
    B, T = 3, 9
    lengths = torch.tensor([9, 0, 4], device=normal(module, (1,), 0).device)
    padding = torch.arange(T, device=lengths.device) >= lengths[:, None]
    x, dy = (normal(module, (B, T, module.d_model), i) for i in (0, 1))
    results = []
    for bad in (0.0, float("nan"), float("inf"), 1e38):
        given = x.masked_fill(padding[..., None], bad).requires_grad_()
        y, state = module(given, module.init_state(B), lengths=lengths)
        loss = (y[~padding] * dy[~padding]).sum()
        for held in tree_leaves(state):
            if held.requires_grad:
                loss = loss + held.to(loss).square().sum()
        wanted = {"x": given, **dict(module.named_parameters())}
        # The host's gradients of an offloaded state would come at any time, and three terms that
        # are added in another order may round differently.
        with torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
        assert not found[0][padding].any(), f"{bad} in padding gets a gradient"
        results.append(found)
        for name, clean, got in zip(wanted, results[0], found, strict=True):
            assert torch.equal(got, clean), f"{bad} in padding reached the gradient of {name}"


def check_empty(module: AbstractSequenceModule) -> None:
    """Assert that no tokens, no rows and empty packed sequences have empty outputs and gradients.

    And that after no tokens the state is as before: the next tokens have the same outputs.
    """
    C = module.d_model
    for shape in ((2, 0, C), (0, 5, C), (0, 0, C), (1, 0, C)):
        x = normal(module, shape, 0).requires_grad_()
        first = normal(module, (shape[0], 3, C), 1)
        before = module(first, module.init_state(shape[0]))[1]
        y, after = module(x, before)
        outputs = [y, module(x)[0]]
        if shape[0] == 1:
            borders = torch.zeros(3, dtype=torch.int32, device=x.device)
            outputs.append(module(x, cu_seqlens=borders)[0])
        for out in outputs:
            assert out.shape == shape, f"{shape} gave outputs of {tuple(out.shape)}"
            (dx,) = torch.autograd.grad(out.sum(), x, materialize_grads=True)
            assert dx.shape == shape, f"{shape} gave a gradient of {tuple(dx.shape)}"
        if shape == (0, 5, C):
            with torch.no_grad():
                stepped = decode_step(module, x[:, :1], module.reserve(module.init_state(0), 1))
            assert stepped.shape == x[:, :1].shape, f"a step of no rows gave {stepped.shape}"
        if shape[1] == 0:
            nexts = [module(first, state)[0] for state in (before, after)]
            assert torch.equal(*nexts), "no tokens changed the state"


def check_precision(module: AbstractSequenceModule) -> None:
    """Assert that float64 is float64 everywhere, and that bfloat16 weights give bfloat16 outputs.

    In float64 steps must equal the whole to the last digits, which a float32 state or constant
    would not allow. The copies that are tested lie on the CPU.
    """
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float64):
            low = deepcopy(module).cpu().to(dtype)
            x = normal(low, (1, 19, low.d_model), 0).to(dtype)
            room, whole = low.reserve(low.init_state(1), 19), low(x)[0]
            steps = [decode_step(low, token, room) for token in x.split(1, 1)]
            kinds = {whole.dtype, *(step.dtype for step in steps)}
            assert kinds == {dtype}, f"with {dtype} weights the outputs are {kinds}"
    assert_close("float64, step by step", torch.cat(steps, 1), whole, rtol=1e-13)
