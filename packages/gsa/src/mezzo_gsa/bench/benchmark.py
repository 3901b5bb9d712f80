"""The shapes and the machine of a benchmark, and the timing of one contender."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from mezzo_core.bench import Row, measure
from torch import Tensor

from mezzo_gsa.bench import fla


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


QUICK = Shapes(((2, 128), (1, 256)), 2, 16, 16, (8, 4), (1, 64), 16, 0.05)
CPU = Shapes(((4, 512), (1, 2048)), 4, 64, 64, (32, 16), (1, 512), 64, 0.5)
GPU = Shapes(((8, 2048), (1, 16_384), (4, 16_384)), 4, 512, 128, (64, 32, 128), (1, 512), 2048, 0.3)


@dataclass(frozen=True)
class Benchmark:
    """Shapes on a machine; `say` is called with a line about each measurement that is left out.

    fla is measured only if `with_fla` is set, even where it is installed, because it tunes its
    kernels for minutes.
    """

    shapes: Shapes
    device: torch.device
    say: Callable[[str], None] = lambda line: None
    with_fla: bool = False

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
        return self.with_fla and self.device.type == "cuda" and fla.is_installed()

    def normal(self, *size: int) -> Tensor:
        """Return random normal numbers in `dtype`."""
        return torch.randn(size, device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class Contender:
    """A function that is timed: its forward, and its forward and backward ("train").

    Attributes:
        name: of its rows, without the phase.
        impl: the implementation.
        shape: sizes by the glossary's letters.
        run: the function, called with `inputs` by name.
        inputs: tensors; "train" computes the gradients of all of them. Parameters are used as they
            are, other tensors are detached.
        phases: which of "forward" and "train" are timed.
    """

    name: str
    impl: str
    shape: dict[str, int]
    run: Callable[..., Tensor]
    inputs: Mapping[str, Tensor]
    phases: Sequence[str] = ("forward", "train")


def timed(benchmark: Benchmark, contender: Contender) -> Iterator[Row]:
    """Time a contender; a phase that does not fit the GPU is reported and left out."""
    leaves = {
        name: x if x.requires_grad else x.detach().requires_grad_()
        for name, x in contender.inputs.items()
    }

    def forward() -> Tensor:
        return contender.run(**leaves)

    with torch.no_grad():
        dout = torch.randn_like(forward())

    def train() -> None:
        torch.autograd.grad(forward(), tuple(leaves.values()), dout, allow_unused=True)

    works = {"forward": torch.no_grad()(forward), "train": train}
    for phase in contender.phases:
        name = f"{contender.name} {phase}"
        try:
            timing = measure(works[phase], benchmark.device, seconds=benchmark.shapes.seconds)
        except torch.OutOfMemoryError:
            benchmark.say(f"{name} ({contender.impl}) at {contender.shape}: out of memory")
            continue
        yield Row(name, contender.impl, contender.shape, timing)
