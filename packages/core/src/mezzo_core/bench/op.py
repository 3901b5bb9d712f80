"""The time of an op, or of any function of tensors: its forward, and forward and backward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo_core.bench.rows import Row
from mezzo_core.bench.timing import measure


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


def timed(
    contender: Contender, device: torch.device, seconds: float, say: Callable[[str], None]
) -> Iterator[Row]:
    """Time a contender; a phase that does not fit into the GPU is said and left out."""
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
            timing = measure(works[phase], device, seconds=seconds)
        except torch.OutOfMemoryError:
            say(f"{name} ({contender.impl}) at {contender.shape}: out of memory")
            continue
        yield Row(name, contender.impl, contender.shape, timing)
