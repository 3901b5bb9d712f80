"""A report holds every finding once, in two forms that say the same."""

import json
import math
from dataclasses import replace
from html import escape

import pytest
from mezzo_core.papers.criteria import Outcome
from mezzo_core.papers.markdown import table
from mezzo_core.papers.measurement import Entry, How, Measurement
from mezzo_core.papers.published import Published, Table
from mezzo_core.papers.report import PaperReport, Report, tally
from mezzo_core.papers.report_files import prepare_folder, write_report
from mezzo_core.papers.tables import Grid


def test_findings_are_counted_by_how_they_were_run_and_what_came_out(findings):
    assert tally(findings) == {
        (How.OTHER_HARDWARE, Outcome.DIFFERS): 1,
        (How.SCALED_DOWN, Outcome.AGREES): 1,
        (How.NOT_ATTEMPTED, None): 1,
    }


def test_each_finding_has_its_place_and_outcome_in_both_files(folder, findings):
    page = (folder / "report.html").read_text(encoding="utf-8")
    content = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    found = {entry["id"]: entry for entry in content["papers"][0]["findings"]}
    assert list(found) == [finding.id for finding in findings]
    for finding in findings:
        outcome = finding.outcome and finding.outcome.value
        assert page.count(f'id="{finding.id}"') == 1
        assert page.count(escape(finding.summary)) >= 2  # one in each paper
        assert (found[finding.id]["outcome"], found[finding.id]["how"]) == (outcome, finding.how)


def test_the_papers_numbers_stand_beside_ours_with_their_spread(folder):
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<td>x|y</td><td>7.61</td></tr><tr><td>z</td><td>OOM</td>" in page
    assert "<td>x|y</td><td>7.6 (2 seeds, spread 0.2)</td><td>5e-06</td>" in page
    assert "<td>a</td><td>1</td></tr><tr><td>b</td><td>OOM</td>" in page


def test_a_table_of_results_md_escapes_what_markdown_would_take():
    lines = table(Grid("*a*", ("", "x<y"), (("x|y", "1\n2"),)))
    assert lines == ["*\\*a\\**", "", "|  | x\\<y |", "| --- | ---: |", "| x\\|y | 1 2 |", ""]


def test_json_keeps_every_seed_but_no_curves(folder):
    content = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    entries = content["papers"][0]["findings"][0]["measurements"][0]["entries"]
    assert [(entry["seed"], entry["value"]) for entry in entries] == [(0, 7.5), (1, 7.7)]
    assert entries[0]["details"] == {"parameters": 5}


def test_a_second_report_removes_the_first_and_leaves_the_users_files(folder):
    (folder / "mine.txt").write_text("keep", encoding="utf-8")
    (folder / "p" / "speed").mkdir()
    assert prepare_folder(folder, "p") == folder / "p"
    assert sorted(path.name for path in folder.iterdir()) == ["mine.txt", "p", "q"]
    assert [path.name for path in (folder / "p").iterdir()] == ["figures"]
    assert list((folder / "p" / "figures").iterdir()) == []


def test_json_has_null_for_what_is_no_number(findings, tmp_path):
    """NaN is no JSON: other programs refuse the whole file."""
    ours = Measurement((Entry("x", "a", math.nan, details={"loss": [math.inf, 1.0]}),), ("a",), "")
    finding = replace(findings[0], measurements=(ours,))
    table = Table("p.t1", "A title", "perplexity", "ppl", "lower", "big", ("T=8",), ())
    published = Published("The p paper", "A & B", "", (table,), ())
    paper = PaperReport("p", published, [finding], [])
    write_report(Report([paper], "smoke", "reproduce", 1.0, {}), tmp_path)
    content = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    (entry,) = content["papers"][0]["findings"][0]["measurements"][0]["entries"]
    assert (entry["value"], entry["details"]) == (None, {"loss": [None, 1.0]})
