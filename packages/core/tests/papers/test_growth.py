"""Criteria of bounds and growth agree, differ, and are not settled where they should."""

from dataclasses import replace

import pytest
from mezzo_core.papers.criteria import Outcome
from mezzo_core.papers.growth import Growth, Steady, Within, growing
from mezzo_core.papers.measurement import Entry, Measurement
from mezzo_core.papers.published import Claim

CLAIM = Claim("p.claim.c", "a claim", "a quantity", (), "a place")
T = ("512", "1024", "2048")


def numbers(*passes, columns=T):
    """Return a measurement of one model, a tuple of numbers for each pass."""
    every = [
        Entry("m", column, value, seed=seed)
        for seed, values in enumerate(passes)
        for column, value in zip(columns, values, strict=True)
    ]
    return Measurement(tuple(every), columns, "made up")


@pytest.mark.parametrize(
    ("criterion", "ours", "outcome"),
    [
        (Within(1e-9), numbers((0.0, 1e-9, 0.0)), Outcome.AGREES),
        (Within(1e-9), numbers((0.0, 2e-9, 0.0)), Outcome.DIFFERS),
        (Within(1e-9), numbers((0.0, float("nan"), 0.0)), Outcome.DIFFERS),
        (Within(1e-9), numbers(), Outcome.NOT_SETTLED),
        (Steady(1.2), numbers((10.0, 12.0, 11.0)), Outcome.AGREES),
        (Steady(1.2), numbers((10.0, float("nan"), 11.0)), Outcome.DIFFERS),
        (Steady(1.2), numbers((10.0, 12.1, 11.0)), Outcome.DIFFERS),
        (Steady(1.2, ("another",)), numbers((10.0, 12.1, 11.0)), Outcome.NOT_SETTLED),
        (Steady(1.2, (), T[:1]), numbers((10.0, 12.1, 11.0)), Outcome.NOT_SETTLED),
        (Growth({"m": (0.9, 1.1)}, T), numbers((1, 2, 4)), Outcome.AGREES),
        (Growth({"m": (0.9, 1.1)}, T), numbers((1, 2, 16)), Outcome.DIFFERS),
        (Growth({"m": (0.9, 1.1)}, T), numbers((1, 2, 4), (1, 2, 16)), Outcome.NOT_SETTLED),
        (Growth({"m": (0.9, 1.1)}, T), numbers((1,), columns=T[:1]), Outcome.NOT_SETTLED),
    ],
)
def test_outcomes(criterion, ours, outcome):
    assert criterion(CLAIM, ours).outcome is outcome


@pytest.mark.parametrize(
    ("highest", "outcome"),
    [
        ((10.0,), Outcome.NOT_SETTLED),
        ((100.0,), Outcome.NOT_SETTLED),
        ((10.0, 10.1, 9.9), Outcome.AGREES),
        ((14.0, 14.1, 13.9), Outcome.DIFFERS),
        ((11.9, 11.6, 11.95), Outcome.NOT_SETTLED),
        ((12.1, 12.6, 12.2), Outcome.NOT_SETTLED),
    ],
)
def test_that_a_trained_model_is_steady_is_settled_by_seeds(highest, outcome):
    ours = replace(numbers(*((10.0, 10.0, value) for value in highest)), kind="training")
    assert Steady(1.2)(CLAIM, ours).outcome is outcome


def test_a_speed_is_steady_in_every_pass():
    ours = replace(numbers((10, 11, 11), (10, 11, 11), (10, 13, 11)), kind="speed")
    assert Steady(1.2)(CLAIM, ours).outcome is Outcome.NOT_SETTLED


def test_seeds_that_only_some_columns_have_are_not_compared():
    entries = tuple(Entry("m", c, 1.0, seed=s) for s, c in enumerate(T))
    assert Steady()(CLAIM, Measurement(entries, T, "made up")).outcome is Outcome.NOT_SETTLED


def test_what_grows_as_said_is_steady():
    ours = growing(
        {"pairs over T^2": (lambda T: T * (T + 1) // 2, lambda T: T**2)}, "x", (100, 200)
    )
    assert [entry.value for entry in ours.entries] == [0.505, 0.5025]
    assert ours.columns == ("100", "200")
