"""HGRN2 with learned bounds: their definition, and the contract of their stack."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from mezzo_core.nn import LMConfig, MLPConfig, init_weights
from mezzo_core.testing import assert_close
from mezzo_core.testing.laws import LAWS
from mezzo_core.train.config import OptimConfig
from mezzo_core.train.optim import build_optimizer
from mezzo_gsa.hgrn2 import HGRN2Config, lower_bounds
from mezzo_gsa.hgrn2_stack import HGRN2StackConfig
from torch.utils.checkpoint import checkpoint

C, L = 16, 3
CONFIG = HGRN2StackConfig(L, HGRN2Config(8), MLPConfig("swiglu", hidden=24))


@pytest.fixture
def stack():
    """A stack whose bounds differ from channel to channel."""
    torch.manual_seed(0)
    stack = CONFIG.build(C)
    init_weights(stack, std=0.3)
    torch.nn.init.normal_(stack.bound_logits)
    return stack


@pytest.mark.parametrize("law", LAWS)
def test_every_law_is_kept(stack, law):
    LAWS[law](stack)


def test_the_norms_of_layers_have_the_epsilon_that_is_told():
    stack = HGRN2StackConfig(L, HGRN2Config(8), norm_eps=0.25).build(C)
    assert {norm.eps for block in stack.blocks for norm in (block.mixer_norm, block.mlp_norm)} == {
        0.25
    }


def test_steps_of_a_layer_whose_norm_has_a_hook_equal_the_whole(stack):
    stack.blocks[1].mixer.norm.register_forward_hook(lambda norm, inputs, y: 2 * y)
    LAWS["step"](stack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bound_is_the_sum_of_the_shares_of_the_layers_below(stack, dtype):
    """Also where it is so near to one that their difference has no digits in float32."""
    with torch.no_grad():
        stack.bound_logits.mul_(10)
    shares = stack.to(dtype).bound_logits.double().view(L, C).softmax(0)
    first, *others = stack.log_bounds()
    assert first is None
    for layer, bounds in enumerate(others, start=1):
        assert_close("bound", bounds[0].double(), shares[:layer].sum(0).log(), rtol=1e-6)
        assert_close("rest", bounds[1].double(), shares[layer:].sum(0).log(), rtol=1e-6)


@pytest.mark.parametrize("by_step", [False, True])
def test_each_channel_of_a_layer_has_its_bound(by_step):
    torch.manual_seed(0)
    mixer = HGRN2Config(head_dim=4, lower_bound=0.3).build(4).double()  # 0.3 is not used
    init_weights(mixer, std=0.5)
    x, beta = torch.randn(1, 6, 4, dtype=torch.float64), torch.tensor([0.0, 0.25, 0.5, 0.999])
    q, logits, v = (x[0] @ w.T for w in mixer.in_proj.weight.split([4, 4, 4]))
    alpha = beta + (1 - beta) * torch.sigmoid(logits)
    S, outs = torch.zeros(4, 4, dtype=torch.float64), []
    for t in range(6):
        S = alpha[t, :, None] * S + torch.outer(1 - alpha[t], v[t])
        outs.append(S.T @ F.silu(q[t]))
    o = torch.stack(outs)
    expected = mixer.out_proj(o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    log_bounds = torch.stack([beta.double().log(), (-beta.double()).log1p()])
    if by_step:
        state = mixer.init_state(1)
        with torch.no_grad():
            steps = [mixer.step(x[:, t : t + 1], state, log_bounds) for t in range(6)]
        assert_close("y", torch.cat(steps, 1)[0], expected, rtol=1e-6)
    else:
        assert_close("y", mixer(x, log_bounds=log_bounds)[0][0], expected, rtol=1e-6)


def test_it_starts_as_a_model_with_constant_bounds():
    learned = LMConfig(31, C, stack=CONFIG).build()
    mixers = tuple(HGRN2Config(8, bound) for bound in lower_bounds(L))
    constant = LMConfig(31, C, mixers, CONFIG.mlp).build()
    weights = learned.state_dict()
    assert not weights.pop("stack.bound_logits").any()
    constant.load_state_dict(weights)
    tokens = torch.arange(20).view(2, 10)
    assert_close("logits", learned(tokens).logits, constant(tokens).logits, rtol=1e-5)
    assert learned.flops_per_token(9) == constant.flops_per_token(9)
    torch.nn.init.ones_(learned.stack.bound_logits)
    init_weights(learned)
    assert not learned.stack.bound_logits.any()


@pytest.mark.parametrize("size", [1.0, 300.0])
def test_gradients_reach_every_weight_and_are_finite_for_bounds_near_zero_and_one(stack, size):
    with torch.no_grad():
        stack.bound_logits.mul_(size)
    stack(torch.randn(2, 9, C))[0].square().sum().backward()
    for name, weight in stack.named_parameters():
        assert weight.grad.isfinite().all(), name
        assert weight.grad.any(), name
    if size == 1:
        assert stack.bound_logits.grad.all()


def test_blocks_that_are_computed_twice_in_the_reentrant_way_have_the_same_gradients(stack):
    x = torch.randn(2, 9, C, requires_grad=True)

    def again(forward, *tensors, **named):
        return checkpoint(partial(forward, **named), *tensors, use_reentrant=True)

    def gradients():
        stack.zero_grad()
        stack(x)[0].square().sum().backward()
        return [weight.grad for weight in stack.parameters()]

    wanted = gradients()
    for block in stack.blocks:
        block.forward = partial(again, block.forward)
    torch.testing.assert_close(gradients(), wanted)


def test_bounds_are_learned_without_weight_decay():
    model = LMConfig(31, C, stack=CONFIG).build()
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    decays = {
        id(weight): group["weight_decay"]
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    assert decays[id(model.stack.bound_logits)] == 0
    tokens = torch.arange(20).view(2, 10)
    model.loss(tokens, tokens.roll(-1, 1)).backward()
    optimizer.step()
    assert model.stack.bound_logits.all()


def test_a_compiled_block_and_bfloat16_weights_work(stack):
    x = torch.randn(2, 9, C)
    expected = stack(x)[0]
    for block in stack.units():
        block.compile(fullgraph=True, backend="aot_eager")
    assert_close("compiled", stack(x)[0], expected, rtol=1e-6)
    stack.bfloat16()
    y, state = stack(x.bfloat16(), stack.init_state(2))
    with torch.no_grad():
        stepped = stack.step(x[:, :1].bfloat16(), state)
    assert y.dtype == stepped.dtype == torch.bfloat16
    assert {part.dtype for layer in state for part in layer} == {torch.float32}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HGRN2StackConfig(1), "num_layers must be 2 or more, got 1"),
        (
            lambda: HGRN2StackConfig(2, HGRN2Config(lower_bound=0.5)),
            "mixer must have lower_bound 0, as the stack learns the bounds, got 0.5",
        ),
        (lambda: HGRN2StackConfig(2).build(C), "head_dim must divide d_model = 16, got 128"),
        (lambda: HGRN2StackConfig(2, norm_eps=-1.0), r"norm_eps must be positive .*, got -1\.0"),
        (lambda: HGRN2StackConfig(2, norm_eps=float("nan")), "norm_eps must be positive .* nan"),
    ],
)
def test_impossible_configurations_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_state_of_another_depth_is_refused(stack):
    state = stack.init_state(2)
    with pytest.raises(TypeError, match="state must be a tuple of 3"):
        stack(torch.zeros(2, 1, C), state[:2])
    with torch.no_grad(), pytest.raises(TypeError, match="state must be a tuple of 3"):
        stack.step(torch.zeros(2, 1, C), state[:2])
