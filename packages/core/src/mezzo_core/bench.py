"""Measures speed and memory, and writes the results together with hardware and software versions.

A benchmark checks its op before it times it. Each row is one JSON object on a line, with the keys
name, impl, shape, ms, ms_p20, ms_p80, peak_gb, tflops, gpu, cpu, torch, triton, commit, date.
"""

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

FLUSHED_BYTES = 2**29
"""Size of the buffer that is overwritten to flush the L2 cache: ten times that of a Hopper GPU."""
AHEAD = 16
"""Flushes before a timed call. They take a Hopper GPU 2 ms, in which the host can queue the call's
kernels. Otherwise, the time of an op with many short kernels would be that of Python's launches."""
MOST_CALLS = 200
CAPTURE_WARMUP = 2


@dataclass(frozen=True)
class Timing:
    """A median in milliseconds, its 20th and 80th percentiles, and the peak memory in GB.

    `peak_gb` is None on a CPU, where torch does not count it.
    """

    ms: float
    ms_p20: float
    ms_p80: float
    peak_gb: float | None


def measure(
    fn: Callable[[], object],
    device: torch.device,
    *,
    seconds: float = 0.5,
    warmup: int = 2,
    least: int = 5,
    before: Callable[[], object] | None = None,
) -> Timing:
    """Time `fn` for about `seconds` after `warmup` calls.

    On a GPU the L2 cache is flushed before each timed call, which also lets the host get ahead. At
    most MOST_CALLS calls are timed there.

    Args:
        fn: the function to time.
        device: the device on which `fn` computes.
        seconds: time to spend on the timed calls.
        warmup: number of calls before the timed ones.
        least: minimum number of timed calls, at least two.
        before: called before each call of `fn` without being timed, to restore tensors that `fn`
            overwrites.
    """
    reset = before or (lambda: None)
    for _ in range(warmup):
        reset()
        fn()
    if device.type == "cuda":
        return _measure_cuda(fn, seconds, least, reset)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        reset()
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e3)
    return _timing(times, None)


def _measure_cuda(
    fn: Callable[[], object], seconds: float, least: int, reset: Callable[[], object]
) -> Timing:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    reset()
    start = time.perf_counter()
    fn()
    torch.cuda.synchronize()
    calls = max(least, min(MOST_CALLS, int(seconds / (time.perf_counter() - start))))
    peak_gb = torch.cuda.max_memory_allocated() / 1e9
    flush = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    events = [
        [torch.cuda.Event(enable_timing=True) for _ in range(calls)] for _ in ("start", "end")
    ]
    for first, last in zip(*events, strict=True):
        reset()
        for _ in range(AHEAD):
            flush.zero_()
        first.record()
        fn()
        last.record()
    torch.cuda.synchronize()
    times = [first.elapsed_time(last) for first, last in zip(*events, strict=True)]
    return _timing(times, peak_gb)


def _timing(times: list[float], peak_gb: float | None) -> Timing:
    fifths = statistics.quantiles(times, n=5)
    return Timing(statistics.median(times), fifths[0], fifths[-1], peak_gb)


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


@dataclass(frozen=True)
class Row:
    """One measurement. `name` is "<package or op> <op|layer|model> <forward|train|decode>"."""

    name: str
    impl: str
    shape: dict[str, int]
    timing: Timing
    flops: float | None = None

    def to_json(self, device: torch.device) -> dict[str, object]:
        """Return the row as JSON values, with its machine and software."""
        tflops = self.flops / self.timing.ms / 1e9 if self.flops is not None else None
        return {
            "name": self.name,
            "impl": self.impl,
            "shape": self.shape,
            **asdict(self.timing),
            "tflops": tflops,
            **environment(device),
        }


def environment(device: torch.device) -> dict[str, str | None]:
    """Return gpu, cpu, torch, triton, commit and date, for a result file; gpu is None on a CPU."""
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def append(path: Path, rows: list[dict[str, object]]) -> None:
    """Append rows to a .jsonl file, one object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def commit() -> str | None:
    """Return the commit of the checkout that this file is in; None for an installed copy.

    An installed copy may be inside another project's repository. So git must track this file.
    """
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("rev-parse", "--short=12", "HEAD")


def _git(*arguments: str) -> str | None:
    """Run git in this file's folder and return its output; None if it fails or is missing."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
