"""A criterion that compares nothing, or cannot come out against a claim, is found."""

from types import SimpleNamespace

import pytest
import torch
from mezzo_core.reproduction import Cell, Header, Result, origin
from mezzo_core.reproduction.claims import by_test, counted, result
from mezzo_core.reproduction.criteria import Bound, Every, Given, Of, Order, Within, at_least, ratio
from mezzo_core.reproduction.measurement import Measurement, entries
from mezzo_core.reproduction.outcomes import Judgement, Outcome
from mezzo_core.reproduction.published import Claim, Published, Row, Table
from mezzo_core.testing.claims import check_claims

ROWS = tuple(
    Row(m, values) for m, values in {"a": (7.6, 95), "b": (7.61, 90), "c": (7.7, "OOM")}.items()
)
TABLE = Table("t", "", "", "", "lower", "", ("PPL", "Acc"), ROWS, column_better=("lower", "higher"))
CLAIM = Claim("c", "", "", (8, 0), "", labels=("x", "zero"), ordering=("a", "b"))
PUBLISHED = Published("", (TABLE,), (CLAIM,))
HEADER = Header("training", "T", "s", ("PPL",), ("a", "b"), "perplexity")


@pytest.fixture
def check(tmp_path):
    result = Result(tmp_path / "gpu/r.json", HEADER, origin(torch.device("cpu")))
    result.add(Cell("a", "PPL").entry(7.0), Cell("b", "PPL").entry(8.0))

    def checked(id, evidence):
        check_claims(
            SimpleNamespace(published=PUBLISHED, answers={id: [evidence]}, results_folder=tmp_path)
        )

    return checked


@pytest.mark.parametrize(
    ("id", "criterion"),
    [
        ("t", Order()),
        ("c", Order()),
        ("c", ratio("a", "b", at_least(2))),
        ("c", Bound(Of("a"), (0.0, float("inf")))),
        ("c", Every(Order(), ratio("a", "b", at_least(2)))),
        ("c", Given(Order(("b", "a")), Order(("a", "b")), "")),
    ],
)
def test_criteria_that_can_fail_pass(check, id, criterion):
    check(id, result("gpu/r", criterion))


@pytest.mark.parametrize(
    "criterion",
    [
        Order(("a", "misspelt")),
        Order(columns=("misspelt",)),
        ratio("a", "b", at_least(0)),
        ratio("a", "misspelt", at_least(2)),
        Given(Order(("a", "b")), ratio("a", "b", at_least(0)), ""),
    ],
)
def test_criteria_that_cannot_fail_or_compare_nothing_are_found(check, criterion):
    with pytest.raises(AssertionError, match="c: no change of gpu/r contradicts"):
        check("c", result("gpu/r", criterion))


def test_of_counts_some_change_must_matter(check):
    columns = ("printed", "ours")
    count = Measurement(entries({"x": (8, 8), "zero": (0, 0)}, columns), columns, "")
    check("c", counted(lambda printed: count, Within()))
    with pytest.raises(AssertionError, match="no change of the count"):
        check("c", counted(lambda printed: count, lambda *_: Judgement(Outcome.AGREES, "")))


def test_what_a_test_answers_is_left_to_it(check):
    check("c", by_test("tests/test_x.py::test_y"))
