"""The trainings of experiments/: what a full run is, and what a short one tells."""

import runpy
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.reproduction import Options
from mezzo_rat.recipes import RECIPES, train_config
from mezzo_rat.recipes import small as small_size

SCRIPTS = Path(__file__).parents[1] / "experiments"
small, short = (
    SimpleNamespace(**runpy.run_path(str(SCRIPTS / f"{name}.py")))
    for name in ("train_small", "train_200m")
)
FULL = Options(Path("out"), (), torch.device("cuda"), dry_run=False, data="texts")


def test_full_small_runs_are_as_the_docstring_says():
    recipe = small_size()
    for T in (1024, 2048, 4096):
        for config in small.configure(small.IN_CONTEXTS, T, FULL).values():
            assert (config.seq_len, config.batch_size * T) == (T, 8192)
            assert (config.steps, config.eval_batches) == (3000, None)
            assert (config.optim, config.data.source) == (recipe.optim, "texts")
            with torch.device("meta"):
                assert 40e6 < config.model.build().num_parameters() < 42e6
    long = small.configure(small.IN_LONG, 4096, FULL, rope_base=500_000.0)
    assert long["Attention"].model.mixers[0].rope_base == 500_000
    nope = small.configure(small.IN_POSITIONS, 1024, FULL)
    assert nope["RAT(L=16)-SWA NoPE"].model.mixers[0].rope is None


@pytest.mark.parametrize("name", short.NAMES.values())
def test_a_full_run_is_the_recipe_but_for_its_length_and_batch(name):
    ours, recipe = train_config(f"200m_{name}", short.SHORT, name), RECIPES[f"200m_{name}"]()
    names = (field.name for field in fields(recipe))
    changed = {each for each in names if getattr(ours, each) != getattr(recipe, each)}
    assert changed == {"steps", "batch_size", "eval_every", "eval_batches"}
    assert ours.batch_size * ours.seq_len == 131_072
    assert recipe.batch_size * recipe.seq_len == 8 * 131_072
    assert ours.compile
