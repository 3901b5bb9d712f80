"""What all three mixers keep: the laws of the contract, and their words for bad input."""

import dataclasses
import math

import pytest
import torch
from mezzo_core.testing.laws import LAWS, each_law
from mezzo_rat import LinearRNNConfig, RATConfig, RATReversedConfig
from torch import nn

C = 16
AS_OTHERS = [
    RATConfig(1, head_dim=4, rope="token"),
    RATConfig(4, head_dim=8, num_groups=1, rope="token"),
    RATConfig(5, head_dim=4, rope=None),
    RATConfig(4, head_dim=8, gate_rank=4, num_heads=6),
    RATReversedConfig(4, head_dim=4, gate_rank=3, span=4),
]
"""Forms with the same state as another form."""
CONFIGS = [
    RATConfig(4, head_dim=4),
    RATConfig(1, head_dim=4),
    RATConfig(3, head_dim=4, num_groups=None, gate_rank=4),
    RATConfig(100, head_dim=4, num_groups=None, gate_rank=3, rope=None),
    LinearRNNConfig(span=8),
    RATReversedConfig(3, head_dim=4, gate_rank=3, span=4),
    RATReversedConfig(20, head_dim=4, gate_rank=3, span=4),
    RATReversedConfig(1, head_dim=4, gate_rank=3, span=4),
    *AS_OTHERS,
]
KINDS = [RATConfig(4, head_dim=4), LinearRNNConfig(span=8), RATReversedConfig(4, head_dim=4)]


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


@pytest.mark.parametrize(("config", "law"), each_law(CONFIGS, AS_OTHERS), ids=str)
def test_every_law_is_kept(config, law):
    LAWS[law](build(config))


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
        (RATConfig(4, head_dim=4), {"gate_rank": 4, "rope_base": 1.0, "rope": "token", "span": 4}),
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


@torch.no_grad()
def test_shapes_of_continued_states_can_be_had_without_numbers(mixer):
    mixer.to("meta")
    x = torch.zeros(2, 7, C, device="meta")
    y, state = mixer(x, mixer(x, mixer.init_state(2))[1])
    assert y.shape == mixer.step(x[:, :1], mixer.reserve(state, 1)).expand(2, 7, C).shape
