"""The claims compare cross-entropies, computed from the measured perplexities."""

import math

import pytest
from mezzo_core.reproduction.measurement import Entry, Measurement
from mezzo_recurrent_transformer.reproduction.claims import RT, XFMR, in_nats


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
