"""Where the steps of a tile run: buffers, weights, and on a GPU CUDA graphs of the steps.

A tile has hundreds of small launches, for which the host would be too slow one by one. They depend
neither on the length of the sequence nor on the place of the tile, so they are captured once and
replayed for every tile. A graph reads and writes fixed memory: a room's buffers and its copy of the
weights. Rooms are kept, by what they were made for.
"""

from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.graphs import capture
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Matrices
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import Tile

Buffers = Any
Steps = Callable[[Any, Matrices, Tensor, Form, ModuleType], None]

KEPT = 8
"""Rooms that are kept, those used last."""


class Room:
    """Buffers for a tile of n layers, and the weights; a tile uses those of its layers."""

    def __init__(self, buffers: Buffers, weights: Matrices, slopes: Tensor, form: Form) -> None:
        self.buffers, self.weights, self.slopes, self.form = buffers, weights, slopes, form

    def of_layers(self, first: int, end: int) -> tuple[Buffers, Matrices]:
        """Return the buffers and the weights of layers `first` to `end`."""
        return self.buffers.of_layers(first, end), self.weights.of_layers(first, end)

    def run(self, steps: Steps, tile: Tile, parts: ModuleType) -> None:
        """Run all steps of a tile."""
        steps(*self.of_layers(tile.first, tile.end), self.slopes, self.form, parts)


class KeptRoom(Room):
    """A room with a CUDA graph for each range of layers and each set of parts."""

    def __init__(self, buffers: Buffers, weights: Matrices, slopes: Tensor, form: Form) -> None:
        super().__init__(buffers, weights.map(torch.empty_like), torch.empty_like(slopes), form)
        self.graphs: dict[tuple[int, int, ModuleType], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()

    @classmethod
    def of(
        cls, kind: Any, x: Tensor, weights: Matrices, slopes: Tensor, S: int, form: Form
    ) -> "KeptRoom":
        """Make a room for later calls too, as `room_for` says."""
        # No call outside of inference mode may overwrite what was made in it.
        with torch.inference_mode(False), torch.cuda.device_of(x):
            return cls(kind.of(x, weights, S, form), weights, slopes, form)

    def fill(self, weights: Matrices, slopes: Tensor) -> None:
        """Copy the weights of a call."""
        for own, given in zip((*self.weights, self.slopes), (*weights, slopes), strict=True):
            if own is not None and given is not None:
                own.copy_(given)

    def run(self, steps: Steps, tile: Tile, parts: ModuleType) -> None:
        """Run all steps of a tile: at first as they are, then by a graph."""
        key, call = (tile.first, tile.end, parts), (steps, tile, parts)
        if key in self.graphs:
            self.graphs[key].replay()
            return
        super().run(*call)
        self.graphs[key], _ = capture(lambda: super(KeptRoom, self).run(*call), self.pool)


_rooms: OrderedDict[Any, KeptRoom] = OrderedDict()


def room_for(kind: Any, x: Tensor, weights: Matrices, slopes: Tensor, S: int, form: Form) -> Room:
    """Return a room with a kind of buffers for inputs like x (B, T, C), in tiles of S tokens.

    On a CPU, and where the caller captures a graph of its own, it is a new one.
    """
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return Room(kind.of(x, weights, S, form), weights, slopes, form)
    stream = torch.cuda.current_stream(x.device)
    shapes = (tuple((w.shape, w.dtype) for w in weights if w is not None), slopes.dtype)
    key = (kind, x.shape[0], x.dtype, x.device, stream.cuda_stream, shapes, S, form)
    room = _rooms.pop(key, None)
    if room is None:
        room = KeptRoom.of(kind, x, weights, slopes, S, form)
    _rooms[key] = room
    while len(_rooms) > KEPT:
        _rooms.popitem(last=False)
    room.fill(weights, slopes)
    return room
