import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.train.config import OptimConfig
from mezzo_core.train.optim import build_optimizer, learning_rate
from torch import nn


def rates(config, steps):
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_the_rate_rises_to_lr_and_ends_at_min_lr():
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_fraction=0.1)
    found = rates(config, 100)
    assert found[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert found[9] == 1.0
    assert found[99] == pytest.approx(0.1)
    # Half of the cosine is done after 45 of the 90 steps that follow the warm-up.
    assert found[54] == pytest.approx(0.55)
    assert found[31] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 22 / 90)) / 2)
    assert rates(OptimConfig(lr=1.0, warmup_fraction=0.29), 100)[28] == 1.0  # 28.999999999999996


@settings(max_examples=settings().max_examples // 4)
@given(st.integers(1, 400), st.floats(0, 1))
def test_the_rate_rises_then_falls_and_stays_between(steps, warmup):
    config = OptimConfig(lr=2e-3, min_lr=1e-5, warmup_fraction=warmup)
    found = rates(config, steps)
    top = found.index(max(found))
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)
    assert min(found) > 0
    assert max(found) <= 2e-3


def test_only_matrices_decay():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.project = nn.Linear(4, 4)
            self.norm = nn.RMSNorm(4)
            self.gate_bias = nn.Parameter(torch.zeros(2, 2))

    model = Gated()
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1))
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {"embed.weight", "project.weight"}
    assert {names[id(p)] for p in kept["params"]} == {"project.bias", "norm.weight", "gate_bias"}


def test_moments_that_exist_from_the_start_change_nothing():
    def steps(optimizer_of):
        torch.manual_seed(0)
        model = nn.Linear(6, 6)
        optimizer = optimizer_of(model)
        for _ in range(3):
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight

    config = OptimConfig(weight_decay=0.1)
    ours = steps(lambda model: build_optimizer(model, config))
    torchs = steps(
        lambda model: torch.optim.AdamW(
            [
                {"params": [model.weight], "weight_decay": 0.1},
                {"params": [model.bias], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            fused=True,
        )
    )
    assert torch.equal(ours, torchs)
