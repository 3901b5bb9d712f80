"""Each table and claim of the paper is answered, and each criterion can come out against it."""

import math

import pytest
from mezzo_core.reproduction.measurement import Entry, Measurement
from mezzo_core.reproduction.outcomes import Outcome
from mezzo_recurrent_transformer import schedule
from mezzo_recurrent_transformer.recipes import with_layers
from mezzo_recurrent_transformer.reproduction import counts
from mezzo_recurrent_transformer.reproduction.claims import (
    NORMALIZED,
    RAW,
    REPRODUCTION,
    RT,
    XFMR,
    in_nats,
)
from mezzo_recurrent_transformer.reproduction.speed import EAGER, GRAPH

PUBLISHED = REPRODUCTION.published


def numbers(columns, better="lower", **rows):
    """Return a measurement with three seeds, by short names; words are values too."""
    names = {"eager": EAGER, "graph": GRAPH, "normalized": NORMALIZED, "raw": RAW}
    names |= {"rt12": with_layers(RT, 12), "xfmr12": with_layers(XFMR, 12)}
    every = [
        Entry(names[name], c, v if isinstance(v, str) else v * (1 + s / 1e4), seed=s)
        for name, values in rows.items()
        for c, v in zip(columns, values, strict=True)
        for s in range(3)
    ]
    return Measurement(tuple(every), tuple(columns), "made up", better=better)


def outcome(id, ours):
    *_, evidence = REPRODUCTION.answers[id]
    return evidence.criterion(PUBLISHED.by_id[id], ours).outcome


RATES = ("1e-3", "3e-3", "1e-2")


def test_each_models_best_perplexities_are_read_as_cross_entropies():
    ours = numbers(RATES, rt12=(9, math.e, 8), xfmr12=(math.e**2, "diverged", "OOM"))
    turned = in_nats(ours)
    assert (turned.columns, turned.unit) == (("Val CE",), "nats")
    assert [entry.value for entry in turned.entries] == pytest.approx([1, 1, 2, 2], rel=1e-3)
    assert [entry.seed for entry in turned.entries] == [1, 2, 1, 2]  # seed 0 chose the rate


def test_the_naive_evaluation_is_not_taken_for_the_tiled_one(monkeypatch):
    every = [schedule.Tile(range(t), range(t, t + 1)) for t in range(1, 2**14)]
    monkeypatch.setattr(counts, "tiles", lambda num_tokens: every[: num_tokens - 1])
    counts.loads.cache_clear()
    for name in ("hbm_traffic", "arithmetic_intensity", "cache_locality"):
        found = getattr(counts, name)(None)
        assert outcome(f"rt.claim.{name}", found) is Outcome.DIFFERS
    counts.loads.cache_clear()
