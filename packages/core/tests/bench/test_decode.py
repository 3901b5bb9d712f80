"""A decoding step is timed at its position, with a state as full as it says."""

from importlib import import_module

import pytest
import torch
from mezzo_core.bench import OOM, attempt, build_layer, time_step
from mezzo_core.bench.generation import fill, free_memory
from mezzo_core.nn.attention import Attention, AttentionConfig
from mezzo_core.nn.lm import LMConfig

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


def test_the_host_works_before_every_step(layer, monkeypatch):
    order = []
    right = Attention.step
    monkeypatch.setattr(Attention, "before_step", lambda self, state: order.append("host"))

    def step(self, x, state):
        order.append("step")
        return right(self, x, state)

    monkeypatch.setattr(Attention, "step", step)
    time_step(layer, 2, 4, passes=1, seconds=0.0)
    assert order == ["host", "step"] * (len(order) // 2)


def test_a_state_that_does_not_fit_is_not_tried(layer, monkeypatch):
    monkeypatch.setattr(generation, "free_memory", lambda device: 2 * layer.mixer.state_bytes(23))
    assert attempt(lambda: time_step(layer, 3, 20, passes=1)) == OOM
    assert len(attempt(lambda: time_step(layer, 2, 20, passes=1, seconds=0.0))) == 1
    monkeypatch.undo()
    assert free_memory(CPU) == float("inf")


def test_a_models_state_is_filled_with_numbers_and_its_lengths():
    model = LMConfig(vocab_size=11, d_model=16, mixers=(CONFIG,) * 2).build()
    state = model.reserve(model.init_state(2), 9)
    fill(state, 5)
    for cache in state:
        assert cache.lengths.tolist() == [5, 5]
        assert cache.k.std() > 0.5
        assert cache.v.std() > 0.5


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_a_graph():
    layer = build_layer(AttentionConfig(head_dim=64), 256, torch.device("cuda")).bfloat16()
    for timing in time_step(layer, 4, 1000):
        assert timing.host_ms < 1
        assert timing.peak_gb > 0
