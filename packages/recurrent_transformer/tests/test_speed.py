"""Each timed form computes what the layer computes."""

from dataclasses import replace

import pytest
import torch
from mezzo_recurrent_transformer import RecurrentBlockConfig
from mezzo_recurrent_transformer.reproduction import speed
from mezzo_recurrent_transformer.reproduction.speed import DRY, SPEEDS
from mezzo_recurrent_transformer.schedule import tiled_forward


@pytest.mark.parametrize("persistent_norm", [True, False])
@pytest.mark.parametrize("T", [0, 1, 7, 32])
def test_what_is_timed_is_the_layer(persistent_norm, T):
    torch.manual_seed(0)
    config = RecurrentBlockConfig(4, persistent_norm=persistent_norm, residual_scale=0.5)
    block = config.build(12).double()
    x = torch.randn(3, T, 12, dtype=torch.float64)
    z, _ = block(x)
    torch.testing.assert_close(tiled_forward(block, x), z)
    torch.testing.assert_close(speed.by_definition(block, x), z)


@pytest.mark.gpu
def test_all_speeds_run_on_a_gpu(tmp_path):
    small = replace(DRY, device="cuda", d_model=128, head_dim=64)
    for name in SPEEDS.makers:
        ours = SPEEDS.measure(name, small, tmp_path, print)
        assert all(entry.value == "OOM" or entry.value > 0 for entry in ours.entries)
