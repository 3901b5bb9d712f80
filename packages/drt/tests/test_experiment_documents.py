"""experiments/train_documents.py, rehearsed on a CPU: what is written, and what a full run is."""

import runpy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.bench import Options
from mezzo_core.papers.measurement import How, read_result
from mezzo_drt.claims import ANSWERS, DOCUMENTS, REPRODUCTION
from mezzo_drt.recipes import RECIPES

SCRIPT = Path(__file__).parents[1] / "experiments/train_documents.py"
script = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
RATES = dict(islice(script.RATES.items(), 2))  # a best of two shows what a best of four does
script.measure.__globals__["RATES"] = RATES


def dry_run(folder, *words):
    command = ["--dry-run", "--out", str(folder / "cpu"), "--runs", str(folder / "runs"), *words]
    return script.run_script(
        script.measure, "Train.", tuple(script.MODELS), trains=True, words=command
    )


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsal")
    assert dry_run(folder, "--seeds", "1") == 0
    return read_result(folder / "cpu/long_documents_byte.json")


def test_every_model_has_a_perplexity_at_every_length(rehearsal):
    assert [model for _, model in rehearsal.rows] == list(script.MODELS)
    assert rehearsal.columns == ("2048", "4096", "16384")
    assert (rehearsal.seeds, rehearsal.how) == ([1], How.SCALED_DOWN)
    for _, model in rehearsal.rows:
        cells = [rehearsal.cell(model, column) for column in rehearsal.columns]
        assert all(len(cell) == 1 for cell in cells)
        assert len({cell[0].value for cell in cells}) == 3, "more context, other perplexities"
        assert len(cells[0][0].details["steps"]["train"]) == 2


@pytest.mark.parametrize(
    "id",
    [
        *("table1.eval_2k", "table1.eval_16k", "table1.eval_unknown", "table1.ablation"),
        *("claim.beyond_16k", "claim.parameter_efficiency", "claim.multiple_retrievals"),
        "claim.extrapolation",
    ],
)
def test_the_claims_read_the_names_that_the_script_writes(rehearsal, id):
    (answer,) = (each for each in ANSWERS if each.id == f"drt.{id}")
    printed = REPRODUCTION.published.by_id[answer.id]
    run = SimpleNamespace(results={DOCUMENTS: rehearsal})
    ours = answer.evidence[0].find(run, printed)
    assert ours is not None
    assert answer.evidence[0].criterion(printed, ours).summary


def test_a_second_run_trains_only_what_is_missing(tmp_path, capsys):
    name = "DRT w/ random retriever"
    assert dry_run(tmp_path, "--seeds", "0", "--models", name) == 0
    assert dry_run(tmp_path, "--seeds", "0", "1", "--models", name) == 0
    lines = capsys.readouterr().out.splitlines()
    seeds = [line.split(":")[1].split(",")[-1] for line in lines]
    assert seeds == [" 0"] * (len(RATES) + 3) + [" 1"] * 3


def test_a_full_run_is_the_recipe_on_the_given_text():
    options = Options(Path("out"), (), torch.device("cuda"), dry_run=False, data="texts")
    for architecture in script.MODELS.values():
        ours = script.configure(architecture, options)
        recipe = RECIPES[f"small_{architecture}"]()
        kept = ("model", "data", "batch_size", "steps", "optim", "eval_every", "checkpoint_every")
        assert replace(recipe, **{name: getattr(ours, name) for name in kept}) == ours
        assert ours.seq_len == int(script.TRAINED_AT)
        assert ours.data.source == "texts"
        assert ours.model == replace(recipe.model, vocab_size=257), "that of bytes"
