"""Training steps as CUDA graphs: for models so small that the host is slower than the GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from mezzo_core.errors import UserError
from mezzo_core.ops.capture_streams import capture_stream

Work = Callable[..., Sequence[Tensor]]

WARM_UPS = 2
"""Calls before the capture: kernels are compiled, and libraries allocate what they need."""
KEPT = 4
"""Graphs at most; with arguments of further shapes, the work runs without one."""


class Replayed:
    """Calls `work` a few times, and then replays it as one CUDA graph, with one launch.

    Arguments are tensors in tuples, and None. A graph reads them at fixed places, so each call
    copies them there; and it overwrites its results, so each call returns copies. Other tensors
    that the work reads must stay where they are, and the work must not wait for the GPU. What it
    draws from torch's global generator is new at each call. There is a graph for each list of
    shapes. On a CPU there is none.
    """

    def __init__(self, work: Work, device: torch.device) -> None:
        """Begin without graphs; `work` returns tensors."""
        self._work = work
        # A capture needs a stream of its own, on which the work has run before.
        self._stream = capture_stream(self, device) if device.type == "cuda" else None
        self._calls: dict[Any, int] = {}
        self._graphs: dict[Any, _Graph] = {}

    def __call__(self, *arguments: Any) -> list[Tensor]:
        """Return what the work returns.

        Raises:
            UserError: if it cannot be captured.
        """
        if self._stream is None:
            return list(self._work(*arguments))
        leaves, structure = tree_flatten(arguments)
        key = (
            structure,
            tuple(None if leaf is None else (leaf.shape, leaf.dtype) for leaf in leaves),
        )
        if key in self._graphs:
            return self._graphs[key](leaves)
        self._calls[key] = self._calls.get(key, 0) + 1
        here = torch.cuda.current_stream(self._stream.device)
        if self._calls[key] <= WARM_UPS or len(self._graphs) == KEPT:
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                results = list(self._work(*arguments))
            here.wait_stream(self._stream)
            return results
        try:
            graph = _Graph(self._work, leaves, structure, self._stream)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.set_stream(here)  # torch leaves the capture's stream behind
            reason = str(error).splitlines()[0]
            raise UserError(
                f"a step of this run cannot be captured as a CUDA graph ({reason}): train with "
                "cuda_graph = False"
            ) from error
        self._graphs[key] = graph
        return graph(leaves)


class _Graph:
    """Captured work, with places for its arguments and its results."""

    def __init__(
        self, work: Work, leaves: Sequence[Any], structure: Any, stream: torch.cuda.Stream
    ) -> None:
        self._leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as a loader's, may go on using the GPU.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._results = list(work(*tree_unflatten(self._leaves, structure)))
        torch.cuda.synchronize(stream.device)  # for the generator: see `nn.graphs.Graphs`

    def __call__(self, leaves: Sequence[Any]) -> list[Tensor]:
        for own, given in zip(self._leaves, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(given)
        self._graph.replay()
        return [result.clone() for result in self._results]
