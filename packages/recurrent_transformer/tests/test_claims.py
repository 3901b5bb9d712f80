"""Each table and claim of the paper is answered, and each criterion can come out against it."""

import math

import pytest
from mezzo_core.reproduction.measurement import Entry, Measurement
from mezzo_core.reproduction.outcomes import Outcome
from mezzo_recurrent_transformer import schedule
from mezzo_recurrent_transformer.reproduction import counts
from mezzo_recurrent_transformer.reproduction.claims import (
    REPRODUCTION,
    RT,
    XFMR,
    in_nats,
)

PUBLISHED = REPRODUCTION.published


def test_each_models_best_perplexities_are_read_as_cross_entropies():
    found = {RT: (9, math.e, 8), XFMR: (math.e**2, "diverged", "OOM")}
    entries = [
        Entry(model, rate, value, seed=seed)
        for model, values in found.items()
        for rate, value in zip(("1e-3", "3e-3", "1e-2"), values, strict=True)
        for seed in range(3)
    ]
    turned = in_nats(Measurement(tuple(entries), ("1e-3", "3e-3", "1e-2"), "made up"))
    assert (turned.columns, turned.unit) == (("Val CE",), "nats")
    assert [entry.value for entry in turned.entries] == pytest.approx([1, 1, 2, 2])
    assert [entry.seed for entry in turned.entries] == [1, 2, 1, 2]  # seed 0 chose the rate


def test_the_naive_evaluation_is_not_taken_for_the_tiled_one(monkeypatch):
    every = [schedule.Tile(range(t), range(t, t + 1)) for t in range(1, 2**14)]
    monkeypatch.setattr(counts, "tiles", lambda num_tokens: every[: num_tokens - 1])
    counts.loads.cache_clear()
    for name in ("hbm_traffic", "arithmetic_intensity", "cache_locality"):
        found = getattr(counts, name)(None)
        id = f"rt.claim.{name}"
        (evidence,) = REPRODUCTION.answers[id]
        assert evidence.criterion(PUBLISHED.by_id[id], found).outcome is Outcome.DIFFERS
    counts.loads.cache_clear()
