"""`mezzo-rat bench` has a row of each layer, length and phase, and a model's after them."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import Attention
from mezzo_core.papers.measurement import read_timings
from mezzo_rat import bench
from mezzo_rat.speed import LAYERS

CPU = torch.device("cpu")
TINY = replace(bench.CPU, tokens=64, lengths=(32, 64), d_model=16, head_dim=8, seconds=0.0)


def test_layers_of_every_length_and_phase_have_rows_that_can_be_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "QUICK", TINY)
    monkeypatch.setattr(bench, "model_rows", lambda *_: [None])
    monkeypatch.setattr(bench, "run", lambda rows, *_: list(rows))
    *rows, first, second = bench.bench(CPU, quick=True)
    assert (first, second) == (None, None)
    assert len(rows) == len(LAYERS) * 2 * 2
    names = {f"{n} layer {p}" for n in ("rat", "linear_rnn", "attention") for p in bench.PHASES}
    assert {row.name for row in rows} == names
    for row in rows:
        assert row.shape["B"] * row.shape["T"] == 64
        assert 0 < row.timing.ms_p20 <= row.timing.ms <= row.timing.ms_p80
    monkeypatch.undo()
    bench.run(rows, CPU, tmp_path / "cpu/bench.jsonl", lambda line: None)
    assert len(read_timings(tmp_path / "cpu/bench.jsonl").entries) == len(rows)


def test_a_wrong_layer_is_not_timed(monkeypatch):
    right = Attention.step
    monkeypatch.setattr(Attention, "step", lambda self, x, state: 1.1 * right(self, x, state))
    with pytest.raises(UserError, match="Attention: the output in decoding is wrong"):
        list(bench.layer_rows(TINY, CPU))
