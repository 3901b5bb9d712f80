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
    RANDOM,
    REPRODUCTION,
)

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
