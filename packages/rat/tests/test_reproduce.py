"""A smoke reproduction of the paper, from the command to the report."""

import json

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.nn.checkpoint import load_model
from mezzo_rat.__main__ import main
from mezzo_rat.claims import REPRODUCTION

PUBLISHED = REPRODUCTION.published


def test_single_claims_are_answered_without_training(tmp_path):
    findings = REPRODUCTION.reproduce(["rat.claim.flops", "rat.table2"], "smoke", tmp_path)
    assert [finding.id for finding in findings] == ["rat.table2", "rat.claim.flops"]
    assert "FineWeb-Edu" in findings[0].summary
    assert not (tmp_path / "rat" / "runs").exists()
    assert json.loads((tmp_path / "report.json").read_text())["papers"][0]["samples"] == []


def test_the_papers_sizes_need_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="CUDA"):
        REPRODUCTION.reproduce(["rat.table6"], "gpu", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_smoke_run_answers_everything_once(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "--scale", "smoke", "--out", str(tmp_path)])
    assert stop.value.code == 0
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["papers"][0]
    findings = {entry["id"]: entry for entry in report["findings"]}
    assert list(findings) == list(PUBLISHED.ids)
    assert "failed: " not in (tmp_path / "report.json").read_text(encoding="utf-8")
    attempted = {id for id, each in findings.items() if each["outcome"] is not None}
    evidence = {answer.id for answer in REPRODUCTION.answers if answer.evidence}
    # Some evidence is a result file that only a GPU can write.
    sure = {each.id for each in REPRODUCTION.answers if each.evidence and not each.otherwise}
    assert sure <= attempted <= evidence
    # One seed and three steps: an order may come out, but it may not be called settled.
    beside = " ".join(findings["rat.claim.ppl_between"]["details"])
    assert "beside it, this run: not settled" in beside
    drawn = {path.stem for path in (tmp_path / "rat/figures").iterdir()}
    assert drawn == {"trainings", *REPRODUCTION.measurers}
    assert len(report["samples"]) == 1
    load_model(tmp_path / "rat/runs/tiny_rat_l16/model", device=torch.device("cpu"))
