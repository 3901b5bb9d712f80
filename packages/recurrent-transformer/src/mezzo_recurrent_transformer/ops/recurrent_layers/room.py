"""Where the steps of a tile run: buffers, weights, and on a GPU CUDA graphs of the steps."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.parts import Matrices
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import Tile

Buffers = Any


class Room(NamedTuple):
    """Buffers for a tile of n layers, and the weights; a tile uses those of its layers."""

    buffers: Buffers
    weights: Matrices
    slopes: Tensor
    form: Form

    @classmethod
    def of(
        cls, kind: Any, x: Tensor, weights: Matrices, S: int, form: Form, slopes: Tensor
    ) -> "Room":
        """Return a room of a kind of buffers, for inputs like x (B, T, C)."""
        return cls(kind.of(x, weights, S, form), weights, slopes, form)

    def of_layers(self, first: int, end: int) -> tuple[Buffers, Matrices]:
        """Return the buffers and the weights of layers `first` to `end`."""
        return self.buffers.of_layers(first, end), self.weights.of_layers(first, end)

    def run(self, steps: Callable[..., None], tile: Tile, parts: ModuleType) -> None:
        """Run all steps of a tile."""
        steps(*self.of_layers(tile.first, tile.end), self.slopes, self.form, parts)
