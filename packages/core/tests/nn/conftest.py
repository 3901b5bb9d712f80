import pytest
import torch
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from toys.running_mean import RunningMeanConfig

from .kinds import KINDS, build


@pytest.fixture
def mixer_config() -> RunningMeanConfig:
    return RunningMeanConfig()


@pytest.fixture
def config(mixer_config: RunningMeanConfig) -> LMConfig:
    """Two layers, an odd vocabulary, and weights large enough that logits are far apart."""
    return LMConfig(
        vocab_size=37,
        d_model=16,
        mixers=(mixer_config, RunningMeanConfig(max_gain=2.0)),
        mlp=MLPConfig(hidden=24),
        init_std=0.5,
    )


@pytest.fixture
def model(config: LMConfig):
    torch.manual_seed(0)
    return config.build()


@pytest.fixture(params=KINDS)
def any_model(request, config: LMConfig):
    return build(config, request.param)
