"""A report with everything that a report can hold, and many signs that HTML escapes."""

from dataclasses import replace

import pytest
from mezzo_core.reproduction.claims import Finding
from mezzo_core.reproduction.figures import draw_result
from mezzo_core.reproduction.measurement import Entry, How, Measurement
from mezzo_core.reproduction.outcomes import Outcome
from mezzo_core.reproduction.published import Claim, Published, Row, Table
from mezzo_core.reproduction.report import (
    Figure,
    PaperReport,
    Report,
    prepare_folder,
    write_report,
)

ROWS = (Row("x|y", (7.61,)), Row("z", ("OOM",)))
TABLE = Table("p.t1", "A <title> & more", "perplexity", "ppl", "lower", "big", ("T=8",), ROWS)
CLAIM = Claim("p.c1", "x < y", "order", (1, "OOM"), "Section 1", labels=("a", "b"))
OTHER = Claim("p.c2", "all is *well*", "order", (), "Section 2")
OURS = Measurement(
    tuple(
        Entry(
            "x|y",
            "T=8",
            value,
            seed=seed,
            details={"parameters": 5, "steps": {"train": [[1, 2.0]]}},
        )
        for seed, value in ((0, 7.5), (1, 7.7))
    ),
    ("T=8",),
    "small",
    kind="training",
)
FINDINGS = [
    Finding(
        "p.t1",
        How.SCALED_DOWN,
        Outcome.AGREES,
        "as <printed>",
        (OURS,),
        ("a & b",),
        here=("agrees: small",),
    ),
    Finding("p.c1", How.OTHER_HARDWARE, Outcome.DIFFERS, "the other way"),
    Finding("p.c2", How.NOT_ATTEMPTED, None, "too large"),
]


@pytest.fixture
def findings():
    return FINDINGS


@pytest.fixture
def folder(tmp_path):
    """The folder of a report of two papers."""
    out = tmp_path / "reports"
    papers = []
    for name in ("p", "q"):
        path = prepare_folder(out, name) / "figures" / "dots.png"
        draw_result(OURS, path)
        rows = [replace(f, id=f"{name}{f.id[1:]}") for f in FINDINGS]
        table, *claims = (
            replace(each, id=f"{name}{each.id[1:]}") for each in (TABLE, CLAIM, OTHER)
        )
        published = Published(f"The {name} paper", (table,), tuple(claims))
        papers.append(
            PaperReport(
                name,
                published,
                rows,
                [Figure(path, "Dots", "What the dots show")],
                ["a note"],
                Figure(path, rows[1].id, "From gpu/dots.json"),
            )
        )
    write_report(Report(papers, "smoke", "reproduce <all>", 1.0, {"gpu": None, "cpu": "C"}), out)
    return out
