"""The benchmark measures what it says, and refuses to time a layer that is wrong."""

import json
import time

import pytest
import torch
from mezzo_core.bench import measure
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


def test_what_is_put_back_before_each_call_is_not_timed():
    calls = []

    def before():
        calls.append("before")
        time.sleep(0.02)

    timing = measure(lambda: calls.append("fn"), CPU, seconds=0.0, warmup=1, least=3, before=before)
    assert calls == ["before", "fn"] * 4
    assert timing.ms < 10


@pytest.mark.gpu
def test_a_gpus_time_is_that_of_the_call_alone():
    x = torch.randn(4096, 4096, device="cuda")
    wait = measure(lambda: x @ x, torch.device("cuda"), before=lambda: x.exp_().log_())
    alone = measure(lambda: x @ x, torch.device("cuda"))
    assert wait.ms == pytest.approx(alone.ms, rel=0.2)
    assert alone.peak_gb >= 2 * 4096 * 4096 * 4 / 1e9


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
