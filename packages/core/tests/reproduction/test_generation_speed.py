"""Steps are timed at their position, generation at the largest batch that fits or from a prompt."""

import pytest
import torch
from mezzo_core.nn.attention import Attention, AttentionConfig
from mezzo_core.nn.lm import LM, LMConfig
from mezzo_core.reproduction import OOM, attempt, generation_speed
from mezzo_core.reproduction.generation_speed import (
    BATCH_STEP,
    free_memory,
    time_latency,
    time_step,
    time_throughput,
)
from mezzo_core.reproduction.layer_speed import build_layer
from toys.running_mean import RunningMeanConfig

CPU = torch.device("cpu")


@pytest.fixture
def model():
    torch.manual_seed(0)
    mixers = (AttentionConfig(head_dim=8), RunningMeanConfig())
    return LMConfig(vocab_size=37, d_model=16, mixers=mixers).build().eval()


def test_the_speed_is_that_of_the_steps_and_the_prompts_are_beside_it(model):
    for found in time_throughput(model, 24, 8, max_batch=16, passes=2, seconds=0.0):
        assert found.B == 16
        assert len(found.decode_ms) == 3
        steps_ms = 8 * sum(found.decode_ms) / 3
        assert found.tokens_per_second == pytest.approx(16 * 8 / steps_ms * 1e3)
        whole = 16 * 8 / (steps_ms + found.prefill_ms) * 1e3
        assert found.with_prompt == pytest.approx(whole)
        assert found.with_prompt < found.tokens_per_second


def test_steps_are_timed_at_the_first_the_middle_and_the_last_position(model, monkeypatch):
    seen = []
    right = LM.step

    def step(self, tokens, state):
        seen.append(state[0].lengths.unique().tolist())
        return right(self, tokens, state)

    monkeypatch.setattr(LM, "step", step)
    time_throughput(model, 24, 8, max_batch=8, passes=1, seconds=0.0)
    assert [*dict.fromkeys(tuple(lengths) for lengths in seen)] == [(16,), (20,), (23,)]


def test_what_does_not_fit_is_tried_with_fewer_sequences(model, monkeypatch):
    tried = []

    def time(model, batch, *rest):
        tried.append(batch)
        if batch > fits:
            raise torch.OutOfMemoryError
        return [batch]

    monkeypatch.setattr(generation_speed, "_time", time)
    fits = 16
    assert time_throughput(model, 24, 8, max_batch=32) == [16]
    assert tried == [32, 24, 16]
    fits = 0
    assert attempt(lambda: time_throughput(model, 24, 8, max_batch=BATCH_STEP)) == OOM


def test_latency_grows_with_the_new_tokens_of_the_same_pass(model):
    found = time_latency(model, 12, (3, 9), passes=2)
    assert {N: len(passes) for N, passes in found.items()} == {3: 2, 9: 2}
    for short, long in zip(found[3], found[9], strict=True):
        assert 0 < short.prompt_ms / 1e3 < short.seconds < long.seconds
        assert short.prompt_ms == long.prompt_ms


@pytest.fixture
def layer():
    return build_layer(AttentionConfig(head_dim=8), 16, CPU).bfloat16()


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
    monkeypatch.setattr(
        generation_speed, "free_memory", lambda device: 2 * layer.mixer.state_bytes(23)
    )
    assert attempt(lambda: time_step(layer, 3, 20, passes=1)) == OOM
    assert len(attempt(lambda: time_step(layer, 2, 20, passes=1, seconds=0.0))) == 1
    monkeypatch.undo()
    assert free_memory(CPU) == float("inf")
