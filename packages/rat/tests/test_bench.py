"""The benchmark measures what it says, and refuses to time a layer that is wrong."""

import json

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.papers import load_bench
from mezzo_rat import RATConfig, bench

CPU = torch.device("cpu")
TINY = bench.Shapes(tokens=64, seq_lens=(32, 64), d_model=16, head_dim=8, seconds=0.0)


def test_layer_rows_cover_every_layer_length_and_phase():
    rows = list(bench.layer_rows(TINY, CPU))
    assert len(rows) == len(bench.mixers(8)) * 2 * 2
    assert {row.name for row in rows} >= {"rat layer train", "attention layer forward"}
    for row in rows:
        assert row.shape["B"] * row.shape["T"] == 64
        assert 0 < row.timing.ms_p20 <= row.timing.ms <= row.timing.ms_p80


def test_rows_can_be_read_back_by_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "QUICK", TINY)
    monkeypatch.setattr(bench, "model_rows", lambda device, quick: [])
    rows = bench.bench(CPU, quick=True, out=tmp_path / "machine" / "bench.jsonl")
    assert load_bench(tmp_path) == json.loads(json.dumps(rows))


def test_a_wrong_layer_is_not_timed():
    class Forgetful(bench.Layer):
        """A layer whose state is lost between steps."""

        def __init__(self):
            super().__init__(AttentionConfig(head_dim=8).build(16), 16)
            forward = self.mixer.forward
            self.mixer.forward = lambda x, state=None: (forward(x)[0], state)

    with pytest.raises(UserError, match="wrong"):
        bench.check_against_steps(Forgetful())
    bench.check_against_steps(bench.Layer(RATConfig(chunk_size=4, head_dim=8).build(16), 16))
