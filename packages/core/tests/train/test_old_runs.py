"""What an older version wrote is still read: a run of 0.1, when blocks were parts of no stack."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from mezzo_core.config_json import from_json
from mezzo_core.files import read_json
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.train.loop import train
from safetensors.torch import load_file

OLD_RUN = Path(__file__).parent / "old_run"


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(OLD_RUN, tmp_path / "run"))


def test_an_old_model_loads_whole():
    stored = load_file(OLD_RUN / "model" / "model.safetensors")
    weights = load_model(OLD_RUN / "model")[0].state_dict()
    assert any(name.startswith("blocks.") for name in stored)
    for name, weight in stored.items():
        assert weights[name.replace("blocks.", "stack.blocks.")].equal(weight), name


def test_an_old_run_goes_on_from_its_checkpoint(run):
    config = replace(from_json(read_json(run / "config.json")), steps=2)
    before = load_model(run / "model")[0].state_dict()
    train(config, run, quiet=True)
    after = load_model(run / "model")[0].state_dict()
    assert all(after[name].equal(weight) for name, weight in before.items())


def test_an_old_run_can_be_trained_further(run):
    config = replace(from_json(read_json(run / "config.json")), steps=4)
    assert train(config, run, quiet=True).steps == 4
