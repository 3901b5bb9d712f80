"""RAT's layers and configurations, each argument replaced: one clear line, or a right result."""

import pytest
import torch
from mezzo_core.testing.arguments import check_fields, check_module_arguments
from mezzo_rat import LinearRNNConfig, RATConfig, RATReversedConfig

D, C = 4, 8
MIXERS = {
    "rat": RATConfig(chunk_size=2, head_dim=D, num_groups=1),
    "linear_rnn": LinearRNNConfig(span=8),
    "reversed": RATReversedConfig(chunk_size=2, head_dim=D, gate_rank=2, span=4),
}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MIXERS)
def test_each_argument_replaced_is_named_or_right(name):
    check_module_arguments(MIXERS[name].build(C))


@pytest.mark.parametrize("name", MIXERS)
def test_each_field_replaced_is_named_or_right(name):
    check_fields(MIXERS[name], lambda config: config.build(C)(draw(2, 3, C))[0])
