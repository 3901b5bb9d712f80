"""experiments/train_documents.py: what a full run is."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from mezzo_core.reproduction import Options
from mezzo_drt.recipes import RECIPES

SCRIPT = Path(__file__).parents[1] / "experiments/train_documents.py"
script = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_a_full_run_is_the_recipe_on_the_given_text():
    options = Options(Path("out"), (), torch.device("cuda"), dry_run=False, data="texts")
    for architecture in script.MODELS.values():
        ours = script.configure(architecture, options)
        recipe = RECIPES[f"small_{architecture}"]()
        kept = ("model", "data", "batch_size", "steps", "optim", "eval_every", "checkpoint_every")
        assert replace(recipe, **{name: getattr(ours, name) for name in kept}) == ours
        assert ours.seq_len == script.TRAINED_AT
        assert ours.data.source == "texts"
        assert ours.model == replace(recipe.model, vocab_size=257), "that of bytes"
