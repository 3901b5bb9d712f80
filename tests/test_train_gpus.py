"""Each paper's script that trains whole models on one GPU and on two, rehearsed."""

from pathlib import Path

import pytest
import torch
from mezzo_core.bench import Options, processes
from mezzo_core.papers.measurement import read_result
from mezzo_core.testing.scripts import run_script
from mezzo_core.train.build import micro_batches
from mezzo_core.train.distributed import World

CPU = torch.device("cpu")
SCRIPTS = sorted((Path(__file__).parents[1] / "packages").glob("*/experiments/train_gpus.py"))


@pytest.fixture(params=SCRIPTS, ids=lambda path: path.parents[1].name)
def script(request):
    return request.param


def test_every_model_has_a_row_in_every_setting(script, tmp_path, monkeypatch):
    asked = []

    def measured(config, count, folder, device):
        asked.append(config.name)
        return {"tokens_per_second": 1.0, "peak_gb": None, "steps": {"train": [[1, 2.0]]}}

    monkeypatch.setattr(processes, "measure_processes", measured)
    assert run_script(script, "--dry-run", "--out", str(tmp_path / "cpu")) == 0
    rows = read_result(tmp_path / "cpu/train_gpus.json").rows
    assert len(rows) == len(asked) == 4 * len(processes.SETTINGS)
    assert all(name.startswith("tiny_") for name in asked)


def test_a_full_run_keeps_the_micro_batches_of_its_recipes(script, tmp_path, monkeypatch):
    recipes = {}
    monkeypatch.setattr(processes, "measure_settings", lambda options, its: recipes.update(its))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run_script(script, "--out", str(tmp_path)) == 0
    assert len(recipes) == 4
    for recipe in recipes.values():
        short = processes.shortened(recipe, Options(tmp_path, (), CPU, dry_run=False))
        for count in (1, 2):
            parts = micro_batches(short, World(CPU, size=count))
            tokens = parts * recipe.micro_batch_size * recipe.seq_len * count
            assert tokens == processes.TOKENS
