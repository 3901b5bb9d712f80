"""A report holds every finding once, in two forms that say the same."""

import json
from dataclasses import replace
from html import escape

import pytest
from mezzo_core.reproduction.markdown import evaluate
from mezzo_core.reproduction.measurement import Entry, Measurement
from mezzo_core.reproduction.published import Claim, Published
from mezzo_core.reproduction.report import PaperReport, Report, prepare_folder, to_html, verdict


def test_each_finding_has_its_place_and_outcome_in_both_files(folder, findings):
    page = (folder / "report.html").read_text(encoding="utf-8")
    content = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    found = {entry["id"]: entry for entry in content["papers"][0]["findings"]}
    assert list(found) == [finding.id for finding in findings]
    for finding in findings:
        outcome = finding.outcome and finding.outcome.value
        assert page.count(f'id="{finding.id}"') == 1
        assert page.count(escape(finding.summary)) == 2  # once in each paper
        assert (found[finding.id]["outcome"], found[finding.id]["how"]) == (outcome, finding.how)


def test_what_differs_for_the_better_is_told_apart(findings):
    better = replace(findings[1], better=True)
    assert [verdict(each) for each in (*findings, better)] == [
        "agrees",
        "differs",
        "not attempted",
        "better",
    ]
    published = Published("", (), (Claim("p.c1", "It is slow.", "", (), "1"),))
    page = to_html(Report([PaperReport("p", published, [better])], "smoke", "reproduce", 1.0))
    assert page.count('data-outcome="better"') == 2
    assert page.count('data-outcome="differs"') == 0


def test_the_first_screen_is_a_tally_and_a_committed_figure_under_its_claim(folder):
    page = (folder / "report.html").read_text(encoding="utf-8")
    first = page[page.index("<h1") : page.index("<form")]
    assert '<tr><td><a href="#p">p</a></td>\n<td>1</td><td></td><td>1</td>' in first
    assert "<tr><td>all</td><td>2</td><td></td><td>2</td><td></td><td>2</td></tr>" in first
    assert '<a href="#p.c1">x &lt; y</a> <span class="mark differs">' in first
    assert first.count("<img") == 2


def test_what_this_machine_measured_stands_apart(folder):
    page = (folder / "report.html").read_text(encoding="utf-8")
    committed, here = page.split('<h2 id="here">')
    assert "agrees: small" in here
    assert "agrees: small" not in committed
    assert committed.count("7.6 (2 seeds") == 0
    assert here.count("7.6 (2 seeds") == 2  # once in each paper


def test_a_second_report_removes_the_first_and_leaves_the_users_files(folder):
    (folder / "mine.txt").write_text("keep", encoding="utf-8")
    (folder / "p" / "measured").mkdir()
    (folder / "p" / "measured" / "speed.json").write_text("{}", encoding="utf-8")
    (folder / "p" / "figures" / "mine.tex").write_text("keep", encoding="utf-8")
    assert prepare_folder(folder, "p") == folder / "p"
    assert sorted(path.name for path in folder.iterdir()) == ["mine.txt", "p", "q"]
    assert list((folder / "p" / "measured").iterdir()) == []
    assert [path.name for path in (folder / "p" / "figures").iterdir()] == ["mine.tex"]


SPEED = Measurement(
    (
        *(Entry("w, of b", "350M, 8K", v, seed=s) for s, v in enumerate((2.0, 9.7, 30.0))),
        Entry("RAT(L=16)", "350M, 8K", 1.0, details={"peak_gb": 3.0}),
        Entry("RAT(L=16)", "16", 2.0, details={"peak_gb": 4.0}),
        *(Entry("x", "16", value, group=g) for g, value in (("g", 338_836), ("h", 5))),
        Entry("y", "16", "OOM"),
    ),
    ("350M, 8K", "16"),
    "",
    kind="speed",
)


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ("RAT(L=16) at 16", 2.0),
        ("w, of b at 350M, 8K", 9.7),
        ("w, of b / RAT(L=16) at 350M, 8K", 9.7),
        ("x at 16, h", 5.0),
        ("peak_gb of RAT(L=16)", 4.0),
        ("peak_gb of RAT(L=16) at 350M, 8K", 3.0),
    ],
)
def test_a_reference_names_one_number(reference, value):
    assert evaluate(f"gpu/speed: {reference}", {"gpu/speed": SPEED}) == value


@pytest.mark.parametrize("reference", ["x at 16", "RAT(L=16)", "y at 16", "z at 16", "x at 8"])
def test_a_reference_to_no_single_number_is_refused(reference):
    with pytest.raises(ValueError, match="numbers of"):
        evaluate(f"gpu/speed: {reference}", {"gpu/speed": SPEED})
    with pytest.raises(ValueError, match="nothing is named"):
        evaluate(f"gpu/other: {reference}", {"gpu/speed": SPEED})
