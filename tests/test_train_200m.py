"""The long training: its models differ in their mixers alone, and recall counts what it says."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.data import NO_TARGET
from mezzo_core.reproduction import Options

SCRIPT = Path(__file__).parents[1] / "packages/core/experiments/train_200m.py"
long = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
FULL = Options(Path("out"), (), torch.device("cuda"), dry_run=False, data="corpus", tokens=1000)
VOCAB = 32_000


@pytest.fixture
def configs(monkeypatch):
    tokenizer = SimpleNamespace(vocab_size=VOCAB)
    monkeypatch.setitem(long.configure.__globals__, "load_tokenizer", lambda _: tokenizer)
    return long.configure(FULL)


def test_full_runs_differ_in_their_mixers_alone(configs):
    assert len({config.name for config in configs.values()}) == len(configs) == 6
    first = configs["Attention"]
    for config in configs.values():
        model = replace(config.model, mixers=first.model.mixers)
        assert replace(config, name=first.name, model=model) == first
        with torch.device("meta"):
            assert 183e6 < config.model.build().num_parameters() < 188e6
    assert len({config.model.mixers for config in configs.values()}) == len(configs)


def test_a_full_run_has_a_billion_tokens_of_the_recipe(configs):
    config, recipe = configs["RAT(L=16)"], long.paper_200m(4096)
    assert config.steps * config.batch_size * config.seq_len == pytest.approx(1e9, rel=0.001)
    assert config.optim == recipe.optim
    assert config.compile
    assert config.steps / config.checkpoint_every == pytest.approx(10, rel=0.01)


def test_recalled_targets_end_a_rare_pair_that_came_long_before():
    rows = torch.tensor(
        [[1, 2, 3, 1, 2, 4, 1, 2, 4, 9, 1, 3], [1, 2, 5, 8, 7, 8, 1, 2, 7, 6, 6, 6]]
    )
    tokens, targets = rows[:, :-1], rows[:, 1:]
    kept = (long.recalled(tokens, targets, 3, 9) != NO_TARGET).nonzero()
    assert kept.tolist() == [[0, 7]], "(2, 4); both rows have (1, 2)"
    kept = (long.recalled(tokens, targets, 1, 9) != NO_TARGET).nonzero()
    assert kept.tolist() == [[0, 7], [1, 10]]
    assert (long.recalled(tokens, targets, 4, 9) == NO_TARGET).all(), "the last time counts"
    kept = (long.recalled(tokens, targets, 1, 3) != NO_TARGET).nonzero()
    assert kept.tolist() == [[1, 10]], "the others came 3 tokens before"
