"""A criterion agrees, differs or does not settle: never more than the numbers can say."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.papers.criteria import (
    AsPrinted,
    Equal,
    Every,
    InOrder,
    Outcome,
    Ratio,
    about,
    at_least,
    compare_bounds,
    compare_order,
    is_settled,
)
from mezzo_core.papers.measurement import Entry, Measurement, entries
from mezzo_core.papers.published import Claim, Row, Table

AGREES, DIFFERS, NOT_SETTLED = Outcome.AGREES, Outcome.DIFFERS, Outcome.NOT_SETTLED
CLAIM = Claim("p.claim.order", "a is better than b", "order", (), "1", ordering=("a", "b"))
ROWS = (Row("a", (1.0, 9.0)), Row("b", (2.0, 8.0)), Row("c", (2.0, "OOM")))
TABLE = Table("p.table1", "", "", "", "lower", "", ("PPL", "Acc"), ROWS)
TABLE = replace(TABLE, column_better=("lower", "higher"))


def measured(better="lower", column="PPL", group="", **values):
    """Return one number a seed for each model."""
    found = [
        Entry(model, column, value, group, seed)
        for model, runs in values.items()
        for seed, value in enumerate(runs)
    ]
    return Measurement(tuple(found), (column,), "a setting", better=better)


def joined(*several):
    whole = [entry for each in several for entry in each.entries]
    columns = dict.fromkeys(entry.column for entry in whole)
    return replace(several[0], entries=tuple(whole), columns=tuple(columns))


A_FIRST = measured(a=(1.00, 1.02, 1.01), b=(1.50, 1.51, 1.53))
B_FIRST = measured(a=(1.50, 1.51, 1.53), b=(1.00, 1.02, 1.01))
NOISY = measured(a=(1.0, 1.3, 1.1), b=(1.2, 1.2, 1.2))


def outcome(criterion, ours, printed=CLAIM):
    return criterion(printed, ours).outcome


@pytest.mark.parametrize("criterion", [InOrder(), InOrder(("a", "b")), InOrder(columns=("PPL",))])
def test_an_order_agrees_differs_and_is_not_settled(criterion):
    assert outcome(criterion, A_FIRST) is AGREES
    assert outcome(criterion, B_FIRST) is DIFFERS
    assert outcome(criterion, NOISY) is NOT_SETTLED
    assert outcome(criterion, replace(A_FIRST, better="higher")) is DIFFERS


def test_one_seed_settles_nothing_unless_the_numbers_are_exact():
    ours = measured(a=(1.0,), b=(100.0,))
    assert outcome(InOrder(), ours) is NOT_SETTLED
    assert outcome(InOrder(exact=True), ours) is AGREES
    assert outcome(InOrder(("b", "a"), exact=True), ours) is DIFFERS
    assert outcome(InOrder(exact=True), measured(a=(1.0,), b=(1.0,))) is NOT_SETTLED


def test_noise_that_seeds_share_does_not_hide_a_gap():
    shared = (0.0, 5.0, -3.0)
    ours = measured(a=[1.0 + n for n in shared], b=[1.5 + n + n * 1e-3 for n in shared])
    assert outcome(InOrder(), ours) is AGREES


def test_seeds_that_only_one_model_has_are_left_out():
    assert outcome(InOrder(), measured(a=(1.0, 1.0, 9.0), b=(2.0, 2.0))) is AGREES
    other = measured(b=(2.0, 2.0))
    moved = [replace(entry, seed=entry.seed + 5) for entry in other.entries]
    ours = joined(measured(a=(1.0, 1.0)), replace(other, entries=tuple(moved)))
    assert outcome(InOrder(), ours) is NOT_SETTLED


def test_one_pair_the_other_way_is_enough_to_differ():
    ours = measured(a=(1, 1), b=(3, 3), c=(2, 2))
    judgement = InOrder(("a", "b", "c"))(CLAIM, ours)
    assert judgement.outcome is DIFFERS
    assert "1 as printed, 1 the other way" in judgement.summary
    assert "c before b at PPL" in judgement.summary
    assert len(judgement.details) == 2


def test_names_that_were_not_measured_or_do_not_fit_are_passed_over():
    pairs = list(compare_order(("a", "unmeasured", "b"), A_FIRST, "PPL"))
    assert [(pair.better, pair.worse) for pair in pairs] == [("a", "b")]
    assert list(compare_order(("a", "b"), measured(a=("OOM",), b=(1, 1)), "PPL")) == []
    assert outcome(InOrder(("x", "y")), A_FIRST) is NOT_SETTLED


def test_an_order_is_judged_in_every_group_and_column_unless_some_are_named():
    both = joined(measured(group="g", a=(1, 1), b=(2, 2)), measured(group="h", a=(2, 2), b=(1, 1)))
    assert outcome(InOrder(), both) is DIFFERS
    assert outcome(InOrder(groups=("g",)), both) is AGREES
    both = joined(measured(column="x", a=(1, 1), b=(2, 2)), measured(column="y", a=(2,), b=(1,)))
    assert outcome(InOrder(), both) is NOT_SETTLED
    assert outcome(InOrder(columns=("x",)), both) is AGREES


def test_a_table_is_compared_by_column_in_its_own_direction_without_ties():
    ours = joined(
        measured(a=(1, 1), b=(2, 2), c=(3, 3)), measured(column="Acc", a=(9, 9), b=(8, 8))
    )
    judgement = AsPrinted()(TABLE, ours)
    assert judgement.outcome is AGREES
    # a before b twice; b and c are tied in one column, and c has no number in the other.
    assert len(judgement.details) == 2
    worse = joined(ours, measured(column="Acc", a=(7, 7)))
    mirrored = joined(measured(a=(2, 2), b=(1, 1)), measured(column="Acc", a=(8, 8), b=(9, 9)))
    assert outcome(AsPrinted(), mirrored, TABLE) is DIFFERS
    assert outcome(AsPrinted(), worse, TABLE) is DIFFERS
    assert outcome(AsPrinted(), measured(column="other", a=(1,), b=(2,)), TABLE) is NOT_SETTLED
    assert outcome(AsPrinted(), NOISY, TABLE) is NOT_SETTLED


def test_rows_of_other_groups_are_compared_only_if_asked():
    rows = tuple(replace(row, group=row.model) for row in ROWS)
    table = replace(TABLE, rows=rows)
    ours = joined(*(measured(group=m, **{m: (v, v)}) for m, v in (("a", 1), ("b", 2))))
    assert outcome(AsPrinted(), ours, table) is NOT_SETTLED
    assert outcome(AsPrinted(across_groups=True), ours, table) is AGREES
    turned = joined(*(measured(group=m, **{m: (v, v)}) for m, v in (("a", 2), ("b", 1))))
    assert outcome(AsPrinted(across_groups=True), turned, table) is DIFFERS


def test_a_ratio_agrees_within_its_bounds_in_every_seed():
    criterion = Ratio("b", "a", {"PPL": about(2)})
    assert outcome(criterion, measured(a=(1, 1), b=(2, 2.4))) is AGREES
    assert outcome(criterion, measured(a=(1, 1), b=(3, 3))) is DIFFERS
    assert outcome(criterion, measured(a=(1, 1), b=(1, 1))) is DIFFERS
    assert outcome(criterion, measured(a=(1, 1), b=(2, 3))) is NOT_SETTLED
    assert outcome(criterion, measured(a=(1,), b=("OOM",))) is NOT_SETTLED
    assert "2.2 at PPL" in criterion(CLAIM, measured(a=(1, 1), b=(2, 2.4))).summary


@pytest.mark.parametrize("kind", ["training", "recall"])
def test_what_trained_models_reach_is_held_to_bounds_by_the_same_test_as_an_order(kind):
    def of(bounds, *ratios):
        ours = replace(measured(a=(1,) * len(ratios), b=ratios), kind=kind)
        return outcome(Ratio("b", "a", {"PPL": bounds}), ours)

    assert of(about(2), 2.0) is NOT_SETTLED, "one seed"
    assert of(at_least(2), 500.0) is NOT_SETTLED, "one seed"
    assert of(about(2), 2.0, 2.1, 1.9) is AGREES
    assert of(about(2), 3.0, 3.1, 2.9) is DIFFERS
    assert of(about(2), 1.0, 1.1, 0.9) is DIFFERS
    assert of(about(2), 2.4, 2.3, 2.45) is NOT_SETTLED, "all within, but near the bound"
    assert of(about(2), 2.6, 2.7, 2.9) is NOT_SETTLED, "all above, but near the bound"
    assert of(at_least(2), 3.0, 3.1, 2.9) is AGREES
    assert of(at_least(2), 1.0, 1.1, 0.9) is DIFFERS


@pytest.mark.parametrize("kind", ["training", "speed"])
def test_nothing_is_within_bounds_if_nothing_was_measured(kind):
    assert compare_bounds([], 0, 1, kind) is NOT_SETTLED


def test_bounds_say_about_and_at_least():
    assert about(8) == (6.0, 10.0)
    assert at_least(3) == (3.0, math.inf)
    criterion = Ratio("b", "a", {"PPL": at_least(2)}, what="how slow b is")
    judgement = criterion(CLAIM, measured(a=(1,), b=(500,)))
    assert judgement.outcome is AGREES
    assert judgement.summary == "how slow b is: 500 at PPL"
    judgement = criterion(CLAIM, measured(a=(1,), b=(1,)))
    assert judgement.outcome is DIFFERS
    assert judgement.summary == "how slow b is: 1 at PPL (less than expected: at least 2)"


def test_up_to_x_times_is_about_the_highest_ratio():
    ours = joined(*(measured(column=c, a=(1,), b=(v,)) for c, v in (("x", 1), ("y", 4))))
    bounds = {"x": about(4), "y": about(4)}
    assert outcome(Ratio("b", "a", bounds), ours) is DIFFERS
    assert outcome(Ratio("b", "a", bounds, best=True), ours) is AGREES
    assert outcome(Ratio("b", "a", {"x": about(4)}, best=True), ours) is DIFFERS
    assert outcome(Ratio("b", "a", {"z": about(4)}, best=True), ours) is NOT_SETTLED


def beside(ours):
    columns = ("printed", "ours")
    return Measurement(entries({"tokens": (1e9, ours), "layers": (3, 3)}, columns), columns, "")


def test_values_are_equal_to_the_printed_precision():
    assert outcome(Equal(), beside(1e9)) is AGREES
    assert outcome(Equal({"tokens": 0.01}), beside(1.003e9)) is AGREES
    judgement = Equal()(CLAIM, beside(1.003e9))
    assert judgement.outcome is DIFFERS
    assert judgement.details == ("tokens: printed 1e+09, ours 1.003e+09",)


def test_a_nan_is_equal_to_nothing():
    assert outcome(Equal({"tokens": 0.01}), beside(float("nan"))) is DIFFERS


def test_nothing_is_equal_if_nothing_was_counted():
    assert outcome(Equal(), Measurement((), ("printed", "ours"), "")) is NOT_SETTLED


def test_every_criterion_must_agree_and_one_may_differ():
    holds, fails = InOrder(("a", "b")), InOrder(("b", "a"))
    unsettled = InOrder(("x", "y"))
    assert outcome(Every((holds, holds)), A_FIRST) is AGREES
    assert outcome(Every((holds, fails)), A_FIRST) is DIFFERS
    assert outcome(Every((holds, unsettled)), A_FIRST) is NOT_SETTLED
    assert outcome(Every((unsettled, fails)), A_FIRST) is DIFFERS
    assert len(Every((holds, fails))(CLAIM, A_FIRST).details) == 2


def test_the_test_of_a_gap_is_students_at_five_per_cent():
    # Of 0, 1, ..., 9 shifted by c, t = (c + 4.5) / (3.0277 / sqrt(10)), against 2.262.
    gaps = [float(i) for i in range(10)]
    assert is_settled(gaps)
    assert not is_settled([gap - 4.5 + 2.262 * 0.957 for gap in gaps])
    assert is_settled([gap - 4.5 + 2.262 * 0.958 for gap in gaps])
    assert not is_settled([5.0])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_swapping_the_names_swaps_the_outcome(data):
    runs = st.lists(st.floats(-10, 10), min_size=2, max_size=5)
    ours = measured(a=data.draw(runs), b=data.draw(runs))
    swapped = {AGREES: DIFFERS, DIFFERS: AGREES, NOT_SETTLED: NOT_SETTLED}
    assert outcome(InOrder(("b", "a")), ours) is swapped[outcome(InOrder(("a", "b")), ours)]
