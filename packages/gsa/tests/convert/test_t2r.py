"""The benchmark that fine-tunes a Transformer into RNNs, rehearsed on a CPU."""

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.data import DataConfig
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.papers import load_experiments, load_published

ROOT = Path(__file__).parents[4]
command = SimpleNamespace(**runpy.run_path(str(ROOT / "packages/gsa/benchmarks/t2r.py")))
PUBLISHED = ROOT / "packages/gsa/src/mezzo_gsa/published.toml"
STEPS = ("--pretrain-steps", "12", "--tune-steps", "4", "--seq-len", "32")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text("half of the notes stand between a rest and a song " * 400)
    return path


def rehearse(folder, corpus, *words):
    common = ["--smoke", "--out", str(folder / "results/cpu"), "--runs", str(folder / "runs")]
    return command.main([*common, "--data", str(corpus), "--commit", "c1", *STEPS, *words])


def content(folder):
    return json.loads((folder / "results/cpu/t2r.json").read_text())


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("rehearsal")
    assert rehearse(folder, corpus) == 0
    return folder


def test_a_rehearsal_writes_an_experiment_that_a_report_reads(rehearsal):
    (experiment,) = load_experiments(rehearsal / "results")
    assert set(experiment.ids) <= set(load_published(PUBLISHED).ids)
    assert not experiment.same_setting
    assert experiment.measurement.commit == "c1"
    assert "rehearsal" in experiment.measurement.setting
    assert [row.model for row in experiment.measurement.rows] == list(command.MODELS)
    for id in experiment.ids:
        compared = load_published(PUBLISHED).claim(id).ordering
        assert set(compared) <= set(command.MODELS)
    assert (rehearsal / "results/cpu/t2r.png").read_bytes().startswith(b"\x89PNG")


def test_a_fine_tuning_starts_from_the_converted_transformer(rehearsal, corpus):
    transformer, _, _ = load_model(rehearsal / "runs/transformer-0")
    data = DataConfig(source=str(corpus)).build(32, None)
    for target, name in command.CONVERTED.items():
        start, _, _ = load_model(rehearsal / f"runs/{target}-0")
        assert torch.equal(start.embed.weight, transformer.embed.weight)
        (run,) = (run for run in content(rehearsal)["runs"] if run["model"] == name)
        (step, first), *_, (last, loss) = run["val"]
        assert (step, last) == (0, 4)
        batch = next(iter(data.validation_batches(4)))
        assert start.loss(batch.tokens, batch.targets).item() == pytest.approx(first, rel=0.05)
        assert loss < first


def test_what_the_transformer_learned_is_worth_more_than_nothing(rehearsal):
    found = {run["model"]: run for run in content(rehearsal)["runs"]}
    nothing = found[command.CONTROL]
    assert nothing["val"][0][0] > 0  # it starts from no model
    assert nothing["steps"] == found["GSA"]["steps"] == 4
    assert nothing["parameters"] == found["GSA"]["parameters"]
    for name in command.CONVERTED.values():
        assert found[name]["val_perplexity"] < 0.8 * nothing["val_perplexity"]


@pytest.fixture
def untrained(monkeypatch):
    """Put a quick run in the place of each model's; one that `dies` names is killed instead."""

    def replace_runs(run, dies=None):
        def plan(bench):
            return {model: lambda model=model: found(model, bench.seed) for model in command.MODELS}

        def found(model, seed):
            if model == dies:
                raise KeyboardInterrupt
            return {**run, "model": model, "seed": seed, "val_perplexity": 1.0 + seed}

        monkeypatch.setitem(command.main.__globals__, "plan", plan)

    return replace_runs


def test_another_seed_is_added_and_another_setting_refused(
    rehearsal, corpus, tmp_path, capsys, untrained
):
    text = (rehearsal / "results/cpu/t2r.json").read_text()
    (tmp_path / "results/cpu").mkdir(parents=True)
    (tmp_path / "results/cpu/t2r.json").write_text(text)
    assert rehearse(tmp_path, corpus, "--tune-lr", "1e-4") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "another setting" in line
    assert (tmp_path / "results/cpu/t2r.json").read_text() == text
    old = {(run["model"], run["seed"]): run for run in json.loads(text)["runs"]}
    untrained(old["GSA", 0])
    assert rehearse(tmp_path, corpus, "--seeds", "1", "2") == 0
    rows = [(row["model"], row["seed"], *row["values"]) for row in content(tmp_path)["rows"]]
    assert rows == [
        (model, seed, 1.0 + seed if seed else old[model, 0]["val_perplexity"])
        for model in command.MODELS
        for seed in (0, 1, 2)
    ]
    kept = {(run["model"], run["seed"]): run for run in content(tmp_path)["runs"]}
    assert all(kept[key] == run for key, run in old.items())


def test_what_was_measured_before_a_kill_is_kept(rehearsal, corpus, tmp_path, untrained):
    (first, *_) = content(rehearsal)["runs"]
    untrained(first, dies="GLA")
    with pytest.raises(KeyboardInterrupt):
        rehearse(tmp_path, corpus)
    kept = [run["model"] for run in content(tmp_path)["runs"]]
    assert kept == ["Transformer", "GSA", "GSA, slots started apart"]
    load_experiments(tmp_path / "results")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--batch-size", "0"], "batch_size.*got 0"),
        (["--tune-lr", "0", "--pretrain-steps", "1"], "lr must be above 0, got 0"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--tokenizer", "nowhere.model"], "nowhere.model"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(tmp_path, corpus, capsys, words, named):
    assert rehearse(tmp_path, corpus, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(named, line)


def test_the_full_size_needs_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--out", str(tmp_path / "out")]) == 2
    assert "CUDA" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_full_size_is_a_small_mistral():
    with torch.device("meta"):
        weights = command.MODEL.build().num_parameters()
    assert 40e6 < weights < 60e6
    (mixer,) = set(command.MODEL.mixers)
    assert command.MODEL.d_model // mixer.head_dim == 4 * mixer.num_kv_heads  # as Mistral 7B's
