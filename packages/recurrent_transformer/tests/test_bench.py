"""`mezzo-recurrent-transformer bench` has a row of each layer, stack, batch and phase."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.papers.measurement import read_timings
from mezzo_recurrent_transformer import RecurrentBlock, bench

CPU = torch.device("cpu")
TINY = replace(bench.QUICK, d_model=16, head_dim=8, seq_len=8, batches=(1, 3), seconds=0.0)


def test_layers_stacks_and_models_have_rows_that_can_be_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "QUICK", replace(TINY, models=()))
    monkeypatch.setattr(bench, "CHECKED_DEPTH", 1)
    path = tmp_path / "cpu/bench.jsonl"
    rows = bench.bench(CPU, quick=True, out=path)
    seen = [(row["name"], row["impl"], row["shape"]["B"]) for row in rows]
    assert len(set(seen)) == len(seen) == 2 * 2 * 2 * 2
    for kind in ("layer", "stack"):
        for phase in ("forward", "train"):
            for impl in ("mezzo", "transformer"):
                assert (f"recurrent_transformer {kind} {phase}", impl, 3) in seen
    for row in rows:
        stack = {"depth": 2} if row["kind"] == "stack" else {}
        assert row["shape"] == {"B": row["shape"]["B"], "T": 8, "C": 16, **stack}
        assert 0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"]
    assert len(read_timings(path).entries) == len(rows)


def test_the_tiny_models_are_measured_after_the_layers(monkeypatch):
    monkeypatch.setattr(bench, "QUICK", replace(bench.QUICK, seconds=0.0))
    monkeypatch.setattr(bench, "layer_rows", lambda *_: iter(()))
    monkeypatch.setattr(bench, "model_rows", lambda name, *_: [name])
    monkeypatch.setattr(bench, "run", lambda rows, *_: list(rows))
    assert bench.bench(CPU, quick=True) == ["tiny_transformer", "tiny_recurrent"]


def test_a_wrong_layer_is_not_timed(monkeypatch):
    right = RecurrentBlock.step
    monkeypatch.setattr(RecurrentBlock, "step", lambda self, x, state: 1.1 * right(self, x, state))
    with pytest.raises(UserError, match="RecurrentBlock: the output in decoding is wrong"):
        list(bench.layer_rows(TINY, CPU))


def test_what_does_not_fit_is_said_and_the_rest_is_timed(monkeypatch):
    said, right = [], bench.time_layer

    def full(layer, code, phase, B, T, **options):
        if phase == "train" and B == 3:
            raise torch.OutOfMemoryError
        return right(layer, code, phase, B, T, **options)

    monkeypatch.setattr(bench, "time_layer", full)
    monkeypatch.setattr(bench, "check_layer", lambda layer: None)
    monkeypatch.setattr(bench, "say", said.append)
    rows = list(bench.layer_rows(TINY, CPU))
    assert len(rows) == 3 * 2 * 2
    assert said[0] == (
        "recurrent_transformer layer train (transformer) at {'B': 3, 'T': 8, 'C': 16}: "
        "out of memory"
    )
