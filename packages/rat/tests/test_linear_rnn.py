"""The linear RNN: its definition, its start and its sizes."""

import pytest
import torch
from mezzo_core.testing import assert_close
from mezzo_rat import LinearRNNConfig, RATConfig, RATReversedConfig

C = 16


@pytest.fixture
def mixer():
    torch.manual_seed(0)
    return LinearRNNConfig(span=8).build(C)


def test_it_is_rat_with_one_chunk(mixer):
    rat = RATConfig(1000, head_dim=4).build(C)
    with torch.no_grad():
        rat.in_proj.weight[: 3 * C] = mixer.in_proj.weight
        rat.gate_bias.copy_(mixer.gate_bias)
        rat.out_proj.weight.copy_(mixer.out_proj.weight)
    x = torch.randn(2, 30, C)
    assert_close("y", mixer(x)[0], rat(x)[0].detach(), rtol=1e-5)


@pytest.mark.parametrize("config", [LinearRNNConfig, RATReversedConfig])
@pytest.mark.parametrize("span", [32, 4096])
def test_gates_start_with_memories_that_span_what_is_told(config, span):
    u = config(span=span).build(1024).gate_bias.detach().exp()
    assert 1 - 1e-5 <= u.min() < span / 20
    assert 0.95 * span - 1 < u.max() <= span - 1 + 1e-4 * span


def test_weights_and_flops_are_those_of_four_squares(mixer):
    assert sum(p.numel() for p in mixer.parameters()) == 4 * C**2 + C
    # 8 C^2 of projections; f h + (1 - f) v takes two products and a sum, z h one product.
    assert mixer.flops_per_token(7) == 8 * C**2 + 4 * C
    assert mixer.state_bytes(1) == mixer.state_bytes(10**6)
