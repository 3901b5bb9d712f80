"""A decoding step is timed at its position, with a state as full as it says."""

from importlib import import_module

import pytest
import torch
from mezzo_core.bench import OOM, attempt, build_layer, time_step
from mezzo_core.bench.generation import free_memory
from mezzo_core.nn.attention import Attention, AttentionConfig

CPU = torch.device("cpu")
CONFIG = AttentionConfig(head_dim=8)
generation = import_module("mezzo_core.bench.generation")


@pytest.fixture
def layer():
    return build_layer(CONFIG, 16, CPU).bfloat16()


def test_every_step_is_at_the_position(layer, monkeypatch):
    seen = []
    right = Attention.step

    def step(self, x, state):
        seen.append((tuple(x.shape), x.dtype, *state.lengths.unique().tolist()))
        return right(self, x, state)

    monkeypatch.setattr(Attention, "step", step)
    timings = time_step(layer, 3, 20, passes=2, seconds=0.0)
    assert set(seen) == {((3, 1, 16), torch.bfloat16, 20)}
    assert len(timings) == 2
    assert all(0 < timing.ms_p20 <= timing.ms for timing in timings)


def test_a_state_that_does_not_fit_is_not_tried(layer, monkeypatch):
    monkeypatch.setattr(generation, "free_memory", lambda device: 2 * layer.mixer.state_bytes(23))
    assert attempt(lambda: time_step(layer, 3, 20, passes=1)) == OOM
    assert len(attempt(lambda: time_step(layer, 2, 20, passes=1, seconds=0.0))) == 1
    monkeypatch.undo()
    assert free_memory(CPU) == float("inf")


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_a_graph():
    layer = build_layer(AttentionConfig(head_dim=64), 256, torch.device("cuda")).bfloat16()
    for timing in time_step(layer, 4, 1000):
        assert timing.host_ms < 1
        assert timing.peak_gb > 0
