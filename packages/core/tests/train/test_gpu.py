"""Training on a GPU: precision, compilation, losses that are read late, resuming."""

import pytest
import torch
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.train.loop import train

pytestmark = pytest.mark.gpu


def test_a_gpu_trains_in_bf16_what_a_cpu_trains_in_float32(tiny, tmp_path, losses_of):
    config = tiny(steps=25, eval_every=25, checkpoint_every=25)
    cpu = train(config, tmp_path / "cpu", quiet=True, device="cpu")
    seen = []
    gpu = train(config, tmp_path / "gpu", quiet=True, on_step=lambda row: seen.append(row["step"]))
    assert seen == list(range(1, 26))  # read ten at a time, and the rest at the end
    assert losses_of(tmp_path / "gpu") == pytest.approx(losses_of(tmp_path / "cpu"), rel=2e-2)
    assert gpu.val_loss == pytest.approx(cpu.val_loss, rel=2e-2)
    weights = load_model(tmp_path / "gpu" / "model")[0].state_dict()
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_float32_on_a_gpu_is_float32(tiny, tmp_path, losses_of):
    config = tiny(precision="fp32", steps=10)
    train(config, tmp_path / "cpu", quiet=True, device="cpu")
    train(config, tmp_path / "gpu", quiet=True)
    assert losses_of(tmp_path / "gpu") == pytest.approx(losses_of(tmp_path / "cpu"), rel=1e-4)


def test_compiled_is_close_to_eager(tiny, tmp_path, losses_of):
    train(tiny(), tmp_path / "eager", quiet=True)
    train(tiny(compile=True), tmp_path / "compiled", quiet=True)
    eager, compiled = losses_of(tmp_path / "eager"), losses_of(tmp_path / "compiled")
    assert compiled == pytest.approx(eager, rel=1e-2)
    assert load_model(tmp_path / "compiled" / "model")[2]["step"] == 6


def test_a_gpu_run_goes_on_on_a_gpu_and_on_a_cpu(tiny, tmp_path, losses_of, train_until):
    config = tiny(steps=8, precision="fp32", checkpoint_every=2)
    train(config, tmp_path / "whole", quiet=True)
    expected = losses_of(tmp_path / "whole")
    for device in ("cuda", "cpu"):
        out = tmp_path / device
        train_until(config, out, 4, device="cuda")
        train(config, out, quiet=True, device=device)
        assert losses_of(out) == pytest.approx(expected, rel=1e-4)
