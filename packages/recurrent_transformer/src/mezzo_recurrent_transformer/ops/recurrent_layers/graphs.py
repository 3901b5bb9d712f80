"""CUDA graphs of whole calls, for calls so small that the host could not keep up with the GPU."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Call = Callable[[Sequence[Tensor | None]], Sequence[Tensor]]

LARGEST = 2**28
"""Bytes of all layers' outputs of a call, at most: a graph keeps the memory that its call needs."""
REPEATED = 3
"""A call is captured when its shapes come for this time: capturing takes longer than a call."""
KEPT = 8
"""Shapes whose graphs and counts are kept, those used last."""


def capture(run: Callable[[], Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture what `run` launches; return the graph and the result of `run`.

    `run` must have run before, with the same shapes, so that all its kernels are compiled.
    """
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
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


class _Captured:
    """A call with fixed memory for its arguments."""

    def __init__(self, call: Call, arguments: Sequence[Tensor | None]) -> None:
        # No call outside of inference mode may overwrite what was made in it.
        with torch.inference_mode(False), torch.no_grad():
            self.arguments = [None if t is None else t.clone() for t in arguments]
        self.graph, self.results = capture(lambda: call(self.arguments))

    def __call__(self, arguments: Sequence[Tensor | None]) -> list[Tensor]:
        for own, given in zip(self.arguments, arguments, strict=True):
            if own is not None and given is not None:
                own.copy_(given)
        self.graph.replay()
        return [result.clone() for result in self.results]


_counts: OrderedDict[Any, int] = OrderedDict()
_captured: OrderedDict[Any, _Captured] = OrderedDict()


def run(call: Call, arguments: Sequence[Tensor | None], key: Any, size: int) -> Sequence[Tensor]:
    """Return `call(arguments)`, by a CUDA graph where it pays.

    Args:
        call: launches work that depends on nothing but `key` and the arguments' contents.
        arguments: tensors on one device, or None.
        key: what distinguishes calls, besides the arguments' shapes, dtypes, device and stream.
        size: bytes of all layers' outputs.
    """
    x = next(t for t in arguments if t is not None)
    if not x.is_cuda or size > LARGEST or torch.cuda.is_current_stream_capturing():
        return call(arguments)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    shapes = tuple(None if t is None else (t.shape, t.dtype) for t in arguments)
    key = (key, shapes, x.device, stream)
    if key not in _captured:
        _counts[key] = _counts.pop(key, 0) + 1
        if _counts[key] < REPEATED:
            _forget(_counts)
            return call(arguments)
        del _counts[key]
        with torch.cuda.device(x.device):
            _captured[key] = _Captured(call, arguments)
        _forget(_captured)
    _captured.move_to_end(key)
    return _captured[key](arguments)


def _forget(kept: OrderedDict[Any, Any]) -> None:
    while len(kept) > KEPT:
        kept.popitem(last=False)
