"""A timing is that of the call alone, and what does not fit is a value."""

import time
from dataclasses import astuple

import pytest
import torch
from mezzo_core.reproduction import OOM, attempt, measure, start_afresh

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_what_is_put_back_before_each_call_is_not_timed():
    calls = []

    def before():
        calls.append("before")
        time.sleep(0.02)

    timing = measure(lambda: calls.append("fn"), CPU, seconds=0.0, warmup=1, least=3, before=before)
    assert calls == ["before", "fn"] * 4
    assert timing.ms < 10


def test_the_median_is_told_and_not_the_mean():
    waits = iter([0.0, 0.0, 0.0, 0.2, 0.0])
    timing = measure(lambda: time.sleep(next(waits)), CPU, seconds=0.0, warmup=0, least=5)
    assert timing.ms_p20 <= timing.ms < 20 < timing.ms_p80
    assert astuple(timing)[3:] == (None, None)


def test_what_does_not_fit_is_out_of_memory_and_another_error_stays():
    def work():
        raise torch.OutOfMemoryError

    assert attempt(work) == OOM
    assert attempt(lambda: [1]) == [1]
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: [1 / 0])
    start_afresh()


@pytest.mark.gpu
def test_a_gpus_time_is_that_of_the_call_alone():
    x = torch.randn(4096, 4096, device="cuda")
    wait = measure(lambda: x @ x, GPU, before=lambda: x.exp_().log_())
    alone = measure(lambda: x @ x, GPU)
    assert wait.ms == pytest.approx(alone.ms, rel=0.2)
    assert alone.peak_gb >= 2 * 4096 * 4096 * 4 / 1e9


@pytest.mark.gpu
def test_the_host_is_free_before_the_gpu_is_done_and_busy_while_it_works_itself():
    x = torch.randn(8192, 8192, device="cuda")
    assert measure(lambda: x @ x, GPU).host_ms < 1 < measure(lambda: x @ x, GPU).ms
    assert measure(lambda: time.sleep(0.005), GPU).host_ms >= 5
