"""`hatch run reproduce` takes every package's paper, and each package's command its own."""

import json
import runpy
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.reproduction.claims import check_complete
from mezzo_core.reproduction.report import Figure, PaperReport, Report, to_html
from mezzo_core.testing.claims import check_claims

ROOT = Path(__file__).parents[1]
tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/reproduce.py")))
PAPERS = {paper.name: paper for paper in tool.papers()}
COUNTS = {"rat": (13, 53), "gsa": (5, 26), "recurrent-transformer": (11, 43), "drt": (12, 32)}
"""Tables and claims that are printed."""
COUNTED = {
    "rat": "rat.setup.200m",
    "gsa": "gsa.claim.damping",
    "recurrent-transformer": "rt.claim.hyper_150m",
    "drt": "drt.claim.config",
}


def test_a_folder_that_cannot_be_written_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--scale", "smoke", "--out", "/dev/null/x"])
    assert tool.main() == 2
    assert "/dev/null/x" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "counts"), COUNTS.items())
def test_the_whole_paper_is_answered_in_its_order_and_every_criterion_can_differ(name, counts):
    published = PAPERS[name].published
    assert (len(published.tables), len(published.claims)) == counts
    check_complete(published, PAPERS[name].answers)
    check_claims(PAPERS[name])


@pytest.mark.parametrize("name", PAPERS)
def test_single_claims_are_answered_without_training(tmp_path, name):
    paper = PAPERS[name]
    unanswered = next(id for id in paper.published.by_id if id not in paper.answers)
    report = paper.report([COUNTED[name], unanswered], "smoke", tmp_path)
    found = {finding.id: finding for finding in report.findings}
    assert list(found) == [id for id in paper.published.by_id if id in found]
    assert found[unanswered].summary == paper.published.by_id[unanswered].needs
    assert found[COUNTED[name]].outcome.value == "agrees"
    assert not (tmp_path / name / "runs").exists()


def test_a_page_of_all_papers_with_their_figures_is_small():
    """It has twelve figures, as many as a run on a CPU draws."""
    reports = []
    for paper in PAPERS.values():
        figures = sorted(paper.results_folder.glob("nvidia-h200/*.png"))[:3]
        found = [Figure(path, path.stem, "") for path in figures]
        findings = paper.committed()
        (lead,) = (finding for finding in findings if finding.id == paper.lead)
        assert lead.measurements[0].source.startswith("nvidia-")
        reports.append(PaperReport(paper.name, paper.published, findings, found, paper.notes))
    assert sum(len(report.figures) for report in reports) == 12
    page = to_html(Report(reports, "cpu", "reproduce", 1.0))
    assert len(page.encode()) < 600_000


@pytest.mark.slow
@pytest.mark.usefixtures("timed_once")
@pytest.mark.parametrize("name", PAPERS)
def test_a_smoke_run_answers_everything_once(tmp_path, name):
    paper = PAPERS[name]
    main = import_module(f"mezzo_{name.replace('-', '_')}.__main__").main
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "--scale", "smoke", "--out", str(tmp_path)])
    assert stop.value.code == 0
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    assert "failed: " not in text
    report = json.loads(text)["papers"][0]
    findings = {entry["id"]: entry for entry in report["findings"]}
    assert list(findings) == list(paper.published.by_id)
    assert {id for id, each in findings.items() if each["outcome"]} == set(paper.answers)
    # One seed and three steps: an order may come out, but it may not be called settled.
    said = {line.partition(":")[0] for each in findings.values() for line in each["here"]}
    assert "not settled" in said
    drawn = {path.stem for path in (tmp_path / name / "figures").iterdir()}
    sizes = paper.scales["smoke"].sizes
    assert drawn == {"lead", "trainings", *(paper.speeds.makers if sizes is not None else ())}
    for recipe in paper.models.values():
        load_model(tmp_path / name / "runs" / recipe.name / "model", device=torch.device("cpu"))
