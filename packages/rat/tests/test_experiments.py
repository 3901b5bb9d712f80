"""The trainings of experiments/, rehearsed on a CPU: what is written, and what a full run is."""

import runpy
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from mezzo_core.papers.measurement import How, read_result
from mezzo_rat.claims import ANSWERS, REPRODUCTION
from mezzo_rat.recipes import PAPER_NAMES, RECIPES, train_config

SCRIPTS = Path(__file__).parents[1] / "experiments"
six, short = (
    SimpleNamespace(**runpy.run_path(str(SCRIPTS / f"{name}.py")))
    for name in ("train_six", "train_200m")
)


def dry_run(script, models, folder, *words):
    folders = ["--out", str(folder / "results/cpu"), "--runs", str(folder / "runs")]
    command = ["--dry-run", *folders, *words]
    return script.run_script(script.measure, "Train.", models, trains=True, words=command)


def test_the_six_are_trained_with_each_seed(tmp_path):
    assert dry_run(six, six.MODELS, tmp_path, "--seeds", "0", "1") == 0
    ours = read_result(tmp_path / "results/cpu/train_six_bpe.json")
    assert [model for _, model in ours.rows] == list(PAPER_NAMES.values())
    assert ours.seeds == [0, 1]
    assert (ours.how, ours.columns) == (How.SCALED_DOWN, ("Val. PPL",))
    assert all(len(entry.details["steps"]["train"]) == 2 for entry in ours.entries)
    committed = REPRODUCTION.results_folder / "nvidia-h200/train_six_bpe.json"
    assert read_result(committed).columns == ours.columns


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsal")
    assert dry_run(short, tuple(short.NAMES), folder) == 0
    return read_result(folder / "results/cpu/train_200m.json")


def test_a_short_training_gives_hours_and_losses(rehearsal):
    assert rehearsal.columns == short.COLUMNS
    assert [model for _, model in rehearsal.rows] == list(short.NAMES)
    for model in short.NAMES:
        (hours,) = rehearsal.cell(model, "Hours on one GPU for 15B tokens")
        assert hours.value == pytest.approx(
            15e9 / hours.details["tokens_per_second"] / 3600, rel=1e-3
        )
        losses = [loss for _, loss in hours.details["steps"]["train"]]
        assert losses[-1] < losses[0] - 0.1
        assert rehearsal.typical(model, "Train. loss") == pytest.approx(losses[-1], abs=1e-3)
        assert rehearsal.typical(model, "Val. PPL") < 257


def test_the_claim_reads_what_the_script_writes(rehearsal):
    (answer,) = (each for each in ANSWERS if each.id == "rat.claim.train_time_200m")
    judged = answer.evidence[0].criterion(REPRODUCTION.published.claim(answer.id), rehearsal)
    assert judged.summary.startswith("expected 15 to 70 hours on one GPU: RNN ")


@pytest.mark.parametrize("name", short.NAMES.values())
def test_a_full_run_is_the_recipe_but_for_its_length_and_batch(name):
    ours, recipe = train_config(f"200m_{name}", short.SHORT, name), RECIPES[f"200m_{name}"]()
    names = (field.name for field in fields(recipe))
    changed = {each for each in names if getattr(ours, each) != getattr(recipe, each)}
    assert changed == {"steps", "batch_size", "eval_every", "eval_batches"}
    assert ours.batch_size * ours.seq_len == 131_072
    assert recipe.batch_size * recipe.seq_len == 8 * 131_072
    assert ours.compile


@pytest.mark.gpu
@pytest.mark.slow
def test_a_recipe_trains_at_its_own_size_on_a_gpu(tmp_path):
    measure = short.measure
    names = measure.__globals__
    names["SHORT"] = replace(names["SHORT"], steps=21, batch_size=4, eval_batches=2)
    words = ["--out", str(tmp_path / "gpu"), "--runs", str(tmp_path / "runs"), "--models", "RNN"]
    assert short.run_script(measure, "Train.", tuple(short.NAMES), trains=True, words=words) == 0
    ours = read_result(tmp_path / "gpu/train_200m.json")
    details = ours.cell("RNN", short.COLUMNS[0])[0].details
    assert details["parameters"] > 200e6
    assert details["peak_gb"] > 3
