"""A layer is timed whole, in each phase."""

import pytest
import torch
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.stack import BlocksConfig
from mezzo_core.reproduction.layer_speed import build_layer, time_layer
from toys.own_keys import OwnKeysConfig

CPU = torch.device("cpu")
C = 16
CONFIG = AttentionConfig(head_dim=8)


@pytest.fixture
def layer():
    return build_layer(CONFIG, C, CPU)


def test_a_forward_needs_no_gradient_and_a_training_has_one_of_every_weight(layer, monkeypatch):
    seen, asked = [], []
    grad = torch.autograd.grad

    def run(x):
        seen.append((tuple(x.shape), x.dtype, torch.is_grad_enabled(), x.requires_grad))
        return layer(x)

    def counted(outputs, inputs, *rest, **options):
        asked.append({id(each) for each in inputs})
        return grad(outputs, inputs, *rest, **options)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    forward = time_layer(layer, run, "forward", 2, 8, passes=3, seconds=0.0)
    assert set(seen) == {((2, 8, C), torch.float32, False, False)}
    assert not asked
    seen.clear()
    train = time_layer(layer, run, "train", 3, 4, passes=2, seconds=0.0)
    assert set(seen) == {((3, 4, C), torch.float32, True, True)}
    assert len(asked) == len(seen)
    assert {id(weight) for weight in layer.parameters()} <= asked[0]
    assert (len(forward), len(train)) == (3, 2)
    assert all(0 < each.ms_p20 <= each.ms <= each.ms_p80 for each in forward + train)


@pytest.mark.parametrize("config", [OwnKeysConfig(), BlocksConfig((OwnKeysConfig(),) * 2)])
@pytest.mark.usefixtures("poison_memory")
def test_a_block_and_a_stack_are_timed_alone(config):
    alone = build_layer(config, C, CPU, alone=True)
    x = torch.randn(2, 5, C)
    torch.testing.assert_close(alone(x), alone.mixer(x)[0])
    assert len(time_layer(alone, alone, "train", 2, 5, passes=2, seconds=0.0)) == 2
