"""Whole models are trained in several processes, and what is told is what they measured."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.reproduction import Options, gpus
from mezzo_core.reproduction.gpus import SETTINGS, STEPS, TOKENS, measure_processes, shortened
from mezzo_core.reproduction.measurement import read_result
from mezzo_core.reproduction.training import measure_run
from mezzo_core.train.config import TrainConfig

CPU = torch.device("cpu")
RECIPE = TrainConfig(
    name="toy",
    model=LMConfig(vocab_size=300, d_model=16, mixers=(AttentionConfig(head_dim=8),)),
    seq_len=16,
    batch_size=64,
    micro_batch_size=1,
)


def options(folder: Path) -> Options:
    return Options(folder / "results/cpu", ("toy",), CPU, True, runs=folder / "runs")


def test_two_processes_train_as_one(tmp_path):
    config = shortened(RECIPE, options(tmp_path))
    two = measure_processes(config, 2, tmp_path / "two", CPU)
    one = measure_run(config, tmp_path / "one", CPU)
    losses = [[loss for _, loss in found["steps"]["train"]] for found in (two, one)]
    assert len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert two["peak_gb"] is None


@pytest.mark.parametrize("known", [False, True])
def test_each_setting_is_measured_once(tmp_path, monkeypatch, known):
    asked = []

    def measured(config, count, folder, device):
        asked.append((count, config.activation_checkpointing))
        steps = {"train": [[1, 3.0], [2, 2.5]]}
        return {"tokens_per_second": 100 * count, "peak_gb": 1.5, "steps": steps}

    monkeypatch.setattr(gpus, "measure_processes", measured)
    monkeypatch.setattr(gpus, "has_known_peak", lambda device: known)
    monkeypatch.setattr(gpus, "share_of_peak", lambda *_: 40.0)
    for _ in range(2):
        gpus.measure_settings(options(tmp_path), {"toy": RECIPE, "other": RECIPE})
    assert asked == [(1, False), (2, False), (1, True)]
    ours = read_result(tmp_path / "results/cpu/train_gpus.json")
    assert [row for _, row in ours.rows] == [f"toy, {setting}" for setting in SETTINGS]
    assert [ours.typical(row, gpus.SPEED) for _, row in ours.rows] == [100, 200, 100]
    assert ours.typical("toy, 2 GPUs", gpus.LOSS) == 2.5
    assert ours.typical("toy, 2 GPUs", gpus.PEAK) == (1.5 if known else None)
    assert ours.typical("toy, 2 GPUs", gpus.SHARE) == (40.0 if known else None)


def test_a_short_run_is_the_recipe_but_for_its_length_and_text(tmp_path):
    full = shortened(RECIPE, replace(options(tmp_path), dry_run=False))
    assert full.batch_size * full.seq_len == TOKENS
    changed = {name for name, value in vars(full).items() if value != getattr(RECIPE, name)}
    steps = {"steps", "eval_every", "eval_batches", "checkpoint_every"}
    assert changed == {"model", "batch_size", *steps}


@pytest.mark.parametrize(("name", "flops"), [("NVIDIA H200", 989e12), ("Voodoo 2", None)])
def test_the_share_of_the_peak_counts_six_flops_a_weight_where_it_is_known(
    monkeypatch, name, flops
):
    model = LMConfig(vocab_size=512, d_model=256, mixers=(AttentionConfig(head_dim=32),) * 4)
    config = TrainConfig(name="wide", model=model, seq_len=8)
    with torch.device("meta"):
        weights = model.build().num_parameters()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    gpu = torch.device("cuda", 0)
    assert gpus.has_known_peak(gpu) == (flops is not None)
    assert not gpus.has_known_peak(CPU)
    if flops is None:
        assert math.isnan(gpus.share_of_peak(config, 1e6, gpu))
    else:
        share = 100 * 6 * weights * 1e6 / flops
        assert gpus.share_of_peak(config, 1e6, gpu) == pytest.approx(share, rel=0.02)
