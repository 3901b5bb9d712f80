"""The shapes and the machine of a benchmark."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from mezzo_core.bench import Contender, Row, timed
from torch import Tensor

from mezzo_gsa.bench import fla


@dataclass(frozen=True)
class Shapes:
    """The shapes of one benchmark."""

    batches: tuple[tuple[int, int], ...]
    """(B, T). Ops take all of them, layers the first two, models and other M the first."""
    narrow: tuple[tuple[int, int], int, int]
    """(B, T), M and D of GSA's op with narrow heads."""
    num_heads: int
    head_dim: int  # K = V
    attention_dim: int  # of a head of softmax attention
    slots: tuple[int, ...]  # M of the ops; layers use the first
    reference: tuple[int, int]  # (B, T) of the forms in eager PyTorch
    position: int  # of the token that is decoded
    seconds: float  # for each timing

    @property
    def d_model(self) -> int:
        """C, of the layers and of all heads together."""
        return self.num_heads * self.head_dim


QUICK = Shapes(((2, 128), (1, 256)), ((4, 64), 8, 8), 2, 16, 16, (8, 4), (1, 64), 16, 0.05)
CPU = Shapes(((4, 512), (1, 2048)), ((16, 512), 16, 16), 4, 64, 64, (32, 16), (1, 512), 64, 0.5)
GPU = Shapes(
    ((8, 2048), (1, 16_384), (4, 16_384)), ((128, 512), 32, 32),
    4, 512, 128, (64, 32, 128), (1, 512), 2048, 0.3,
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Shapes on a machine; `say` is called with a line about each measurement that is left out."""

    shapes: Shapes
    device: torch.device
    say: Callable[[str], None] = lambda line: None

    @property
    def dtype(self) -> torch.dtype:
        """bf16 on a GPU, float32 on a CPU."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def impl(self) -> str:
        """The implementation that `impl="auto"` chooses here."""
        return "triton" if self.device.type == "cuda" else "reference"

    @property
    def has_fla(self) -> bool:
        """Whether fla is measured."""
        return self.device.type == "cuda" and fla.is_installed()

    def normal(self, *size: int) -> Tensor:
        """Return random normal numbers in `dtype`."""
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def time(self, contender: Contender) -> Iterator[Row]:
        """Time a contender; what does not fit into the GPU is said and left out."""
        return timed(contender, self.device, self.shapes.seconds, self.say)
