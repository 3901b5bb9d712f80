"""A full run of experiments/train_small.py trains the recipe."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from mezzo_core.reproduction import Options
from mezzo_recurrent_transformer import RecurrentBlockConfig
from mezzo_recurrent_transformer.recipes import RECIPES

SCRIPT = Path(__file__).parents[1] / "experiments/train_small.py"
small = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_a_full_run_is_the_recipe_on_the_given_text():
    options = Options(Path("out"), (), torch.device("cuda"), dry_run=False, data="texts")
    for size, architecture in small.MODELS.values():
        ours = small.configure(size, architecture, options)
        recipe = RECIPES[f"{size}_{architecture}"]()
        kept = replace(recipe, data=ours.data, eval_batches=None, checkpoint_every=10**9)
        assert ours == kept
        assert ours.data.source == "texts"
    raw = small.configure("small_12", small.NORMS["without RMSNorm"], options).model.stack.block
    assert raw == RecurrentBlockConfig(persistent_norm=False)
