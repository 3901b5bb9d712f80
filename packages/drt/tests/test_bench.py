"""`mezzo-drt bench` has a row of the op for each length and phase, and one of each tiny model."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.errors import FailedRunError
from mezzo_core.papers.measurement import read_timings
from mezzo_drt import bench

CPU = torch.device("cpu")
TINY = replace(bench.QUICK, tokens=64, lengths=(32, 64), chunk_size=4, num_retrieved=3, seconds=0.0)


def test_the_op_has_rows_that_can_be_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "QUICK", replace(TINY, models=()))
    path = tmp_path / "cpu/bench.jsonl"
    rows = bench.bench(CPU, quick=True, out=path)
    seen = [(row["name"], row["impl"], row["shape"]) for row in rows]
    sizes = {"H": 2, "D": 16, "L": 4, "R": 3}
    assert seen == [
        (f"gca op {phase}", "reference", {"B": B, "T": T, **sizes})
        for B, T in ((2, 32), (1, 64))
        for phase in ("forward", "train")
    ]
    for row in rows:
        assert 0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"]
    assert len(read_timings(path).entries) == len(rows)


def test_the_tiny_models_are_measured_after_the_op(monkeypatch):
    monkeypatch.setattr(bench, "op_rows", lambda *_: iter(()))
    monkeypatch.setattr(bench, "model_rows", lambda name, *_: [name])
    monkeypatch.setattr(bench, "run", lambda rows, *_: list(rows))
    assert bench.bench(CPU, quick=True) == ["tiny_base", "tiny_drt1"]


def test_on_a_gpu_the_op_has_the_papers_sizes():
    assert (bench.GPU.num_heads, bench.GPU.head_dim) == (12, 64)
    assert (bench.GPU.chunk_size, bench.GPU.num_retrieved) == (64, 8)
    assert [(bench.GPU.tokens // T, T) for T in bench.GPU.lengths] == [(8, 16_384), (2, 65_536)]


def test_chunks_read_others_that_are_before_their_predecessor():
    inputs = bench.op_inputs(2, 64, TINY, CPU, torch.float32)
    indices, weights = inputs["indices"], inputs["weights"]
    assert inputs["q"].shape == (2, 16, 5, 2, 16)
    assert indices.shape == weights.shape == (2, 16, 3)
    for n in range(16):
        for row, its_weights in zip(indices[:, n], weights[:, n], strict=True):
            chosen = row[row >= 0].tolist()
            assert len(set(chosen)) == len(chosen) == min(3, max(0, n - 1))
            assert all(j < n - 1 for j in chosen)
            assert its_weights.sum() == pytest.approx(float(n >= 2))
    assert len({tuple(sorted(row.tolist())) for row in indices[0]}) > 8, "drawn at random"


@pytest.mark.parametrize(("place", "name"), [(0, "the output"), (2, "dq")])
def test_a_wrong_op_is_not_timed(monkeypatch, place, name):
    right = bench.grouped_cross_attention

    def wrong(q, *others, **options):
        out = right(q, *others, **options)
        return out * 1.001 if place == 0 else out + 0.1 * (q - q.detach())

    monkeypatch.setattr(bench, "grouped_cross_attention", wrong)
    with pytest.raises(FailedRunError, match=f"grouped_cross_attention: {name} is wrong here"):
        list(bench.op_rows(TINY, CPU))
