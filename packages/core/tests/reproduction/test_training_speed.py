"""A training step is whole: forward, backward and the optimizer, on the tokens that it counts."""

import pytest
import torch
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.reproduction.training_speed import time_training, training_step

CONFIG = LMConfig(vocab_size=37, d_model=16, mixers=(AttentionConfig(head_dim=8),))


def test_a_step_learns_its_tokens():
    torch.manual_seed(0)
    model = CONFIG.build()
    losses = []
    right = model.loss

    def loss(tokens, targets):
        assert tokens.shape == targets.shape == (2, 8)
        losses.append(right(tokens, targets))
        return losses[-1]

    model.loss = loss
    step = training_step(model, 2, 8)
    for _ in range(60):
        step()
    assert losses[-1] < 0.7 * losses[0]
    assert all(weight.grad is None for weight in model.parameters())


def test_the_speed_counts_the_tokens_of_a_batch():
    for found in time_training(CONFIG.build(), 2, 8, passes=2):
        assert found.tokens_per_second == pytest.approx(2 * 8 / found.step_ms * 1e3)
        assert (found.host_ms, found.peak_gb) == (None, None)
