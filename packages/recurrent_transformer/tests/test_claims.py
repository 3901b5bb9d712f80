"""The claims compare cross-entropies, computed from the measured perplexities."""

import math

import pytest
from mezzo_core.reproduction.measurement import Entry, Measurement, entries
from mezzo_core.reproduction.outcomes import Outcome
from mezzo_recurrent_transformer.recipes import with_layers
from mezzo_recurrent_transformer.reproduction.claims import (
    REPRODUCTION,
    RT,
    XFMR,
    in_nats,
    slower,
)


def test_each_models_best_perplexities_are_read_as_cross_entropies():
    found = {RT: (9, math.e, 8), XFMR: (math.e**2, "diverged", "OOM")}
    runs = [
        Entry(model, rate, value, seed=seed)
        for model, values in found.items()
        for rate, value in zip(("1e-3", "3e-3", "1e-2"), values, strict=True)
        for seed in range(3)
    ]
    turned = in_nats(Measurement(tuple(runs), ("1e-3", "3e-3", "1e-2"), "made up"))
    assert (turned.columns, turned.unit) == (("Val CE",), "nats")
    assert [entry.value for entry in turned.entries] == pytest.approx([1, 1, 2, 2])
    assert [entry.seed for entry in turned.entries] == [1, 2, 1, 2]  # seed 0 chose the rate


def test_a_recurrent_model_that_is_slowed_down_less_than_printed_is_better():
    claim = REPRODUCTION.published.by_id["rt.claim.throughput_12"]
    recurrent, transformer = map(float, claim.values)
    names = (with_layers(RT, 12), with_layers(XFMR, 12))
    for faster, better in ((2, True), (0.5, False)):
        values = zip(names, ((recurrent * faster,), (transformer,)), strict=True)
        ours = Measurement(entries(dict(values), ("tokens/s",)), ("tokens/s",), "made up")
        found = slower(12)(claim, ours)
        assert (found.outcome, found.better) == (Outcome.DIFFERS, better)
