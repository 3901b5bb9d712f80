"""Runs work on a GPU as CUDA graphs: captured once, then one launch each time."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mezzo_core.ops.capture_streams import capture_stream


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: Any  # tensors that each replay overwrites


class Graphs:
    """Runs work eagerly at first and, on a GPU, from the second time on as a CUDA graph.

    A capture needs a warm-up, to compile kernels and load libraries. The first run serves as the
    warm-up, so work that overwrites its state is done once only. A graph keeps the autocast
    settings of the second run.
    """

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = ()) -> None:
        """Take the device, and the generators that work uses besides torch's global one."""
        self._stream = capture_stream(self, device) if device.type == "cuda" else None
        self._generators = generators
        # Keyed by the work and the identity of its state; None after the eager run.
        self._graphs: dict[tuple[Callable[[Any], Any], int], _Graph | None] = {}

    def run(self, work: Callable[[Any], Any], state: Any) -> Any:
        """Return work(state); on a GPU the next run overwrites the returned tensors.

        All runs must use the same tensors, and none may wait for the GPU.
        """
        if self._stream is None:
            return work(state)
        key = work, id(state)
        if key not in self._graphs:
            self._graphs[key] = None
            return _warm_up(work, state, self._stream)
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = self._capture(work, state, self._stream)
        graph.graph.replay()
        return graph.result

    def _capture(self, work: Callable[[Any], Any], state: Any, stream: torch.cuda.Stream) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        # A generator keeps the buffers that its first graph allocates. If they were made in
        # inference mode, every later graph outside of inference mode would fail.
        with torch.inference_mode(False):
            for generator in (
                torch.cuda.default_generators[stream.device.index],
                *self._generators,
            ):
                graph.register_generator_state(generator)
        # Autocast frees its cached casts of weights when its context ends, but the graph lives
        # longer. Without the cache, the casts are part of the graph.
        casts = torch.autocast(
            "cuda",
            dtype=torch.get_autocast_dtype("cuda"),
            enabled=torch.is_autocast_enabled("cuda"),
            cache_enabled=False,
        )
        # `torch.cuda.graph` leaves its stream behind if the capture fails; the stream's own context
        # does not. Other threads may go on using the GPU.
        captured = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
        with casts, torch.cuda.stream(stream), captured:
            result = work(state)
        # A capture resets generators, on another stream than the replays. On a busy GPU this may be
        # late, and then the first replay would draw wrong numbers.
        torch.cuda.synchronize(stream.device)
        return _Graph(graph, result)


def _warm_up(work: Callable[[Any], Any], state: Any, stream: torch.cuda.Stream) -> Any:
    """Run on the stream on which the capture will run."""
    here = torch.cuda.current_stream(stream.device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        result = work(state)
    here.wait_stream(stream)
    return result
