"""A report holds every finding once, in three forms that say the same and need nothing else."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from mezzo_core.papers import (
    Claim,
    Figure,
    Finding,
    Measurement,
    PaperReport,
    Published,
    Report,
    ResultRow,
    Row,
    Sample,
    Status,
    Table,
    check_complete,
    describe_environment,
    prepare_folder,
    render_report,
)
from mezzo_core.papers.figures import draw_bars, draw_curves, draw_lengths

TABLE = Table(
    "t1", "A <title> & more", "perplexity", "ppl", "lower", "big", ("T=8",), (Row("x|y", (7.61,)),)
)
CLAIM = Claim("c1", "x < y", "order", (1, "OOM"), "Section 1", labels=("a", "b"))
PUBLISHED = Published("A paper", "A, B", "", (TABLE,), (CLAIM,))
OURS = Measurement(("T=8",), (ResultRow("x|y", ((7.5,), (7.7,))),), "small", seeds=(0, 1))
FINDINGS = [
    Finding("t1", "table", Status.SCALED_DOWN, "holds & is <small>", (OURS,), ("a detail",)),
    Finding("c1", "claim", Status.NOT_ATTEMPTED, "too large"),
    Finding("check1", "check", Status.REPRODUCED, "equal"),
]


@pytest.fixture
def folder(tmp_path):
    out = tmp_path / "reports"
    prepare_folder(out, "p")
    figure = Figure(out / "p" / "figures" / "bars.png", "Bars", "What the bars show")
    draw_bars({"a": [1.0, 2.0], "b": [3.0]}, figure.path, ylabel="y")
    sample = Sample("A sample", "Once ", "upon <a> time\x00 ```")
    bench = {"name": "n", "impl": "i", "shape": {"T": 8}, "ms": 1.0, "ms_p20": 1.0, "ms_p80": 1.0}
    paper = PaperReport(
        "p", PUBLISHED, FINDINGS, [figure], [sample], [{**bench, "gpu": "G"}], ["a setting"]
    )
    render_report(Report((paper,), "smoke", "reproduce", 1.0, describe_environment()), out)
    return out


def test_the_page_is_well_formed_and_loads_nothing(folder):
    page = (folder / "report.html").read_text(encoding="utf-8")
    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    assert "http" not in page
    assert "<script" not in page
    assert page.count('src="data:image/png;base64,') == 1


def test_each_finding_has_its_place_and_status_in_every_form(folder):
    page = (folder / "report.html").read_text(encoding="utf-8")
    text = (folder / "report.md").read_text(encoding="utf-8")
    content = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    found = {entry["id"]: entry for entry in content["papers"][0]["findings"]}
    assert list(found) == [finding.id for finding in FINDINGS]
    for finding in FINDINGS:
        assert page.count(f'id="{finding.id}"') == 1
        assert sum(line.startswith(f"### {finding.id}") for line in text.splitlines()) == 1
        assert found[finding.id]["status"] == finding.status.value
        assert f"**{finding.status.value}**: {finding.summary}" in text


def test_the_papers_numbers_stand_beside_ours_with_their_spread(folder):
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "| x\\|y | 7.61 |" in text
    assert "| x\\|y | 7.6 (spread 0.2) |" in text


def test_json_keeps_every_run_and_names_the_software(folder):
    content = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    row = content["papers"][0]["findings"][0]["measurements"][0]["rows"][0]
    assert row["runs"] == [[7.5], [7.7]]
    assert row["values"] == [pytest.approx(7.6)]
    assert {"torch", "python", "processor", "commit", "date", "gpu"} <= set(content["environment"])


def test_figures_named_by_the_markdown_are_there(folder):
    assert "](p/figures/bars.png)" in (folder / "report.md").read_text(encoding="utf-8")
    assert (folder / "p" / "figures" / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_report_removes_the_first_and_leaves_the_users_files(folder):
    (folder / "mine.txt").write_text("keep", encoding="utf-8")
    assert prepare_folder(folder, "p") == folder / "p"
    assert sorted(path.name for path in folder.iterdir()) == ["mine.txt", "p"]
    assert list((folder / "p" / "figures").iterdir()) == []


def test_a_missing_an_invented_and_a_repeated_finding_are_refused():
    check_complete(PUBLISHED, FINDINGS, None)
    check_complete(PUBLISHED, FINDINGS[:1], {"t1"})
    extra = Finding("c9", "claim", Status.REPRODUCED, "")
    for findings, word in (
        (FINDINGS[:1], "missing .'c1'"),
        ([*FINDINGS, extra], "invented .'c9'"),
        ([*FINDINGS, FINDINGS[0]], "repeated .'t1'"),
    ):
        with pytest.raises(ValueError, match=word):
            check_complete(PUBLISHED, findings, None)


def test_curves_and_lengths_are_drawn(tmp_path):
    points = [(1.0, 2.0), (2.0, 1.5), (4.0, 1.0)]
    draw_curves({"a": points, "b": []}, tmp_path / "c.png", xlabel="x", ylabel="y", smooth=2)
    draw_lengths({"one": {"a": points}, "two": {"a": points, "b": points}}, tmp_path / "l.png")
    for name in ("c.png", "l.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
