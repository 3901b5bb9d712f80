"""Each table and claim of the paper is answered, and each criterion can come out against it."""

import pytest
from mezzo_core.reproduction.measurement import Entry, Measurement
from mezzo_core.reproduction.outcomes import Outcome
from mezzo_drt.reproduction.claims import BASE, DRT1, RANDOM, REPRODUCTION

PUBLISHED = REPRODUCTION.published


def outcome(id, ours):
    *_, evidence = REPRODUCTION.answers[id]
    return evidence.criterion(PUBLISHED.by_id[id], ours).outcome


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, Outcome.AGREES),
        ({DRT1: (8, 8.9)}, Outcome.DIFFERS),
        ({DRT1: (9, 8.9), RANDOM: (9, 8.9)}, Outcome.NOT_SETTLED),
    ],
)
def test_a_steady_loss_of_models_that_do_not_read_far_settles_nothing(found, expected):
    values = {BASE: (9, 8.9), DRT1: (8, 7.9), RANDOM: (9, 9)} | found
    entries = [
        Entry(model, column, value * (1 + seed / 1e4), seed=seed)
        for model, both in values.items()
        for column, value in zip(("4096", "16384"), both, strict=True)
        for seed in range(3)
    ]
    ours = Measurement(tuple(entries), ("4096", "16384"), "made up")
    assert outcome("drt.claim.extrapolation", ours) is expected
