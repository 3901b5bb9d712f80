"""The speed tables, rehearsed on a CPU: what is written, kept, left out and refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mezzo_core.bench import generation
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import Attention
from mezzo_core.papers.measurement import How, read_result
from mezzo_core.testing.scripts import run_script
from mezzo_rat import speed
from mezzo_rat.claims import REPRODUCTION
from mezzo_rat.speed import DRY, LAYERS, MEASURERS

SCRIPT = Path(__file__).parents[1] / "experiments/speed.py"
FILES = {"table6", "table7", "table8", "fig5"}
SMALL = replace(DRY, models=("RNN", "Attention"), lengths=(64,))


def quiet(line):
    pass


def dry_run(folder, *words):
    return run_script(SCRIPT, "--dry-run", "--out", str(folder), *words)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "cpu"
    assert dry_run(folder) == 0
    return {name: read_result(folder / f"speed_{name}.json") for name in FILES}


def test_a_rehearsal_measures_every_cell_three_times(rehearsal):
    for name, ours in rehearsal.items():
        groups = ["B=2", "B=64"] if name == "table8" else [""]
        models = speed.GENERATING if name == "fig5" else LAYERS
        assert ours.groups == groups
        assert ours.how is How.SCALED_DOWN
        for group in groups:
            for model in models:
                for column in ours.columns:
                    passes = ours.by_seed(model, column, group)
                    assert list(passes) == [0, 1, 2]
                    assert min(passes.values()) > 0


def test_batches_are_as_large_as_the_tables_say(rehearsal):
    for name in ("table6", "table7"):
        assert {int(e.column) * e.details["B"] for e in rehearsal[name].entries} == {DRY.tokens}
    assert all(f"B={e.details['B']}" == e.group for e in rehearsal["table8"].entries)
    assert {e.details["B"] for e in rehearsal["fig5"].entries} == {DRY.max_batch}


def test_a_second_run_measures_only_what_is_missing(tmp_path):
    lines = []
    for models in (("RNN",), ("RNN", "Attention"), ("RNN", "Attention")):
        MEASURERS["table7"](replace(SMALL, models=models), tmp_path, lines.append)
    assert [line.split(",")[0] for line in lines] == [
        "speed_table7: RNN",
        "speed_table7: Attention",
    ]


def test_a_file_without_any_wanted_model_is_no_measurement(tmp_path):
    assert MEASURERS["table6"](replace(DRY, models=("Attention-SWA",)), tmp_path, quiet) is None


def test_a_batch_that_does_not_fit_is_out_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "free_memory", lambda device: 200_000)
    ours = MEASURERS["table8"](replace(SMALL, positions=(64,)), tmp_path, quiet)
    assert ours.typical("Attention", "64", "B=64") == "OOM"
    assert isinstance(ours.typical("RNN", "64", "B=64"), float)


def test_a_layer_that_decodes_wrongly_is_not_timed(tmp_path, monkeypatch):
    right = Attention.step
    monkeypatch.setattr(Attention, "step", lambda self, x, state: 1.1 * right(self, x, state))
    with pytest.raises(UserError, match="Attention: the output in decoding is wrong"):
        MEASURERS["table6"](replace(SMALL, models=("Attention",)), tmp_path, quiet)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--models", "RAT(L=17)"], []])
def test_what_cannot_be_measured_is_refused_in_one_line(tmp_path, capsys, monkeypatch, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = [*words, *(["--dry-run"] if words else []), "--out", str(tmp_path / "out")]
    assert run_script(SCRIPT, *command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"RAT\(L=17\).*RAT\(L=16\)" if words else "CUDA", line)
    assert not (tmp_path / "out").exists()


def test_a_reproduction_measures_only_what_it_is_asked(tmp_path):
    ids = ["rat.table7", "rat.claim.short_slower", "rat.table12"]
    scales = {"smoke": replace(REPRODUCTION.scales["smoke"], sizes=SMALL)}
    found = replace(REPRODUCTION, scales=scales).reproduce(ids, "smoke", tmp_path)
    assert [finding.how for finding in found] == [
        How.OTHER_HARDWARE,
        How.NOT_ATTEMPTED,
        How.OTHER_HARDWARE,
    ]
    assert {path.stem for path in (tmp_path / "rat/speed").glob("*.json")} == {
        "speed_table6",
        "speed_table7",
    }
    report = json.loads((tmp_path / "report.json").read_text())["papers"][0]
    assert not report["samples"]


@pytest.mark.gpu
def test_all_tables_run_on_a_gpu(tmp_path):
    small = replace(
        DRY, device="cuda", d_model=256, head_dim=64, tokens=2048, lengths=(512, 1024, 2048)
    )
    for measurer in MEASURERS.values():
        ours = measurer(small, tmp_path, quiet)
        assert all(entry.value == "OOM" or entry.value > 0 for entry in ours.entries)
