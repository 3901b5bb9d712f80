"""A training step of every paper's tiny model can be a CUDA graph, and then trains as it did."""

import json
from dataclasses import replace
from importlib import import_module

import pytest
from mezzo_core.train.loop import train

pytestmark = pytest.mark.gpu

RECIPES = {
    "mezzo_rat": ("tiny_rat_l16", "tiny_attention"),
    "mezzo_gsa": ("tiny_gsa", "tiny_gla", "tiny_hgrn2", "tiny_retnet", "tiny_abc"),
    "mezzo_recurrent_transformer": ("tiny_recurrent", "tiny_transformer"),
    "mezzo_drt": ("tiny_no_gumbel", "tiny_random", "tiny_base"),
}


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package, all in RECIPES.items() for name in all]
)
def test_losses_are_those_of_launched_steps(package, name, tmp_path):
    recipe = import_module(f"{package}.recipes").RECIPES[name]()
    config = replace(recipe, steps=12, eval_batches=1, batch_size=2, compile=False)
    found = []
    for cuda_graph in (False, True):
        out = tmp_path / str(cuda_graph)
        train(replace(config, cuda_graph=cuda_graph), out, quiet=True)
        rows = map(json.loads, (out / "log.jsonl").read_text().splitlines())
        found.append([row["loss"] for row in rows if "loss" in row])
    launched, replayed = found
    # Noise in the choice of chunks may fall otherwise.
    assert replayed == pytest.approx(launched, rel=5e-2 if name == "tiny_random" else 1e-2)
