"""CUDA graphs: of a tile's steps, and of whole calls so small that the host could not keep up."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from mezzo_core.ops.capture_streams import capture_stream
from mezzo_core.ops.precision import product_settings
from torch import Tensor

Call = Callable[..., Sequence[Tensor | None]]

LARGEST = 2**28
"""Most bytes of all layers' outputs in a captured call: a graph keeps the memory of its call."""
REPEATED = 3
"""How often a call's shapes come until it is captured: capturing takes longer than a call."""
KEPT = 8
"""Entries of a `Latest`."""


class Latest(OrderedDict[Any, Any]):
    """A cache of the `KEPT` entries that were used last."""

    def take(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what is kept for a key, or make it."""
        self[key] = self.pop(key) if key in self else make()
        while len(self) > KEPT:
            self.popitem(last=False)
        return self[key]


def capture(
    run: Callable[[], Any], side: torch.cuda.Stream, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture what `run` launches on the stream `side`; return the graph and the result of `run`.

    `run` must have run before, with the same shapes, so that all its kernels are compiled. Graphs
    share the memory of a pool if they also share the stream.
    """
    with suppress(torch.OutOfMemoryError):
        return _capture(run, side, pool)
    # While it captures, torch does not free the memory that it keeps for later.
    torch.cuda.empty_cache()
    return _capture(run, side, pool)


def _capture(
    run: Callable[[], Any], side: torch.cuda.Stream, pool: Any
) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # Other threads, such as a loader's, may go on using the GPU.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph, result


class Graphs:
    """CUDA graphs of one kind of work on the same memory, by key."""

    def __init__(self) -> None:
        self.graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = capture_stream(self)

    def run(self, key: Any, work: Callable[[], None]) -> None:
        """Do the work of a key: the first time by a call, then by a graph."""
        if key in self.graphs:
            self.graphs[key].replay()
            return
        work()
        self.graphs[key], _ = capture(work, self.stream, self.pool)


class _Captured:
    """A call with fixed memory for its arguments."""

    def __init__(self, call: Call, arguments: Sequence[Tensor | None]) -> None:
        # Calls outside of inference mode could not overwrite tensors made in it.
        with torch.inference_mode(False), torch.no_grad():
            self.arguments = [None if t is None else t.clone() for t in arguments]
        self.stream = capture_stream(self)
        self.graph, self.results = capture(lambda: call(*self.arguments), self.stream)

    def __call__(self, arguments: Sequence[Tensor | None]) -> list[Tensor | None]:
        for own, given in zip(self.arguments, arguments, strict=True):
            if own is not None and given is not None:
                own.copy_(given)
        self.graph.replay()
        return [None if t is None else t.clone() for t in self.results]


_counts, _captured = Latest(), Latest()


def run(
    call: Call, arguments: Sequence[Tensor | None], key: Any, size: int
) -> Sequence[Tensor | None]:
    """Return `call(*arguments)`, by a CUDA graph where it pays.

    Args:
        call: launches work that depends on nothing but `key` and the arguments' contents.
        arguments: tensors on one device, or None.
        key: what distinguishes calls, besides the arguments' shapes, dtypes, device and stream, and
            `product_settings`.
        size: bytes of all layers' outputs.
    """
    x = next(t for t in arguments if t is not None)
    if not x.is_cuda or size > LARGEST or torch.cuda.is_current_stream_capturing():
        return call(*arguments)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    shapes = tuple(None if t is None else (t.shape, t.dtype) for t in arguments)
    key = (key, shapes, x.device, stream, product_settings())
    if key not in _captured:
        _counts[key] = _counts.take(key, lambda: 0) + 1
        if _counts[key] < REPEATED:
            return call(*arguments)
        del _counts[key]
    return _captured.take(key, lambda: _Captured(call, arguments))(arguments)
