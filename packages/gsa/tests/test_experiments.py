"""The scripts of `experiments/`, rehearsed on a CPU: what is measured, kept and refused."""

import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.reproduction import Options
from mezzo_core.reproduction.measurement import read_results
from mezzo_gsa.reproduction import speed
from mezzo_gsa.reproduction.claims import REPRODUCTION

FOLDER = Path(__file__).parents[1] / "experiments"
PUBLISHED = REPRODUCTION.published
GPU = Options(Path("out"), (), torch.device("cuda"), dry_run=False)


def script(name):
    return SimpleNamespace(**runpy.run_path(str(FOLDER / f"{name}.py")))


ablation, t2r = map(script, ("ablation", "t2r"))
MODELS = speed.TRAINING | speed.SLOTS


@pytest.fixture
def rehearse(tmp_path, monkeypatch):
    """Run a script's dry run in an empty folder; return its code and its results by name."""

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [name, "--dry-run", "--out", "results/cpu", *words])
        with pytest.raises(SystemExit) as exit:
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        found = read_results(tmp_path / "results")
        return exit.value.code, {key.removeprefix("cpu/"): each for key, each in found.items()}

    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_papers_size_and_one_keeps_its_states(name):
    config = speed.configure(name, MODELS[name], speed.FULL)
    with torch.device("meta"):
        model = config.build()
    assert 1.25e9 < model.num_parameters() < 1.45e9
    assert len(model.stack.blocks) == 24
    kept = [mixer for mixer in config.mixers if getattr(mixer, "keep_states", False)]
    assert len(kept) == (24 if name == "GSA w/o recomp." else 0)


def test_the_rows_of_the_ablation_differ_in_their_models_alone():
    rows = {row.model for row in PUBLISHED.by_id["gsa.table2"].rows}
    assert rows <= set(ablation.NAMES.values())
    configs = {name: ablation.configure(name, GPU) for name in ablation.NAMES}
    assert len({config.model for config in configs.values()}) == len(configs)
    gsa = configs["gsa"]
    for name, config in configs.items():
        assert replace(config, name=gsa.name, model=gsa.model) == gsa
        if name not in ("retnet", "hgrn2"):  # a smaller MLP, and a stack
            assert replace(config.model, mixers=gsa.model.mixers) == gsa.model
        with torch.device("meta"):
            assert config.model.build().num_parameters() == pytest.approx(34e6, rel=0.03)
            ablation.configure(name, replace(GPU, dry_run=True)).model.build()


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("half of the notes stand between a rest and a song " * 400)
    return path


def test_a_fine_tuning_starts_from_the_converted_transformer(rehearse, corpus, capsys):
    words = ("--data", str(corpus), "--runs", "runs", "--seeds", "0")
    models = (t2r.TRANSFORMER, "GSA", t2r.CONTROL)
    assert rehearse("t2r", *words, "--models", models[1])[0] == 2
    assert "no model to start from: add Transformer to --models" in capsys.readouterr().err
    code, found = rehearse("t2r", *words, "--models", models[0])
    assert (code, set(found)) == (0, {"t2r_rates"})
    (first_alone,) = found["t2r_rates"].entries
    _, found = rehearse("t2r", *words, "--models", *models)
    ours = found["t2r_rates"]
    assert ours.columns == tuple(t2r.RATES)
    assert [model for _, model in ours.rows] == list(models)
    transformer, *tuned, nothing = ours.entries
    assert transformer == first_alone, "it is not trained again"
    curves = [entry.details["steps"]["val"] for entry in tuned]
    assert len({tuple(curve[0]) for curve in curves}) == 1, "every rate starts from the same model"
    for entry, ((step, first), *_, (last, loss)) in zip(tuned, curves, strict=True):
        assert (step, last) == (0, 10)
        assert loss < first
        assert math.exp(loss) == pytest.approx(entry.value, rel=1e-3)
        assert entry.value < 0.8 * nothing.value
        assert entry.details["parameters"] == nothing.details["parameters"]
    assert transformer.details["steps"]["val"][-1][0] == 30
    assert nothing.details["steps"]["val"][0][0] > 0, "it starts from no model"
    other = corpus.rename(corpus.with_name("other.txt"))
    code, _ = rehearse("t2r", "--data", str(other), *words[2:], "--models", "GSA", "--out", "other")
    assert code == 2, "the Transformer that is kept is one of another text"
