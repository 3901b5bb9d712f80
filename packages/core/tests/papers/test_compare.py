"""An order holds, is reversed or is not settled: never more than the seeds can say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.papers import (
    Row,
    Status,
    Table,
    Verdict,
    compare_column,
    compare_order,
    status_of,
)


def verdict(ours, better="lower", ordering=("a", "b"), **kwargs):
    return compare_order(ordering, ours, better, **kwargs).verdict


def test_a_clear_gap_over_seeds_settles_the_order_both_ways():
    ours = {"a": (1.00, 1.02, 1.01), "b": (1.50, 1.51, 1.53)}
    assert verdict(ours) is Verdict.HOLDS
    assert verdict(ours, better="higher") is Verdict.REVERSED
    assert verdict(ours, ordering=("b", "a")) is Verdict.REVERSED


def test_one_seed_settles_nothing_unless_the_numbers_are_exact():
    ours = {"a": (1.0,), "b": (100.0,)}
    assert verdict(ours) is Verdict.NOT_SETTLED
    assert verdict(ours, exact=True) is Verdict.HOLDS


def test_a_gap_within_the_noise_is_not_settled():
    assert verdict({"a": (1.0, 1.3, 1.1), "b": (1.2, 1.2, 1.2)}) is Verdict.NOT_SETTLED


def test_noise_that_seeds_share_does_not_hide_a_gap():
    shared = (0.0, 5.0, -3.0)
    ours = {"a": tuple(1.0 + n for n in shared), "b": tuple(1.5 + n + n * 1e-3 for n in shared)}
    assert verdict(ours) is Verdict.HOLDS


def test_one_reversed_pair_reverses_the_whole_order():
    ours = {"a": (1.0, 1.0), "b": (2.0, 2.0), "c": (1.5, 1.5)}
    order = compare_order(("a", "b", "c"), ours, "lower")
    assert [pair.verdict for pair in order.pairs] == [Verdict.HOLDS, Verdict.REVERSED]
    assert order.verdict is Verdict.REVERSED


def test_names_that_were_not_measured_are_passed_over():
    order = compare_order(("a", "unmeasured", "b"), {"a": (1.0, 1.0), "b": (2.0, 2.0)}, "lower")
    assert [(pair.better, pair.worse) for pair in order.pairs] == [("a", "b")]


def test_a_ranking_is_our_own_order():
    ours = {"a": (2.0, 4.0), "b": (1.0, 2.0)}
    order = compare_order(("a", "b"), ours, "lower")
    assert order.ranking(ours, "lower") == "b 1.5, a 3"


def test_models_that_the_paper_ties_are_not_put_in_an_order():
    rows = tuple(Row(name, (value,)) for name, value in (("a", 7.5), ("b", 7.6), ("c", 7.6)))
    table = Table("t", "", "", "", "lower", "", ("PPL",), rows)
    order = compare_column(table, "PPL", {"a": (1.0, 1.1), "b": (3.0, 3.1), "c": (2.0, 2.1)})
    assert [(pair.better, pair.worse) for pair in order.pairs] == [("a", "b")]
    assert compare_column(table, "other", {"a": (1.0,), "b": (2.0,)}).pairs == ()
    assert compare_column(table, "PPL", {"a": (1.0,)}).pairs == ()


def test_equal_numbers_are_not_settled_even_if_exact():
    assert verdict({"a": (1.0,), "b": (1.0,)}, exact=True) is Verdict.NOT_SETTLED


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(-10, 10), min_size=2, max_size=5),
    st.lists(st.floats(-10, 10), min_size=2, max_size=5),
)
def test_swapping_the_names_swaps_the_verdict(first, second):
    size = min(len(first), len(second))
    ours = {"a": first[:size], "b": second[:size]}
    swapped = {
        Verdict.HOLDS: Verdict.REVERSED,
        Verdict.REVERSED: Verdict.HOLDS,
        Verdict.NOT_SETTLED: Verdict.NOT_SETTLED,
    }
    assert verdict(ours, ordering=("b", "a")) is swapped[verdict(ours)]


@pytest.mark.parametrize(
    ("ordering", "ours", "better", "named"),
    [
        (("a", "b"), {"a": (1.0,), "b": (2.0,)}, "best", "better must be"),
        (("a", "b"), {"a": (1.0,)}, "lower", "two measured names"),
        (("a", "b"), {"a": (1.0,), "b": (2.0, 3.0)}, "lower", "one number a seed"),
    ],
)
def test_what_cannot_be_compared_is_refused(ordering, ours, better, named):
    with pytest.raises(ValueError, match=named):
        compare_order(ordering, ours, better)


def test_only_the_papers_own_setting_reproduces_or_differs():
    assert status_of(Verdict.HOLDS, same_setting=True) is Status.REPRODUCED
    assert status_of(Verdict.REVERSED, same_setting=True) is Status.DIFFERS
    assert status_of(Verdict.NOT_SETTLED, same_setting=True) is Status.SCALED_DOWN
    assert {status_of(v, same_setting=False) for v in Verdict} == {Status.SCALED_DOWN}
