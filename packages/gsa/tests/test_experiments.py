"""The scripts of `experiments/`, rehearsed on a CPU: what is measured, kept and refused."""

import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.bench import Options
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.papers.measurement import How, read_results
from mezzo_gsa.bench import fla
from mezzo_gsa.claims import REPRODUCTION
from mezzo_gsa.convert import TARGETS

FOLDER = Path(__file__).parents[1] / "experiments"
PUBLISHED = REPRODUCTION.published
GPU = Options(Path("out"), (), torch.device("cuda"), dry_run=False)


def script(name):
    return SimpleNamespace(**runpy.run_path(str(FOLDER / f"{name}.py")))


speed, ablation, mqar, t2r = map(script, ("model_speed", "ablation", "mqar", "t2r"))


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


def test_speeds_have_a_value_for_each_pass_and_are_not_measured_again(rehearse, capsys):
    models = ("Xfmr++", "GSA", "GSA w/o recomp.", "32 slots")
    code, found = rehearse("model_speed", "--models", *models)
    assert (code, set(found)) == (0, {"speed_training", "speed_slots", "speed_generation"})
    assert {entry.model for entry in found["speed_training"].entries} == set(models[:3])
    assert {entry.model for entry in found["speed_slots"].entries} == {"32 slots"}
    for each in found.values():
        assert (each.how, each.seeds) == (How.SCALED_DOWN, [0, 1, 2])
    for model in ("Xfmr++", "GSA"):
        passes = [found["speed_generation"].by_seed(model, f"N={N}") for N in (4, 8)]
        assert all(0 < passes[0][seed] < passes[1][seed] for seed in range(3))
    capsys.readouterr()
    assert rehearse("model_speed", "--models", *models) == (0, found)
    assert capsys.readouterr().out == ""


def test_speeds_can_answer_the_claims_about_them():
    assert set(speed.SLOTS) == set(PUBLISHED.claim("gsa.claim.slot_throughput").ordering)
    committed = read_results(REPRODUCTION.results_folder)
    for name, models in (("training", speed.TRAINING), ("generation", speed.GENERATING)):
        measured = {entry.model for entry in committed[f"nvidia-h200/speed_{name}"].entries}
        assert measured <= set(models)


@pytest.mark.parametrize("name", speed.MODELS)
def test_models_have_the_papers_size_and_one_keeps_its_states(name):
    config = speed.configure(name, speed.FULL)
    with torch.device("meta"):
        model = config.build()
    assert 1.25e9 < model.num_parameters() < 1.45e9
    assert len(model.stack.blocks) == 24
    kept = {getattr(mixer, "keep_states", False) for mixer in config.mixers}
    assert kept == {name == "GSA w/o recomp."}


def test_fla_is_left_out_where_it_is_not_installed(rehearse, monkeypatch, capsys):
    monkeypatch.setattr(fla, "is_installed", lambda: False)
    assert rehearse("model_speed", "--models", speed.FLA) == (0, {})
    assert "flash-linear-attention is not installed" in capsys.readouterr().out


def test_an_ablation_has_rows_of_table_2_and_can_be_continued(rehearse):
    words = ("--seeds", "0", "--runs", "runs", "--models")
    code, found = rehearse("ablation", *words, "gsa", "attention")
    assert (code, set(found)) == (0, {"ablation"})
    first = found["ablation"]
    assert first.columns == PUBLISHED.table("gsa.table2").columns
    assert [row for _, row in first.rows] == ["GSA w/ 64 slots", "Xfmr++"]
    _, found = rehearse("ablation", *words, "abc", "gsa")
    assert len(found["ablation"].entries) == 3
    assert all(entry in found["ablation"].entries for entry in first.entries)


def test_every_row_of_table_2_can_be_trained_and_differs_in_its_mixers_alone():
    rows = {row.model for row in PUBLISHED.table("gsa.table2").rows}
    assert rows <= set(ablation.NAMES.values())
    configs = {name: ablation.configure(name, GPU) for name in ablation.NAMES}
    assert len({config.model.mixers for config in configs.values()}) == len(configs)
    for config in configs.values():
        assert config.model.mlp == configs["gsa"].model.mlp
        assert (config.optim, config.seq_len) == (configs["gsa"].optim, configs["gsa"].seq_len)
        with torch.device("meta"):
            assert 30e6 < config.model.build().num_parameters() < 40e6


def test_parts_of_mqar_are_selected_by_their_models_and_fill_one_table(rehearse):
    def measured(*models):
        code, found = rehearse("mqar", "--models", *models)
        assert (code, set(found)) == (0, {"mqar_authors"})
        return found["mqar_authors"]

    def places(result):
        return {(entry.model, entry.column) for entry in result.entries}

    depths = measured("gsa_2_layers", "gsa_4_layers")
    first = {("GSA, two layers", "C=32"), ("GSA", "C=32")}
    assert (places(depths), depths.columns) == (first, ("C=16", "C=32"))
    assert depths.how is How.SCALED_DOWN
    assert "seq_len 32, not 512; num_pairs 4, not 64" in depths.setting
    forms = measured("gsa_damping_8", "gsa_scale_1")
    assert places(forms) - first == {("GSA, damping 8", "C=32"), ("GSA, scale 1", "C=32")}
    figure = measured("gsa", "gla")
    new = {("GSA", "C=16"), ("GLA", "C=16"), ("GLA", "C=32")}
    assert places(figure) - places(forms) == new
    assert all(entry in figure.entries for entry in forms.entries), "nothing is measured again"


def test_mqar_differs_from_the_authors_setting_in_what_saves_time_alone():
    authors = mqar.PROTOCOLS["authors"]
    saving = {"skip_solved": True, "precision": "bf16", "compile": True}
    assert replace(authors, **saving) == mqar.FULL
    assert mqar.FULL.widths[1] == 128, "at which the variants are"
    for _, changes in mqar.VARIANTS.values():
        assert mqar.FULL.name in replace(mqar.FULL, **changes).name
    names = {replace(mqar.FULL, **changes).name for _, changes in mqar.VARIANTS.values()}
    assert len(names) == len(mqar.VARIANTS), "each has runs of its own"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("half of the notes stand between a rest and a song " * 400)
    return path


def test_a_fine_tuning_starts_from_the_converted_transformer(rehearse, corpus, tmp_path):
    words = ("--data", str(corpus), "--runs", "runs", "--seeds", "0")
    code, found = rehearse("t2r", *words)
    assert code == 0
    entries = {entry.model: entry for entry in found["t2r"].entries}
    assert list(entries) == list(t2r.MODELS)
    assert set(PUBLISHED.claim("gsa.claim.t2r_order").ordering) <= set(entries)
    transformer, _, _ = load_model(tmp_path / "runs/transformer-0")
    for name, target in t2r.CONVERTED.items():
        assert target in TARGETS
        start, _, _ = load_model(tmp_path / f"runs/{target}-0")
        assert torch.equal(start.embed.weight, transformer.embed.weight)
        (step, first), *_, (last, loss) = entries[name].details["steps"]["val"]
        assert (step, last) == (0, 10)
        assert loss < first
        assert math.exp(loss) == pytest.approx(entries[name].value, rel=1e-3)
        assert entries[name].value < 0.8 * entries[t2r.CONTROL].value
    nothing = entries[t2r.CONTROL].details
    assert nothing["steps"]["val"][0][0] > 0  # it starts from no model
    assert nothing["parameters"] == entries["GSA"].details["parameters"]


def test_a_tuning_without_its_transformer_is_refused_in_one_line(rehearse, corpus, capsys):
    code, found = rehearse("t2r", "--data", str(corpus), "--runs", "none", "--models", "GSA")
    assert (code, found) == (2, {})
    (line,) = capsys.readouterr().err.splitlines()
    assert "transformer-0" in line


def test_the_full_size_is_a_small_mistral():
    model = t2r.FULL.model
    with torch.device("meta"):
        assert 40e6 < model.build().num_parameters() < 60e6
    (mixer,) = set(model.mixers)
    assert model.d_model // mixer.head_dim == 4 * mixer.num_kv_heads  # as Mistral 7B's


@pytest.mark.parametrize("name", ["ablation", "model_speed", "mqar", "t2r"])
def test_wrong_words_are_answered_in_one_line(name, rehearse, monkeypatch, capsys):
    assert rehearse(name, "--models", "GSB")[0] == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no model is named 'GSB'" in line
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, "--out", "elsewhere"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "CUDA GPU" in line
    assert not Path("elsewhere").exists()
