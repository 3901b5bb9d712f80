"""What all three mixers keep: isolation, bad input, no tokens, torch.func, float64."""

import dataclasses
import math

import pytest
import torch
from mezzo_core.testing import assert_close
from mezzo_core.testing.laws import check_isolated, check_plain_state
from mezzo_rat import LinearRNNConfig, RATConfig, RATReversedConfig
from torch import nn
from torch.func import functional_call, grad

C = 16
CONFIGS = [
    RATConfig(4, head_dim=4),
    RATConfig(1, head_dim=4, rope="token"),
    RATConfig(100, head_dim=4, num_groups=None, gate_rank=3, rope=None),
    LinearRNNConfig(span=8),
    RATReversedConfig(4, head_dim=4, gate_rank=3, span=4),
    RATReversedConfig(1, head_dim=4, gate_rank=3, span=4),
]
KINDS = [CONFIGS[0], CONFIGS[3], CONFIGS[4]]
BROKEN = [math.nan, math.inf]


def build(config):
    torch.manual_seed(0)
    mixer = config.build(C)
    for part in mixer.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.5)
    return mixer


@pytest.fixture(params=CONFIGS, ids=str)
def mixer(request):
    return build(request.param)


@pytest.fixture(params=KINDS, ids=lambda config: type(config).__name__)
def kind(request):
    return build(request.param)


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("at", [0, 6, 13])
def test_a_broken_token_leaves_the_past_and_other_rows_bit_equal(mixer, at, value):
    x = torch.randn(2, 14, C)
    broken = x.clone()
    broken[0, at, 3] = value
    expected, y = mixer(x)[0], mixer(broken)[0]
    assert torch.equal(y[0, :at], expected[0, :at])
    assert torch.equal(y[1], expected[1])
    assert not y[0, at].isfinite().any()


def test_a_broken_token_or_gradient_stays_where_it_may_be(mixer):
    check_isolated(mixer, 14)


@pytest.mark.parametrize("value", BROKEN)
def test_a_broken_sequence_leaves_those_packed_beside_it_bit_equal(mixer, value):
    x, borders = torch.randn(1, 14, C), torch.tensor([0, 5, 5, 11, 14])
    broken = x.clone()
    broken[0, 6, 3] = value
    expected, y = (mixer(part, cu_seqlens=borders)[0] for part in (x, broken))
    assert torch.equal(y[:, :6], expected[:, :6])
    assert torch.equal(y[:, 11:], expected[:, 11:])
    assert not y[:, 6].isfinite().any()


@pytest.mark.parametrize("value", BROKEN)
def test_broken_padding_reaches_no_output_no_state_and_no_gradient(mixer, value):
    x, lengths = torch.randn(2, 9, C), torch.tensor([5, 0])
    before = mixer(torch.randn(2, 6, C), mixer.init_state(2))[1]
    broken = x.clone()
    broken[0, 5:], broken[1] = value, value
    results = []
    for part in (x, broken):
        part.requires_grad_()
        y, state = mixer(part, before, lengths=lengths)
        held = [field for field in state if field.is_floating_point()]
        loss = y[0, :5].square().sum() + sum(field.square().sum() for field in held)
        found = torch.autograd.grad(loss, [part, *mixer.parameters()], retain_graph=True)
        results.append([y[0, :5], *state, *found])
    for clean, got in zip(*results, strict=True):
        assert torch.equal(got, clean)


@pytest.mark.parametrize("shape", [(2, 0, C), (0, 5, C), (1, 0, C)])
def test_no_tokens_and_no_rows_have_empty_outputs_and_gradients(kind, shape):
    forms = [{}, {"state": kind.init_state(shape[0])}]
    if shape[0] == 1:
        forms.append({"cu_seqlens": torch.tensor([0, 0, 0])})
    for form in forms:
        x = torch.randn(shape, requires_grad=True)
        y, state = kind(x, **form)
        assert y.shape == shape
        dx, *found = torch.autograd.grad(y.sum(), [x, *kind.parameters()])
        assert dx.shape == shape
        assert all((weight == 0).all() for weight in found)
        if state is not None and shape[1] == 0:
            assert all(torch.equal(a, b) for a, b in zip(state, form["state"], strict=True))


def test_torch_func_gives_the_gradients_of_autograd(kind):
    x = torch.randn(2, 10, C)
    weights = {name: weight.detach() for name, weight in kind.named_parameters()}

    def loss(weights, x):
        return functional_call(kind, weights, (x,))[0].square().sum()

    found, dx = grad(loss, argnums=(0, 1))(weights, x)
    x.requires_grad_()
    expected = torch.autograd.grad(kind(x)[0].square().sum(), [*kind.parameters(), x])
    for name, got, truth in zip([*found, "x"], [*found.values(), dx], expected, strict=True):
        assert_close(name, got, truth, rtol=1e-6)


def test_float64_steps_equal_the_whole_to_its_last_digits(kind):
    kind.double()
    x = torch.randn(1, 40, C, dtype=torch.float64)
    with torch.no_grad():
        state, outputs = kind.reserve(kind.init_state(1), 40), []
        for t in range(40):
            outputs.append(kind.step(x[:, t : t + 1], state))
        assert_close("y", torch.cat(outputs, 1), kind(x)[0], rtol=1e-13)


def test_a_state_of_other_sizes_or_another_mixer_is_refused():
    mixers = [build(config) for config in KINDS]
    x = torch.randn(1, 3, C)
    for mixer in mixers:
        for other in mixers:
            if other is not mixer:
                with pytest.raises(TypeError, match="state must be a"):
                    mixer(x, other.init_state(1))
        with pytest.raises(ValueError, match=r"state\.\w+ must be \(1"):
            mixer(x, mixer.init_state(3))
        with pytest.raises(ValueError, match=r"state\.\w+ must be \(1"):
            mixer(x, dataclasses.replace(mixer.config).build(2 * C).init_state(1))


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (RATConfig(4, head_dim=4), {"chunk_size": 4, "head_dim": 4, "num_groups": 2}),
        (RATConfig(4, head_dim=4), {"gate_rank": 4, "rope_base": 1.0, "rope": "token"}),
        (LinearRNNConfig(), {"span": 4}),
        (RATReversedConfig(4, head_dim=4), {"chunk_size": 4, "head_dim": 4, "gate_rank": 4}),
        (RATReversedConfig(4, head_dim=4), {"span": 4, "rope_base": 1.0}),
    ],
    ids=str,
)
def test_fields_of_another_kind_are_refused_by_name_when_it_is_built(config, changes):
    for name, good in changes.items():
        dataclasses.replace(config, **{name: good}).build(C)
        wrong = ["16", True, math.nan, math.inf, 0, -1, [4], object()]
        if isinstance(good, int):
            wrong.append(1.5)
        for value in wrong:
            with pytest.raises((TypeError, ValueError), match=f"{name} must be") as caught:
                dataclasses.replace(config, **{name: value}).build(C)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_gates_of_another_kind_are_refused_by_name(kind, dtype):
    bias = torch.ones(C, dtype=dtype)
    kind.gate_bias = nn.Parameter(bias, requires_grad=False)
    with pytest.raises(TypeError, match="gate_bias must be floating-point"):
        kind(torch.randn(1, 3, C))


def test_a_state_is_of_plain_tensors_whatever_the_weights_are(mixer):
    check_plain_state(mixer)


@torch.no_grad()
def test_shapes_of_continued_states_can_be_had_without_numbers(mixer):
    mixer.to("meta")
    x = torch.zeros(2, 7, C, device="meta")
    y, state = mixer(x, mixer(x, mixer.init_state(2))[1])
    assert y.shape == mixer.step(x[:, :1], mixer.reserve(state, 1)).expand(2, 7, C).shape
