"""The trainings of experiments/, rehearsed on a CPU: what is written, and what a full run is."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.bench import Options
from mezzo_core.papers.measurement import How, read_result
from mezzo_recurrent_transformer import RecurrentBlockConfig
from mezzo_recurrent_transformer.claims import ANSWERS, NORMALIZED, RAW, REPRODUCTION, in_nats
from mezzo_recurrent_transformer.criteria import by_layers
from mezzo_recurrent_transformer.recipes import RECIPES

SCRIPT = Path(__file__).parents[1] / "experiments/train_small.py"
small = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
EVERY = (*small.MODELS, *small.NORMS)


def dry_run(folder, *words):
    folders = ["--out", str(folder / "results/cpu"), "--runs", str(folder / "runs")]
    command = ["--dry-run", *folders, *words]
    return small.run_script(small.measure, "Train.", EVERY, trains=True, words=command)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsal")
    assert dry_run(folder, "--seeds", "1") == 0
    names = ("train_small", "train_rates")
    return {name: read_result(folder / f"results/cpu/{name}.json") for name in names}


def test_every_model_is_trained_with_the_given_seeds(rehearsal):
    ours = rehearsal["train_small"]
    assert [model for _, model in ours.rows] == list(small.MODELS)
    assert (ours.seeds, ours.columns, ours.how) == ([1], ("Val. PPL",), How.SCALED_DOWN)
    assert all(len(entry.details["steps"]["train"]) == 2 for entry in ours.entries)
    assert ours.setting.startswith("12 layers: C 64; 6 layers: C 64; T 16, 2 steps of 2 sequences")


def test_the_ablation_is_trained_at_each_rate(rehearsal):
    ours = rehearsal["train_rates"]
    assert [model for _, model in ours.rows] == [NORMALIZED, RAW]
    assert ours.columns == ("1e-3", "3e-3", "1e-2")
    values = [
        e.value for model in (NORMALIZED, RAW) for c in ours.columns for e in ours.cell(model, c)
    ]
    assert len(set(values)) == len(values) == 2 * 3


@pytest.mark.parametrize("id", ["table1", "table4", "claim.delta_ce_12", "claim.delta_ce_6"])
def test_the_claims_read_the_names_that_the_script_writes(rehearsal, id):
    (answer,) = (each for each in ANSWERS if each.id == f"rt.{id}")
    printed, ours = REPRODUCTION.published.by_id[answer.id], in_nats(rehearsal["train_small"])
    if id.startswith("table"):
        known = by_layers(printed).column("Val CE").keys() & {model for _, model in ours.rows}
        assert len(known) == 4
    judged = answer.evidence[0].criterion(printed, ours)
    pairs = 3 if id.startswith("table") else 1
    assert judged.summary.startswith(f"of {pairs} neighbours")


def test_the_claims_of_the_ablation_read_what_the_script_writes(rehearsal):
    for id in ("rmsnorm_lr", "no_rmsnorm_lr"):
        (answer,) = (each for each in ANSWERS if each.id == f"rt.claim.{id}")
        printed = REPRODUCTION.published.claim(answer.id)
        judged = answer.evidence[0].criterion(printed, rehearsal["train_rates"])
        assert "of 2 neighbours" in judged.summary


def test_a_second_run_trains_only_what_is_missing(tmp_path, capsys):
    name = "Transformer, 12 layers"
    assert dry_run(tmp_path, "--seeds", "0", "--models", name) == 0
    assert dry_run(tmp_path, "--seeds", "0", "1", "--models", name) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1].split(",")[-1] for line in lines] == [" 0", " 1"]


def test_a_full_run_is_the_recipe_on_the_given_text():
    options = Options(Path("out"), (), torch.device("cuda"), dry_run=False, data="texts")
    for size, architecture in small.MODELS.values():
        ours = small.configure(size, architecture, options)
        recipe = RECIPES[f"{size}_{architecture}"]()
        kept = replace(recipe, data=ours.data, eval_batches=None, checkpoint_every=10**9)
        assert ours == kept
        assert ours.data.source == "texts"
    raw = small.configure("small_12", small.NORMS[RAW], options).model.stack.block
    assert raw == RecurrentBlockConfig(persistent_norm=False)
