"""The paper's fine-tuning of Mistral 7B, without its weights."""

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.train.optim import learning_rate
from mezzo_gsa.convert import TARGETS
from mezzo_gsa.convert.recipe import MISTRAL_7B, t2r


def count(config):
    with torch.device("meta"):
        return config.build().num_parameters()


def test_mistral_has_its_published_number_of_weights():
    assert count(MISTRAL_7B) == 7_241_732_096


@pytest.mark.parametrize(
    ("target", "added"),
    [
        ("gsa", 32 * (4096 * 8 * 64 + 4096)),  # Wα and the norm over all channels
        (
            "gla",
            32 * (4096 * 16 + 16 * 8 * 128 + 8 * 128 + 128),
        ),  # low-rank gate, a head's norm
        ("retnet", 32 * 128),  # the text: no additional parameters
        ("supra", 32 * (128 * 128 + 128 + 2 * 4096)),  # the map of queries and keys, GroupNorm
    ],
)
def test_a_target_adds_little(target, added):
    assert count(t2r(target).model) == 7_241_732_096 + added
    assert added / 7_241_732_096 < 0.01


@pytest.mark.parametrize("target", TARGETS)
def test_the_setting_is_the_papers(target):
    config = t2r(target)
    assert config.name == f"t2r_{target}"
    assert config.seq_len == 2048
    assert config.batch_size * config.seq_len == 2**21
    assert config.steps * 2**21 == pytest.approx(20e9, rel=1e-3)
    rates = [learning_rate(config.optim, step, config.steps) for step in range(config.steps)]
    assert rates.index(max(rates)) == 999
    assert max(rates) == pytest.approx(3e-5)
    assert rates[0] == pytest.approx(3e-8)
    assert rates[-1] == pytest.approx(3e-6)
    assert config.optim.weight_decay == 0.01


def test_another_transformer_and_a_short_run():
    small = LMConfig(257, 32, (AttentionConfig(8),) * 2)
    config = t2r("gsa", small, num_tokens=2**21 * 10)
    assert (config.model.d_model, len(config.model.mixers), config.steps) == (32, 2, 10)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"target": "gas"}, "target must be of gsa, .*did you mean gsa"),
        (
            {"target": "gsa", "num_tokens": 1000},
            "num_tokens must fill a step of 2,097,152, got",
        ),
    ],
)
def test_what_cannot_be_trained_is_named(asked, message):
    with pytest.raises(UserError, match=message):
        t2r(**asked)
