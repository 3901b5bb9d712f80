"""A criterion agrees, differs or does not settle: never more than the numbers can say."""

import math
from dataclasses import replace

import pytest
from mezzo_core.reproduction.criteria import (
    Bound,
    Every,
    Given,
    Of,
    Order,
    Within,
    about,
    at_least,
    best,
    change,
    grows,
    ratio,
)
from mezzo_core.reproduction.measurement import Entry, Measurement, entries
from mezzo_core.reproduction.outcomes import (
    AGREES,
    DIFFERS,
    NOT_SETTLED,
    compare_bounds,
    is_settled,
)
from mezzo_core.reproduction.published import Claim, Row, Table

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


@pytest.mark.parametrize("criterion", [Order(), Order(("a", "b")), Order(columns=("PPL",))])
def test_an_order_agrees_differs_and_is_not_settled(criterion):
    assert outcome(criterion, A_FIRST) is AGREES
    assert outcome(criterion, B_FIRST) is DIFFERS
    assert outcome(criterion, NOISY) is NOT_SETTLED
    assert outcome(criterion, replace(A_FIRST, better="higher")) is DIFFERS


def test_one_seed_settles_nothing_unless_the_numbers_are_exact():
    ours = measured(a=(1.0,), b=(100.0,))
    assert outcome(Order(), ours) is NOT_SETTLED
    assert outcome(Order(exact=True), ours) is AGREES
    assert outcome(Order(exact=True), measured(a=(1.0,), b=(1.0,))) is NOT_SETTLED


def test_seeds_are_paired_and_those_that_only_one_model_has_are_left_out():
    shared = (0.0, 5.0, -3.0)
    ours = measured(a=[1.0 + n for n in shared], b=[1.5 + n + n * 1e-3 for n in shared])
    assert outcome(Order(), ours) is AGREES, "noise that seeds share does not hide a gap"
    assert outcome(Order(), measured(a=(1.0, 1.0, 9.0), b=(2.0, 2.0))) is AGREES
    moved = (replace(e, seed=e.seed + 5) if e.model == "b" else e for e in A_FIRST.entries)
    assert outcome(Order(), replace(A_FIRST, entries=tuple(moved))) is NOT_SETTLED


def test_one_pair_the_other_way_is_enough_to_differ_and_is_named():
    ours = measured(a=(1, 1), b=(3, 3), c=(2, 2), d=(4, 4))
    judgement = Order(("a", "b", "c", "unmeasured", "d"))(CLAIM, ours)
    assert judgement.outcome is DIFFERS
    assert "of 3 neighbours 2 as printed, 1 the other way" in judgement.summary
    assert "c before b at PPL" in judgement.summary
    assert outcome(Order(("x", "y")), A_FIRST) is NOT_SETTLED


def test_a_model_that_diverged_with_every_seed_comes_last():
    lost = ("diverged",) * 3
    for better in ("lower", "higher"):
        last = measured(better, a=(1, 2, 3), b=lost)
        first = measured(better, a=lost, b=(1, 2, 3))
        assert outcome(Order(), last) is AGREES
        assert Order()(CLAIM, last).summary == "PPL: a before b: as printed (b diverged)"
        assert outcome(Order(), first) is DIFFERS
        assert "the other way (a diverged)" in Order()(CLAIM, first).summary
    assert outcome(Order(), measured(a=(1,), b=("diverged",))) is NOT_SETTLED
    for a, b in ((lost, lost), ((1, 2, 3), ("diverged", 2, 3)), ((1, 2, 3), ("OOM",) * 3)):
        assert Order()(CLAIM, measured(a=a, b=b)).summary == "no two of the models have numbers"
    over = Order((Of("a", over=Of("b")), "b"))
    assert outcome(over, measured(a=lost, b=(1, 2, 3))) is NOT_SETTLED


def test_an_order_is_judged_in_every_group_and_column_unless_some_are_named():
    both = joined(measured(group="g", a=(1, 1), b=(2, 2)), measured(group="h", a=(2, 2), b=(1, 1)))
    assert outcome(Order(), both) is DIFFERS
    assert outcome(Order(groups=("g",)), both) is AGREES
    both = joined(measured(column="x", a=(1, 1), b=(2, 2)), measured(column="y", a=(2,), b=(1,)))
    assert outcome(Order(), both) is NOT_SETTLED
    assert outcome(Order(columns=("x",)), both) is AGREES


def test_a_table_is_compared_by_column_in_its_own_direction_without_ties():
    ours = joined(
        measured(a=(1, 1), b=(2, 2), c=(3, 3)), measured(column="Acc", a=(9, 9), b=(8, 8))
    )
    judgement = Order()(TABLE, ours)
    assert judgement.outcome is AGREES
    # a before b twice; b and c are tied in one column, and c has no number in the other.
    assert len(judgement.details) == 2
    mirrored = joined(measured(a=(2, 2), b=(1, 1)), measured(column="Acc", a=(8, 8), b=(9, 9)))
    assert outcome(Order(), mirrored, TABLE) is DIFFERS
    assert outcome(Order(), measured(column="other", a=(1,), b=(2,)), TABLE) is NOT_SETTLED


def test_orders_of_columns_and_of_ratios():
    ours = joined(*(measured(column=c, a=(v, v), b=(2, 2)) for c, v in (("8", 2), ("16", 6))))
    assert outcome(Order((Of("a", "8"), Of("a", "16"))), ours) is AGREES
    assert outcome(Order((Of("a", "16"), Of("a", "8"))), ours) is DIFFERS
    assert outcome(grows("a", "b", ("8", "16")), ours) is AGREES
    assert outcome(grows("b", "a", ("8", "16")), ours) is DIFFERS
    assert outcome(best("b", "a", columns=("16",)), ours) is AGREES
    assert outcome(best("a", "b", columns=("16",)), ours) is DIFFERS


def test_a_ratio_agrees_within_its_bounds_in_every_pass():
    criterion = ratio("b", "a", about(2))
    assert outcome(criterion, measured(a=(1, 1), b=(2, 2.4))) is AGREES
    assert outcome(criterion, measured(a=(1, 1), b=(3, 3))) is DIFFERS
    assert outcome(criterion, measured(a=(1, 1), b=(2, 3))) is NOT_SETTLED
    assert outcome(criterion, measured(a=(1,), b=("OOM",))) is NOT_SETTLED
    assert criterion(CLAIM, measured(a=(1,), b=(500,))).summary == (
        "b over a: 500 at PPL (1.5 to 2.5 expected)"
    )


def test_bounds_of_a_change_a_difference_a_detail_and_the_highest_ratio():
    ours = joined(*(measured(column=c, a=(1,), b=(v,)) for c, v in (("x", 1), ("y", 4))))
    assert outcome(change("b", "x", "y", about(4)), ours) is AGREES
    assert outcome(change("b", "y", "x", about(4)), ours) is DIFFERS
    assert outcome(Bound(Of("b", minus=Of("a")), {"y": at_least(3)}), ours) is AGREES
    assert outcome(Bound(Of("b", minus=Of("a")), {"y": at_least(4)}), ours) is DIFFERS
    assert outcome(ratio("b", "a", about(4)), ours) is DIFFERS
    assert outcome(ratio("b", "a", about(4), best=True), ours) is AGREES
    assert outcome(ratio("b", "a", {"z": about(4)}, best=True), ours) is NOT_SETTLED
    entries = tuple(replace(entry, details={"peak_gb": 3.0}) for entry in ours.entries)
    assert outcome(Bound(Of("b", detail="peak_gb"), (3, 3)), replace(ours, entries=entries)) is (
        AGREES
    )


def test_a_single_model_must_have_a_number_in_every_column():
    runs = Bound(Of("a"), {"PPL": (0.0, math.inf), "Acc": (0.0, math.inf)})
    both = joined(A_FIRST, measured(column="Acc", a=(1, 1)))
    assert outcome(runs, both) is AGREES
    assert outcome(runs, A_FIRST) is NOT_SETTLED
    failed = joined(A_FIRST, measured(column="Acc", a=("OOM", "OOM")))
    assert outcome(runs, failed) is DIFFERS
    assert "OOM at Acc" in runs(CLAIM, failed).summary
    assert outcome(Bound(Of("a", "Acc"), (0.0, math.inf)), failed) is DIFFERS, "its own column"
    out_of_memory = joined(A_FIRST, measured(column="Acc", a=("OOM",)))
    assert outcome(runs, out_of_memory) is DIFFERS, "one pass of a speed"
    one = joined(A_FIRST, measured(column="Acc", a=("diverged",)))
    assert outcome(runs, replace(one, kind="training")) is NOT_SETTLED, "one seed"


@pytest.mark.parametrize("kind", ["training", "recall"])
def test_what_trained_models_reach_is_held_to_bounds_by_the_same_test_as_an_order(kind):
    def of(bounds, *ratios):
        ours = replace(measured(a=(1,) * len(ratios), b=ratios), kind=kind)
        return outcome(ratio("b", "a", bounds), ours)

    assert of(about(2), 2.0) is NOT_SETTLED, "one seed"
    assert of(about(2), 2.0, 2.1, 1.9) is AGREES
    assert of(about(2), 3.0, 3.1, 2.9) is DIFFERS
    assert of(about(2), 2.4, 2.3, 2.45) is NOT_SETTLED, "all within, but near the bound"
    assert of(about(2), 2.6, 2.7, 2.9) is NOT_SETTLED, "all above, but near the bound"
    assert of(at_least(2), 3.0, 3.1, 2.9) is AGREES
    assert of(at_least(2), 1.0, 1.1, 0.9) is DIFFERS
    assert compare_bounds([], 0, 1, kind) is NOT_SETTLED


def beside(ours):
    columns = ("printed", "ours")
    return Measurement(entries({"tokens": (1e9, ours), "layers": (3, 3)}, columns), columns, "")


def test_values_are_the_printed_ones_to_a_tolerance():
    assert outcome(Within(), beside(1e9)) is AGREES
    rounded = Within({"tokens": 0.01})
    assert outcome(rounded, beside(1.003e9)) is AGREES
    assert outcome(rounded, beside(1.02e9)) is DIFFERS
    assert outcome(rounded, beside(math.nan)) is DIFFERS
    assert Within()(CLAIM, beside(1.003e9)).details == ("tokens: printed 1e+09, ours 1.003e+09",)
    assert outcome(Within(), Measurement((), ("printed", "ours"), "")) is NOT_SETTLED
    columns = ("printed", "ours")
    of_groups = (*entries({"layers": (3, 3)}, columns), *entries({"layers": (3, 4)}, columns, "g"))
    assert outcome(Within(), Measurement(of_groups, columns, "")) is DIFFERS


def test_every_criterion_must_agree_and_one_may_differ():
    holds, fails, unsettled = Order(("a", "b")), Order(("b", "a")), Order(("x", "y"))
    assert outcome(Every(holds, holds), A_FIRST) is AGREES
    assert outcome(Every(holds, fails), A_FIRST) is DIFFERS
    assert outcome(Every(holds, unsettled), A_FIRST) is NOT_SETTLED
    assert outcome(Every(unsettled, fails), A_FIRST) is DIFFERS
    assert len(Every(holds, fails)(CLAIM, A_FIRST).details) == 2


def test_nothing_is_settled_where_the_condition_does_not_hold():
    holds, fails = Order(("a", "b")), Order(("b", "a"))
    assert outcome(Given(holds, holds, "why"), A_FIRST) is AGREES
    assert outcome(Given(holds, fails, "why"), A_FIRST) is DIFFERS
    for criterion in (holds, fails):
        judgement = Given(fails, criterion, "none uses it")(CLAIM, A_FIRST)
        assert judgement.outcome is NOT_SETTLED
        assert judgement.summary.startswith("none uses it (")
    assert outcome(Given(Order(("x", "y")), holds, "why"), A_FIRST) is NOT_SETTLED


def test_the_test_of_a_gap_is_students_at_five_per_cent():
    # Of 0, 1, ..., 9 shifted by c, t = (c + 4.5) / (3.0277 / sqrt(10)), against 2.262.
    gaps = [float(i) for i in range(10)]
    assert is_settled(gaps)
    assert not is_settled([gap - 4.5 + 2.262 * 0.957 for gap in gaps])
    assert is_settled([gap - 4.5 + 2.262 * 0.958 for gap in gaps])
    assert not is_settled([5.0])
    # Of two gaps m - 1 and m + 1, t = m, against 12.71; of three, t = m sqrt(3), against 4.303.
    assert (is_settled([11.7, 13.7]), is_settled([11.72, 13.72])) == (False, True)
    assert (is_settled([1.48, 2.48, 3.48]), is_settled([1.49, 2.49, 3.49])) == (False, True)


@pytest.mark.parametrize(
    ("criterion", "ours", "better"),
    [
        (Order(own="b"), B_FIRST, True),
        (Order(own="b"), A_FIRST, False),  # it agrees
        (Order(("b2", "b1"), own="b"), measured(b1=(1, 1, 1), b2=(2, 2, 2)), False),  # both own
        (ratio("b", "a", (1.1, 1.3), good="higher"), A_FIRST, True),
        (ratio("b", "a", (1.1, 1.3), good="lower"), B_FIRST, True),
        (ratio("b", "a", (1.1, 1.3), good="higher"), B_FIRST, False),
        (ratio("b", "a", (1.1, 1.3)), A_FIRST, False),
        (ratio("b", "a", (1.1, 1.9), good="higher"), A_FIRST, False),  # it agrees
        (Every(Order(own="b"), ratio("b", "a", (1.1, 1.3), good="lower")), B_FIRST, True),
        (Every(Order(own="b"), ratio("b", "a", (1.1, 1.3), good="higher")), B_FIRST, False),
    ],
)
def test_ours_is_better_where_all_that_differs_is(criterion, ours, better):
    assert criterion(CLAIM, ours).better == better
