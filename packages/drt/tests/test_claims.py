"""Each table and claim of the paper is answered, and each criterion can come out against it."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.reproduction.measurement import Entry, Measurement
from mezzo_core.reproduction.outcomes import Outcome
from mezzo_drt import DRTConfig, layer, stack
from mezzo_drt.reproduction import counts
from mezzo_drt.reproduction.claims import (
    BASE,
    DRT1,
    DRT2,
    LANDMARK,
    LONGEST,
    RANDOM,
    REPRODUCTION,
    WINDOW,
)

PUBLISHED = REPRODUCTION.published


def numbers(columns, groups=("",), **rows):
    """Return a measurement with three seeds, by short names."""
    names = {"drt1": DRT1, "drt2": DRT2, "lm": LANDMARK, "window": WINDOW}
    names |= {"base": "BaseLM", "deep": "BaseLM +2 layers", "full": BASE, "random": RANDOM}
    every = [
        Entry(names[name], c, v * (1 + s / 1e4), g, s, {"peak_gb": v * (1 + s / 1e4)})
        for g in groups
        for name, values in rows.items()
        for c, v in zip(columns, values, strict=True)
        for s in range(3)
    ]
    return Measurement(tuple(every), tuple(columns), "made up")


def outcome(id, ours):
    *_, evidence = REPRODUCTION.answers[id]
    return evidence.criterion(PUBLISHED.by_id[id], ours).outcome


def costs(drt, landmark):
    """Return inference costs of prompts of 16K, in the columns of Table 3."""
    columns = PUBLISHED.table("drt.table3").columns[2:]
    return numbers(columns, ("16K",), base=(2, 3, 2, 3), drt1=drt, lm=landmark)


HOPS = ("1K", "4K", "64K", "256K", "4M")
TRAINING = PUBLISHED.table("drt.table4.memory").columns
FOUND = {"lm": (91, 88, 0, 0, 0), "drt1": (41, 33, 38, 35, 34)}


@pytest.mark.parametrize(
    ("id", "meets", "contrary"),
    [
        (
            "drt.table2.single_niah",
            numbers(("4K", "64K"), deep=(12, 3), drt1=(96, 97), lm=(99, 4)),
            numbers(("4K", "64K"), deep=(12, 3), drt1=(96, 97), lm=(99, 40)),
        ),
        (
            "drt.table3",
            costs((2.5, 4.62, 2.12, 12.24), (321.8, 5.94, 8.32, 96)),
            costs((6, 4.62, 2.12, 12.24), (321.8, 5.94, 8.32, 96)),
        ),
        (
            "drt.table4.memory",
            numbers(TRAINING, window=(20,) * 4, drt1=(22, 23, 25, 22), drt2=(23,) * 4),
            numbers(TRAINING, window=(20,) * 4, drt1=(22, 23, 25, 22), drt2=(40,) * 4),
        ),
        (
            "drt.claim.passkey_16m",
            numbers(LONGEST, drt1=(99,) * 8, drt2=(99,) * 8),
            numbers(LONGEST, drt1=(99,) * 7 + (97,), drt2=(99,) * 8),
        ),
        (
            "drt.claim.two_hop",
            numbers(HOPS, **FOUND, drt2=(88, 84, 81, 80, 79)),
            numbers(HOPS, **FOUND, drt2=(88, 84, 50, 80, 79)),
        ),
        (
            "drt.claim.extrapolation",
            numbers(("4096", "16384"), full=(9, 8.9), drt1=(8, 7.9), random=(9, 9)),
            numbers(("4096", "16384"), full=(9, 8.9), drt1=(8, 8.9), random=(9, 9)),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_criteria_come_out_both_ways(id, meets, contrary):
    assert outcome(id, meets) is Outcome.AGREES
    assert outcome(id, contrary) is Outcome.DIFFERS


def test_a_steady_loss_of_models_that_do_not_read_far_settles_nothing():
    alike = numbers(("4096", "16384"), full=(9, 8.9), drt1=(9, 8.9), random=(9, 8.9))
    assert outcome("drt.claim.extrapolation", alike) is Outcome.NOT_SETTLED


def test_pairs_are_those_of_a_forward(monkeypatch):
    """What the costs are counted from is what the stack does."""
    config = DRTConfig(
        num_layers=4, num_groups=2, chunk_size=4, num_retrieved=3, window_size=9, head_dim=8,
        hidden=8,
    )  # fmt: skip
    found = dict.fromkeys(counts.pairs(config, 4), 0)
    right_retrieve, right_op = stack.retrieve, layer.grouped_cross_attention

    def retrieve(queries, keys, lo, hi, *others, **options):
        # The last chunk's landmark retrieves for a chunk that does not exist.
        found[counts.SCORES] += int((hi - lo).clamp(min=0).sum())
        return right_retrieve(queries, keys, lo, hi, *others, **options)

    def op(q, k, v, indices, *others, **options):
        found[counts.READING] += int((indices >= 0).sum()) * q.shape[2] * k.shape[2]
        return right_op(q, k, v, indices, *others, **options)

    monkeypatch.setattr(stack, "retrieve", retrieve)
    monkeypatch.setattr(layer, "grouped_cross_attention", op)
    with torch.no_grad():
        config.build(16)(torch.randn(1, 32, 16))
    places = 40
    found[counts.WINDOW] = 4 * sum(min(p + 1, 9) for p in range(places))
    assert found == counts.pairs(config, 32)


def test_memory_without_offloading_and_quadratic_reading_differ(monkeypatch):
    right = counts.pairs

    def wrong(config, num_tokens):
        return right(replace(config, num_retrieved=10**9), num_tokens)  # each reads all before it

    monkeypatch.setattr(counts, "OFFLOADED", counts.PAPER)
    monkeypatch.setattr(counts, "pairs", wrong)
    for name in ("kv_memory_offload", "complexity_total", "linear_attention_cost"):
        assert outcome(f"drt.claim.{name}", getattr(counts, name)(None)) is Outcome.DIFFERS
