"""A reproduction says of each table and claim what came out, and never more than it measured."""

import json
from dataclasses import replace

import pytest
from mezzo_core.papers import Experiment, Finding, Measurement, ResultRow, Status
from mezzo_core.reproduction.evidence import Once, Trainings
from mezzo_gsa import gsa as mixer
from mezzo_gsa import reproduce as module
from mezzo_gsa.recipes import RECIPES
from mezzo_gsa.reproduce import read_published, reproduce
from mezzo_gsa.reproduction import limits, results, sizes, tables
from mezzo_gsa.reproduction.reasons import NOT_ATTEMPTED
from mezzo_gsa.reproduction.scale import MODELS, SMOKE

PUBLISHED = read_published()


def find_all(tmp_path, only, experiments=()):
    models = {name: recipe() for name, recipe in MODELS.items()}
    once = Once(lambda name, done, of: None)
    trainings = Trainings(models, SMOKE.budget, tmp_path, once)
    found = tables.find_all(PUBLISHED, trainings, only, experiments)
    return {finding.id: finding for finding in found}


def test_what_needs_no_training_is_reproduced_exactly(tmp_path):
    ids = [*tables.EXACT, *limits.CHECKS]
    found = find_all(tmp_path, ids)
    assert set(found) == set(ids)
    assert {id for id in ids if found[id].status is not Status.REPRODUCED} == set()


def test_a_reason_is_given_for_what_is_not_attempted(tmp_path):
    found = find_all(tmp_path, list(NOT_ATTEMPTED))
    assert {finding.status for finding in found.values()} == {Status.NOT_ATTEMPTED}
    assert all(len(finding.summary) > 20 for finding in found.values())


@pytest.mark.parametrize("id", limits.CHECKS)
def test_an_op_that_is_slightly_wrong_differs(monkeypatch, id):
    def slightly_wrong(right):
        def wrong(*inputs, **options):
            output = right(*inputs, **options)
            return output._replace(out=output.out * (1 + 1e-4))

        return wrong

    for place, op in ((limits, "chunk_gsa"), (mixer, "chunk_gsa_projected")):
        monkeypatch.setattr(place, op, slightly_wrong(getattr(place, op)))
    assert limits.CHECKS[id]().status is Status.DIFFERS


@pytest.mark.parametrize(
    ("id", "recipe", "change"),
    [
        ("gsa.claim.state_size", "2p7b_gsa", {"num_slots": 63}),
        ("gsa.claim.state_details", "1p3b_gsa", {"num_slots": 32}),
        ("gsa.claim.gate_params", "1p3b_gsa", {"num_heads": 8}),
        ("gsa.claim.damping", "1p3b_gsa", {"damping": 16.0}),
        ("gsa.setup.lm", "2p7b_gsa", {"num_heads": 4}),
    ],
)
def test_a_recipe_with_another_value_differs(monkeypatch, id, recipe, change):
    right = RECIPES[recipe]()
    mixers = tuple(replace(each, **change) for each in right.model.mixers)
    wrong = replace(right, model=replace(right.model, mixers=mixers))
    monkeypatch.setattr(sizes, "RECIPES", {**RECIPES, recipe: lambda: wrong})
    assert tables.EXACT[id](PUBLISHED.claim(id)).status is Status.DIFFERS


def experiment(columns, rows, ids, *, same_setting=False, better="higher", unit="", groups=()):
    measured = tuple(
        ResultRow(model, tuple(values), dict(groups).get(model, ""))
        for model, values in rows.items()
    )
    ours = Measurement(columns, measured, "a setting", unit, device="NVIDIA H200")
    return Experiment(ids, same_setting, better, ours, "file.json")


ABLATION = {
    "GSA w/ 64 slots": [(13.5,), (13.6,)],
    "w/ data-independent decay": [(15.5,), (15.6,)],
    "w/o decay (i.e., ABC)": [(17.5,), (17.6,)],
}


@pytest.mark.parametrize("id", ["gsa.table2", "gsa.claim.ablation_gating"])
@pytest.mark.parametrize(
    ("same_setting", "gsa", "status"),
    [
        (True, [(13.5,), (13.6,)], Status.REPRODUCED),
        (True, [(16.5,), (16.6,)], Status.DIFFERS),
        (False, [(13.5,), (13.6,)], Status.SCALED_DOWN),
        (True, [(13.5,)], Status.SCALED_DOWN),
    ],
)
def test_a_committed_ablation_is_compared_across_the_groups_of_table_2(
    id, same_setting, gsa, status
):
    rows = {name: runs[: len(gsa)] for name, runs in ABLATION.items()} | {"GSA w/ 64 slots": gsa}
    groups = {row.model: row.group for row in PUBLISHED.table("gsa.table2").rows}
    result = experiment(
        ("PPL",), rows, (id,), same_setting=same_setting, better="lower", groups=groups
    )
    tiny = Finding(id, "table" if "table" in id else "claim", Status.SCALED_DOWN, "tiny")
    finding = results.with_results(tiny, PUBLISHED, [result])
    assert finding.status is status
    assert "NVIDIA H200" in finding.summary
    assert len(finding.measurements[0].rows) == 3


def said(id, columns, rows, unit=""):
    blank = Finding(id, "claim", Status.NOT_ATTEMPTED, NOT_ATTEMPTED[id])
    finding = results.with_results(blank, PUBLISHED, [experiment(columns, rows, (id,), unit=unit)])
    assert finding.status is Status.SCALED_DOWN
    return finding.summary


def test_figure_4_and_footnote_7_are_said_as_ratios():
    T = ("2048", "4096")
    rows = {"GSA": [(44.0, 40.0)], "GSA w/o recomp.": [(55.0, 50.0)], "GLA": [(40.0, 50.0)]}
    throughput = said("gsa.claim.train_throughput", T, rows)
    assert "over that of GLA 1.10 at T = 2048, 0.80 at T = 4096" in throughput
    assert "RetNet" not in throughput
    kept = said("gsa.claim.recompute", T, rows)
    assert "training throughput with the states kept" in kept
    assert "1.25 at T = 2048" in kept
    assert "memory with the states kept" in said("gsa.claim.recompute", T, rows, "GiB")
    blank = Finding("gsa.claim.recompute", "claim", Status.NOT_ATTEMPTED, "no GPU")
    alone = experiment(T, {"GSA": rows["GSA"]}, (blank.id,))
    assert results.with_results(blank, PUBLISHED, [alone]) == blank, "nothing to compare with"
    latency = said("gsa.claim.inference", ("512",), {"GSA": [(2.0,)], "RetNet": [(3.0,)]})
    assert "RetNet 1.50 at new tokens = 512" in latency
    rows = {"32 slots": [(50.0,)], "64 slots": [(40.0,)], "128 slots": [(30.0,)]}
    slots = said("gsa.claim.slot_throughput", ("2048",), rows)
    assert "32 slots 1.25 at T = 2048; 128 slots 0.75 at T = 2048" in slots


def test_recall_lists_every_model_at_each_width_best_first():
    rows = {"gla": [(0.5, "-")], "gsa": [(0.75, 0.99)]}
    summary = said("gsa.claim.mqar", ("C=64", "C=128"), rows)
    assert "at C = 64 gsa 0.750, gla 0.500; at C = 128 gsa 0.990" in summary


def test_a_result_of_another_table_changes_nothing():
    blank = Finding("gsa.table1", "table", Status.NOT_ATTEMPTED, "too large")
    other = experiment(("PPL",), ABLATION, ("gsa.table2",))
    assert results.with_results(blank, PUBLISHED, [other]) == blank


def test_single_claims_are_reproduced_without_training(tmp_path):
    findings = reproduce(["gsa.claim.damping", "gsa.table1"], "smoke", tmp_path)
    assert [finding.id for finding in findings] == ["gsa.table1", "gsa.claim.damping"]
    assert not (tmp_path / "gsa" / "runs").exists()


def test_the_committed_results_can_be_read():
    module.load_experiments(module.results_folder())
    module.load_bench(module.results_folder())


@pytest.mark.slow
def test_a_smoke_run_reports_every_id_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "results_folder", lambda: tmp_path / "none")
    reproduce(None, "smoke", tmp_path)
    content = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["papers"][0]
    findings = {entry["id"]: entry for entry in content["findings"]}
    assert list(findings) == [*PUBLISHED.ids, *limits.CHECKS]
    assert all(entry["status"] != "differs" for entry in findings.values())
    # One seed and three steps: an order may come out, but it may not be called settled.
    assert "not settled" in findings["gsa.claim.ablation_gating"]["summary"]
    assert {figure for figure in content["figures"] if (tmp_path / figure).exists()} == {
        f"gsa/figures/{name}.png" for name in ("losses", "perplexities", "costs")
    }
    assert len(content["samples"]) == 1
    assert (tmp_path / "gsa" / "runs" / "tiny_gsa" / "model" / "model.safetensors").exists()
