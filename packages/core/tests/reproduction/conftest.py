"""A report with everything that a report can hold, and many signs that HTML escapes."""

from dataclasses import replace

import pytest
from mezzo_core.reproduction.claims import Finding
from mezzo_core.reproduction.figures import draw_result
from mezzo_core.reproduction.measurement import Entry, How, Measurement
from mezzo_core.reproduction.outcomes import Outcome
from mezzo_core.reproduction.published import Claim, Published, Row, Table
from mezzo_core.reproduction.report import Figure, PaperReport, Report, prepare_folder, write_report

ROWS = (Row("x|y", (7.61,)), Row("z", ("OOM",)))
TABLE = Table("p.t1", "A <title> & more", "perplexity", "ppl", "lower", "big", ("T=8",), ROWS)
CLAIM = Claim("p.c1", "x < y", "order", (1, "OOM"), "Section 1", labels=("a", "b"))
OTHER = Claim("p.c2", "all is *well*", "order", (), "Section 2")
DETAILS = {"parameters": 5, "steps": {"train": [[1, 2.0]]}}
SEEDS = [Entry("x|y", "T=8", v, seed=i, details=DETAILS) for i, v in enumerate((7.5, 7.7))]
OURS = Measurement(tuple(SEEDS), ("T=8",), "small", kind="training")
SHOWN = {"measurements": (OURS,), "details": ("a & b",), "here": ("agrees: small",)}
FINDINGS = [
    Finding("p.t1", How.SCALED_DOWN, Outcome.AGREES, "as <printed>", **SHOWN),
    Finding("p.c1", How.OTHER_HARDWARE, Outcome.DIFFERS, "the other way"),
    Finding("p.c2", How.NOT_ATTEMPTED, None, "too large"),
]


@pytest.fixture
def findings():
    return FINDINGS


def report_of(name, out):
    """Return the report of a paper, whose ids begin with its name."""

    def own(each):
        return replace(each, id=f"{name}{each.id[1:]}")

    path = prepare_folder(out, name) / "figures" / "dots.png"
    draw_result(OURS, path)
    published = Published(f"The {name} paper", (own(TABLE),), (own(CLAIM), own(OTHER)))
    figures = [Figure(path, "Dots", "What the dots show")]
    lead = Figure(path, f"{name}.c1", "From gpu/dots.json")
    return PaperReport(name, published, [*map(own, FINDINGS)], figures, ["a note"], lead)


@pytest.fixture
def folder(tmp_path):
    """The folder of a report of two papers."""
    out = tmp_path / "reports"
    papers = [report_of(name, out) for name in "pq"]
    write_report(Report(papers, "smoke", "reproduce <all>", 1.0, {"gpu": None, "cpu": "C"}), out)
    return out
