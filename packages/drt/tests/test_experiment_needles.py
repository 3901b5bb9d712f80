"""The experiment on needles, rehearsed on a CPU: what is written, and what a full run is."""

import runpy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.bench import Options
from mezzo_core.papers.measurement import How, read_result
from mezzo_drt.claims import ANSWERS, DRT1, DRT2, LANDMARK, PASSKEY, REPRODUCTION, TWO_HOP

SCRIPT = Path(__file__).parents[1] / "experiments/needles.py"
needles = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
TABLES = {PASSKEY: "drt.table2.single_niah", TWO_HOP: "drt.table2.two_hop_niah"}


def dry_run(folder, *words):
    folders = ["--out", str(folder / "results/cpu"), "--runs", str(folder / "runs")]
    command = ["--dry-run", "--seeds", "0", *folders, *words]
    return needles.run_script(
        needles.measure, "Find.", needles.MODELS, trains=True, parallel=True, words=command
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsal")
    assert dry_run(folder, "--models", LANDMARK, DRT1) == 0
    return folder


def rehearsed(folder, name):
    return read_result(folder / f"results/cpu/{Path(name).name}.json")


def test_each_length_of_each_model_is_measured(folder):
    ours = rehearsed(folder, TWO_HOP)
    assert [(e.model, e.column) for e in ours.entries] == [
        (model, column) for model in (LANDMARK, DRT1) for column in ("1K", "4K")
    ]
    assert (ours.seeds, ours.how) == ([0], How.SCALED_DOWN)
    for entry in ours.entries:
        assert entry.details["samples"] == {"1K": 2, "4K": 1}[entry.column]
        rows, samples = entry.details["rows"], entry.details["samples"]
        assert rows == samples
        offloaded = rows * 2 * needles.num_tokens(entry.column) * 32 * 4 / 1e9
        assert entry.details["host_gb"] == pytest.approx(
            offloaded * (entry.model == DRT1), rel=1e-4
        )
        assert ("steps" in entry.details) == (entry.column == "1K")


@pytest.mark.parametrize("name", TABLES)
def test_the_claims_read_the_names_that_the_script_writes(folder, name):
    (answer,) = (each for each in ANSWERS if each.id == TABLES[name])
    judged = answer.evidence[0].criterion(
        REPRODUCTION.published.table(TABLES[name]), rehearsed(folder, name)
    )
    assert len(judged.details) == len(rehearsed(folder, name).entries)


def test_a_second_run_measures_only_what_is_missing(folder, capsys):
    assert dry_run(folder, "--models", DRT1, DRT2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{DRT2}: trained on passkey, seed 0",
        f"passkey: {DRT2}, 4K, 0: 0.0 %",
        f"{DRT2}: trained on two_hop, seed 0",
        f"two_hop: {DRT2}, 1K, 0: 0.0 %",
        f"two_hop: {DRT2}, 4K, 0: 0.0 %",
    ]


def test_what_is_trained_is_measured_though_another_training_fails(tmp_path, monkeypatch):
    train = needles.train_stages

    def fail(runs, *place):
        if "/passkey_2" in str(runs[0].home):
            raise ArithmeticError("it diverged")
        return train(runs, *place)

    monkeypatch.setitem(needles.measure.__globals__, "train_stages", fail)
    with pytest.raises(ArithmeticError, match="it diverged"):
        dry_run(tmp_path, "--models", LANDMARK, DRT1)
    for name in TABLES:
        assert {entry.model for entry in rehearsed(tmp_path, name).entries} == {LANDMARK}


def test_a_full_run_covers_the_printed_lengths():
    for name, table in TABLES.items():
        printed = REPRODUCTION.published.table(table)
        columns = [column for column in printed.columns if column != "Retrieval"]
        assert set(columns) <= set(needles.FULL.columns[name]) <= set(needles.FULL.samples)
        assert set(needles.MEASURED[name]) <= {row.model for row in printed.rows}


def test_stages_follow_one_another():
    options = Options(Path("out"), (), torch.device("cpu"), dry_run=False, data="texts")
    runs = needles.runs_of(TWO_HOP, DRT2, 1, needles.FULL, options)
    assert len(runs) == sum(map(len, needles.FULL.stages.values()))
    assert runs[0].config.init_from is None
    for before, after in pairwise(runs):
        assert after.config.init_from == str(before.home / "model")
    assert {run.config.data.text.source for run in runs} == {"texts"}
    assert {run.config.data.chunk_size for run in runs} == {64}
    landmark = [run.config for run in needles.runs_of(PASSKEY, LANDMARK, 0, needles.FULL, options)]
    assert [config.seq_len for config in landmark] == [512, 768, 768, 768]
    assert {config.batch_size for config in landmark} == {16}, "short rows, so more of them"
