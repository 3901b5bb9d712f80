"""What `mezzo-gsa bench` measures, at which shapes."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from mezzo_core import bench as rows
from mezzo_core.bench import Contender, Row, timed
from torch import Tensor


@dataclass(frozen=True)
class Shapes:
    """The shapes of one benchmark.

    Attributes:
        batches: (B, T). Ops are timed at all of them, and at the first also with the other numbers
            of slots; layers are timed at the first two.
        num_heads, head_dim: H and K = V; C is their product.
        attention_dim: width of softmax attention's heads.
        slots: M of the ops; layers use the first.
        reference: (B, T) of the forms in eager PyTorch.
        position: of the token that is decoded.
        seconds: for each timing.
    """

    batches: tuple[tuple[int, int], ...]
    num_heads: int
    head_dim: int
    attention_dim: int
    slots: tuple[int, ...]
    reference: tuple[int, int]
    position: int
    seconds: float

    @property
    def d_model(self) -> int:
        """C, of the layers and of all heads together."""
        return self.num_heads * self.head_dim
