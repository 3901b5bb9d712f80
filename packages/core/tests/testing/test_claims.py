"""A criterion that cannot fail, or fails where it should agree, is found."""

from types import SimpleNamespace

import pytest
from mezzo_core.papers.claims import Answer, counted, result
from mezzo_core.papers.criteria import (
    AsPrinted,
    Equal,
    Every,
    InOrder,
    Judgement,
    Outcome,
    Ratio,
    about,
    at_least,
)
from mezzo_core.papers.measurement import Entry, Measurement, entries
from mezzo_core.papers.published import Claim, Published, Row, Table
from mezzo_core.testing.claims import check_claims

ROWS = tuple(Row(model, (a, b), group) for model, a, b, group in (
    ("a", 7.60, 90, "g"), ("b", 7.61, 95, "g"), ("c", 7.70, "OOM", "h"), ("d", 8.0, 80, "h")
))  # fmt: skip
TABLE = Table("t", "", "", "", "lower", "", ("PPL", "Acc"), ROWS, column_better=("lower", "higher"))
CLAIM = Claim("c", "", "", (8, 0), "", labels=("x", "zero"), ordering=("a", "b", "c"))
PUBLISHED = Published("", "", "", (TABLE,), (CLAIM,))


def check(id, *evidence, **examples):
    paper = SimpleNamespace(published=PUBLISHED, answers=[Answer(id, *evidence)])
    check_claims(paper, examples)


@pytest.mark.parametrize(
    ("id", "criterion"),
    [
        ("t", AsPrinted()),
        ("t", AsPrinted(across_groups=True)),
        ("t", InOrder(("b", "a"), columns=("PPL",), groups=("g", "h"))),
        ("c", InOrder()),
        ("c", InOrder(exact=True)),
        ("c", Ratio("a", "b", {"PPL": about(8), "Acc": at_least(2)})),
        ("c", Ratio("a", "b", {"PPL": (0.0, 1.0), "Acc": (0.0, 2.0)}, best=True)),
        ("c", Equal({"x": 0.01})),
        ("c", Every((InOrder(), Ratio("a", "b", {"PPL": about(8)})))),
    ],
)
def test_criteria_of_core_can_come_out_both_ways(id, criterion):
    check(id, result("gpu/r", criterion))


@pytest.mark.parametrize(
    ("criterion", "what"),
    [
        (Ratio("a", "b", {"PPL": at_least(0)}), "ratios out of bounds"),
        (InOrder(("a",)), "is met, and says: not settled"),
        (Equal({"x": 10.0}), "contradicted by x"),
        (Every((InOrder(), Ratio("a", "b", {"x": at_least(0)}))), "ratios out of bounds"),
    ],
)
def test_criteria_that_cannot_fail_or_agree_are_found(criterion, what):
    with pytest.raises(AssertionError, match=what):
        check("c", result("gpu/r", criterion))


def more_than_one(printed, ours):
    values = [float(entry.value) for entry in ours.entries]
    return Judgement(Outcome.AGREES if min(values) > 1 else Outcome.DIFFERS, "")


def always(printed, ours):
    return Judgement(Outcome.AGREES, "")


def one(value):
    return Measurement((Entry("a", "x", value),), ("x",), "")


def test_a_criterion_of_the_papers_own_needs_examples_that_it_tells_apart():
    evidence = result("gpu/r", more_than_one)
    check("c", evidence, c=(one(2), one(1)))
    check("c", result("gpu/r", Every((InOrder(), more_than_one))), c=(one(2), one(1)))
    for examples, what in (
        ({}, "has no example"),
        ({"c": (one(1), one(2))}, "is met, and says: differs"),
        ({"c": (one(2), one(3))}, "contradicted by its example"),
        ({"c": (one(2), one(1)), "d": (one(2), one(1))}, "d: an example that is not needed"),
    ):
        with pytest.raises(AssertionError, match=what):
            check("c", evidence, **examples)
    with pytest.raises(AssertionError, match="contradicted by its example"):
        check("c", result("gpu/r", always), c=(one(2), one(1)))


def test_of_a_count_every_row_matters():
    columns = ("x", "y")
    count = Measurement(entries({"a": (2, 3), "b": (4, 5)}, columns), columns, "")
    check("c", counted(lambda printed: count, more_than_one))
    with pytest.raises(AssertionError, match="contradicted by a"):
        check("c", counted(lambda printed: count, always))

    def only_a(printed, ours):
        kept = tuple(entry for entry in ours.entries if entry.model == "a")
        return more_than_one(printed, Measurement(kept, columns, ""))

    with pytest.raises(AssertionError, match="contradicted by b"):
        check("c", counted(lambda printed: count, only_a))


def test_of_counts_beside_printed_values_each_of_ours_matters():
    columns = ("printed", "ours")
    count = Measurement(entries({"x": (8, 8), "zero": (0, 0)}, columns), columns, "")
    check("c", counted(lambda printed: count, Equal()))
    with pytest.raises(AssertionError, match="contradicted by x"):
        check("c", counted(lambda printed: count, Equal({"x": 5.0})))
