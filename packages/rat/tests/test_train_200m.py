"""The 200M recipes' short runs, rehearsed on a CPU: what is written, kept and refused."""

import json
import re
import runpy
import statistics
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.papers import load_experiments
from mezzo_rat.recipes import RECIPES
from mezzo_rat.reproduce import read_published

ROOT = Path(__file__).parents[3]
command = SimpleNamespace(**runpy.run_path(str(ROOT / "packages/rat/benchmarks/train_200m.py")))
check_results = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/check_results.py")))
SHOWN = ["RNN", "RAT(L=64)", "RAT(L=16)", "Attention"]


def rehearse(folder, *words, steps=11, commit="c1"):
    common = ["--dry-run", "--out", str(folder / "results/cpu"), "--runs", str(folder / "runs")]
    return command.main([*common, "--steps", str(steps), "--commit", commit, *words])


def content(folder):
    return json.loads((folder / "results/cpu/train_200m.json").read_text())


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsal")
    assert rehearse(folder, steps=20) == 0
    return folder


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """One model's file, of a GPU whose peak is 1e12 FLOPs; tests that write work on a copy."""
    folder = tmp_path_factory.mktemp("short")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(command.PEAK_FLOPS, None, 1e12)
        assert rehearse(folder, "--models", "rnn") == 0
    return (folder / "results/cpu/train_200m.json").read_text()


def put(text, folder):
    (folder / "results/cpu").mkdir(parents=True)
    (folder / "results/cpu/train_200m.json").write_text(text)


def test_a_rehearsal_writes_an_experiment_that_a_report_reads(rehearsal):
    (experiment,) = load_experiments(rehearsal / "results")
    assert set(experiment.ids) <= set(read_published().ids)
    assert not experiment.same_setting
    assert experiment.measurement.commit == "c1"
    assert "rehearsal" in experiment.measurement.setting
    assert [row.model for row in experiment.measurement.rows] == SHOWN
    assert (rehearsal / "results/cpu/train_200m.png").stat().st_size > 0


def test_a_readme_shows_every_model(rehearsal):
    text = f"{check_results.START}{check_results.END}"
    shown = check_results.updated(text, rehearsal / "results")
    for run in content(rehearsal)["runs"]:
        (line,) = (each for each in shown.splitlines() if each.startswith(f"| {run['model']} |"))
        assert f" {run['tokens_per_second']:,} |" in line
        assert f" {run['val_perplexity']} |" in line


def test_models_train(rehearsal):
    for run in content(rehearsal)["runs"]:
        tokens, losses, _ = zip(*run["steps"], strict=True)
        assert tokens == tuple(range(2048, 20 * 2048 + 1, 2048))
        assert losses[-1] < losses[0] - 0.1
        assert run["train_loss"] == pytest.approx(losses[-1], abs=1e-3)
        assert run["val_perplexity"] < 257


def test_speed_is_the_median_after_the_warm_up(rehearsal):
    for run in content(rehearsal)["runs"]:
        speeds = [speed for _, _, speed in run["steps"]]
        assert run["tokens_per_second"] == pytest.approx(statistics.median(speeds[10:]), abs=1)
        hours = 15e9 / run["tokens_per_second"] / 3600
        assert run["hours"] == pytest.approx(hours, rel=1e-3)


def test_the_first_steps_time_is_what_the_warm_up_took_beyond_steady_steps():
    # Ten steps of 1000 tokens read together after 48 s, then steps of 2 s, and one disturbed.
    speeds = [10 * 1000 / 48] * 10 + [500.0] * 10 + [100.0]
    assert command.steady_and_first(speeds, 1000) == pytest.approx((500, 48 - 9 * 2))


def test_share_of_peak_counts_six_flops_a_weight(short):
    (run,) = json.loads(short)["runs"]
    flops = 6 * run["parameters"] * run["tokens_per_second"]
    assert run["percent_of_peak"] == pytest.approx(100 * flops / 1e12, rel=0.02, abs=0.05)


@pytest.mark.parametrize("name", command.MODELS)
def test_a_full_run_is_the_recipe_but_for_its_length_and_batch(name):
    arguments = command.parse(["--out", "out"])
    ours, recipe = command.configure(name, arguments), RECIPES[f"200m_{name}"]()
    names = (field.name for field in fields(recipe))
    changed = {each for each in names if getattr(ours, each) != getattr(recipe, each)}
    assert changed == {"steps", "batch_size", "eval_every", "eval_batches", "checkpoint_every"}
    assert ours.batch_size * ours.seq_len == 131_072
    assert recipe.batch_size * recipe.seq_len == 8 * 131_072
    assert ours.compile


def test_a_second_run_replaces_its_models_and_keeps_the_others(rehearsal, tmp_path):
    put((rehearsal / "results/cpu/train_200m.json").read_text(), tmp_path)
    assert rehearse(tmp_path, "--models", "rat_l16", steps=20, commit="c2") == 0
    runs = content(tmp_path)["runs"]
    assert [(run["model"], run["commit"]) for run in runs] == [
        (model, "c2" if model == "RAT(L=16)" else "c1") for model in SHOWN
    ]
    assert [row["model"] for row in content(tmp_path)["rows"]] == SHOWN


def test_a_run_that_is_killed_keeps_what_it_measured(tmp_path, monkeypatch):
    names = command.run.__globals__
    train = names["train"]

    def killed(config, *rest, **options):
        if config.name == "200m_attention":
            raise KeyboardInterrupt
        return train(config, *rest, **options)

    monkeypatch.setitem(names, "train", killed)
    with pytest.raises(KeyboardInterrupt):
        rehearse(tmp_path, "--models", "rnn", "attention")
    assert [run["model"] for run in content(tmp_path)["runs"]] == ["RNN"]
    load_experiments(tmp_path / "results")


def test_a_batch_that_does_not_fit_is_one_line(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setitem(command.run.__globals__, "train", full)
    assert rehearse(tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "200m_rnn does not fit" in line
    assert "--micro-batch-size" in line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--models", "rat_l17"], "rat_l17.*rat_l16"),
        (["--steps", "10"], "--steps must be above 10.*got 10"),
        (["--micro-batch-size", "3"], "micro_batch_size.*16.*got 3"),
        (["--batch-size", "0"], "batch_size.*got 0"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--tokenizer", "nowhere.model"], "nowhere.model"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(tmp_path, capsys, words, named):
    assert rehearse(tmp_path, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(named, line)
    assert not list(tmp_path.glob("results/cpu/*"))


def test_the_recipes_own_size_needs_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "CUDA" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("setting", "longer runs", "another setting.*longer runs"),
        ("gpu", "NVIDIA H200", "another gpu.*NVIDIA H200"),
        ("torch", "1.0", "another torch.*1.0"),
        ("runs", None, "no result of this benchmark"),
    ],
)
def test_results_of_another_kind_are_not_mixed_in(short, tmp_path, capsys, key, value, named):
    text = json.dumps({**json.loads(short), key: value})
    put(text, tmp_path)
    assert rehearse(tmp_path, "--models", "rat_l16") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(named, line)
    assert (tmp_path / "results/cpu/train_200m.json").read_text() == text


def test_a_folder_that_cannot_be_made_is_refused_before_the_training(tmp_path, capsys):
    (tmp_path / "results").write_text("a file where the folder should be")
    assert rehearse(tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be made" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.gpu
@pytest.mark.slow
def test_a_recipe_trains_at_its_own_size_on_a_gpu(tmp_path):
    words = ["--out", str(tmp_path / "gpu"), "--runs", str(tmp_path / "runs"), "--commit", "c1"]
    words += ["--data", "embedded", "--tokenizer", "byte", "--models", "rat_l16"]
    assert command.main([*words, "--steps", "21", "--batch-size", "4"]) == 0
    (run,) = json.loads((tmp_path / "gpu/train_200m.json").read_text())["runs"]
    assert run["parameters"] > 200e6
    assert run["steps"][-1][1] < run["steps"][0][1] - 1
    assert run["seconds_to_first_step"] > 0
    assert run["peak_gb"] > 3
