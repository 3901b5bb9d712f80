"""Times a function and its memory, and replays a step as one CUDA graph."""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

OOM = "OOM"  # stands for the result of a measurement that does not fit into the GPU
FLUSHED_BYTES = 2**29  # are overwritten to flush the L2 cache: ten times that of a Hopper GPU
AHEAD = 16
"""Flushes before a timed call. They take a Hopper GPU 2 ms, in which the host can queue the call's
kernels. Otherwise, the time of an op with many short kernels would be that of Python's launches."""
MOST_CALLS = 200
CAPTURE_WARMUP = 2
WARMUP_CALLS = 3
"""Calls before the timed ones: an op may compile in its first, and capture itself in its third."""
RECOMPILATIONS = 64
"""More than the lengths of a table: past torch's own limit (8), `fullgraph=True` raises an error,
and without it the code runs eagerly."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Timing:
    """The time and the memory of one call; those of the host and the memory are None on a CPU."""

    ms: float  # median over the timed calls
    ms_p20: float  # the 20th percentile
    ms_p80: float
    host_ms: float | None = None  # how long the host is busy, without waiting for the GPU's work
    peak_gb: float | None = None  # the most memory that was allocated, in GB


def measure(
    fn: Callable[[], object],
    device: torch.device,
    *,
    seconds: float = 0.5,
    warmup: int = WARMUP_CALLS,
    least: int = 5,
    before: Callable[[], object] = lambda: None,
) -> Timing:
    """Time `fn` for about `seconds` after `warmup` calls.

    On a GPU the L2 cache is flushed before each timed call, which also lets the host get ahead. At
    most MOST_CALLS calls are timed there. The host's time is that of calls that find the GPU idle:
    if the GPU's queue were full, the host would wait for it.

    There are at least `least` timed calls, which is two or more. `before` is called untimed before
    each call, to restore what `fn` overwrites.
    """
    for _ in range(warmup):
        before()
        fn()
    if device.type == "cuda":
        times, *host_and_memory = _measure_cuda(fn, seconds, least, before)
    else:
        times, host_and_memory = [], []
        end = time.perf_counter() + seconds
        while len(times) < least or time.perf_counter() < end:
            before()
            start = time.perf_counter()
            fn()
            times.append((time.perf_counter() - start) * 1e3)
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return Timing(statistics.median(times), fifths[0], fifths[-1], *host_and_memory)


def measure_passes(
    work: Callable[[], object], device: torch.device, passes: int, seconds: float
) -> list[Timing]:
    """Time a function that may be compiled in several passes, each of two calls or more."""
    with torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS):
        return [
            measure(work, device, seconds=seconds, warmup=0 if i else WARMUP_CALLS, least=2)
            for i in range(passes)
        ]


def _measure_cuda(
    fn: Callable[[], object], seconds: float, least: int, before: Callable[[], object]
) -> tuple[list[float], float, float]:
    """Return the milliseconds of the calls, the host's for one, and the peak of the memory."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    host, whole = [], []  # seconds until the host is free again, and until the GPU is done too
    for _ in range(least):
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - start)
    peak_gb = torch.cuda.max_memory_allocated() / 1e9
    calls = max(least, min(MOST_CALLS, int(seconds / statistics.median(whole))))
    flush = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for first, last in pairs:
        before()
        for _ in range(AHEAD):
            flush.zero_()
        first.record()
        fn()
        last.record()
    torch.cuda.synchronize()
    times = [first.elapsed_time(last) for first, last in pairs]
    return times, statistics.median(host) * 1e3, peak_gb


def captured(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that replays `step` as one CUDA graph; on a CPU, `step` itself.

    Before the capture, `step` runs CAPTURE_WARMUP times, to compile kernels and set up libraries.
    These calls already change the tensors that `step` overwrites.
    """
    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(CAPTURE_WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def now(device: torch.device) -> float:
    """Return the seconds of a clock, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_gb(device: torch.device) -> float | None:
    """Return the most memory that was allocated on a GPU since its last reset; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None


def attempt(work: Callable[[], Found]) -> Found | str:
    """Return what `work` measures, or OOM if it does not fit into the GPU."""
    try:
        return work()
    except torch.OutOfMemoryError:
        return OOM


def start_afresh() -> None:
    """Free what earlier models left, memory and compiled code; call it before building the next."""
    # Past its limit of recompilations, torch would run a later model eagerly. Where nothing was
    # compiled, there is nothing to reset, and importing the compiler would take seconds.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
