"""MFU: the speed of training beside that of the GPU's peak."""

from types import SimpleNamespace

import pytest
import torch
from mezzo_core.train.distributed import World
from mezzo_core.train.meter import Meter
from mezzo_core.train.peaks import peak_flops, peak_speed
from mezzo_core.train.stopping import StopRequest


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA RTX A4000", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(name, peak):
    assert peak_flops(name) == peak


def test_a_training_at_the_peak_does_three_forwards_flops(tiny, monkeypatch):
    model, world = tiny().model.build(), World(torch.device("cuda"), size=4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    speed = peak_speed(tiny(), model, world)
    assert speed * 3 * model.flops_per_token(32) == pytest.approx(4 * 989e12)
    assert peak_speed(tiny(precision="fp32"), model, world) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    assert peak_speed(tiny(), model, world) is None
    assert peak_speed(tiny(), model, World(torch.device("cpu"))) is None


def test_the_speed_leaves_out_the_first_reading_and_pauses(monkeypatch):
    clock = SimpleNamespace(perf_counter=iter([0.0, 10.0, 13.0, 15.0]).__next__, time=float)
    monkeypatch.setattr("mezzo_core.train.meter.time", clock)
    meter = Meter(World(torch.device("cpu")), 100, StopRequest())
    for step in (1, 2):
        meter.add(step, 0.1, torch.tensor(1.0), torch.tensor(1.0))
        (row,) = meter.read()
        if step == 1:
            with meter.paused():
                pass
    assert row["tokens_per_second"] == meter.tokens_per_second == 50


@pytest.mark.parametrize("peak", [None, 1e6])
def test_a_row_has_the_share_of_the_peak_if_it_is_known(peak):
    meter = Meter(World(torch.device("cpu")), 100, StopRequest(), peak)
    meter.add(1, 0.1, torch.tensor(1.0), torch.tensor(1.0))
    (row,) = meter.read()
    assert row.get("mfu") == (None if peak is None else row["tokens_per_second"] / 1e6)
    assert "peak_gb" not in row
