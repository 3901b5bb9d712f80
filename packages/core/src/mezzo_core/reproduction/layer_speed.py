"""The time of one layer as papers measure it: norm, mixer with its projections, residual.

A block, which has a norm and a residual of its own, and a stack of blocks are timed alone.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mezzo_core.nn.attention import Attention
from mezzo_core.nn.contract import AbstractSequenceModule, SequenceConfig
from mezzo_core.nn.init import init_own_weights
from mezzo_core.nn.lm import LM, LMConfig
from mezzo_core.reproduction.timing import WARMUP_CALLS, Timing, measure, start_afresh

RECOMPILATIONS = 64
"""More than the lengths of a table: past torch's own limit (8), `fullgraph=True` raises an error,
and without it the code runs eagerly."""
Run = Callable[[Tensor], Tensor]  # a layer, or its compiled form
Phase = Literal["forward", "train"]


class Layer(nn.Module):
    """A norm, a mixer and the residual around them; or the mixer, block or stack `alone`."""

    def __init__(self, mixer: AbstractSequenceModule, d_model: int, *, alone: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=1e-6).requires_grad_(not alone)
        self.mixer = mixer
        self.alone = alone

    def forward(self, x: Tensor) -> Tensor:
        """Mix (B, T, C) along time, without a state."""
        return self.mixer(x)[0] if self.alone else x + self.mixer(self.norm(x))[0]

    def step(self, x: Tensor, state: Any) -> Tensor:
        """Decode one token (B, 1, C) of each row in place."""
        return self.mixer.step(x, state) if self.alone else x + self.mixer.step(self.norm(x), state)


def build_layer(
    config: SequenceConfig, d_model: int, device: torch.device, *, alone: bool = False
) -> Layer:
    """Build a layer on the device, with the same weights at each call."""
    torch.manual_seed(0)
    with device:
        layer = Layer(config.build(d_model), d_model, alone=alone)
    init_own_weights(layer)
    return layer


def build_model(config: LMConfig, device: torch.device, *, decodes: bool = False) -> LM:
    """Build a model with the same weights at each call; one that decodes has bf16 ones on a GPU."""
    torch.manual_seed(0)
    with device:
        model = config.build()
    if decodes:
        model = model.eval()
        model = model.bfloat16() if device.type == "cuda" else model
    return model


def compiled(layer: Layer) -> Run:
    """Compile a layer in one graph, or return it as it is on a CPU; forget earlier compiled code.

    Shapes are symbolic, so that not every length compiles anew; the kernels of our ops are the same
    for all lengths. But torch chooses its attention kernel by the length.
    """
    if not layer.norm.weight.is_cuda:
        return layer
    start_afresh()
    dynamic = not isinstance(layer.mixer, Attention)
    run: Run = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    return run


def time_layer(
    layer: Layer, run: Run, phase: Phase, B: int, T: int, *, passes: int = 3, seconds: float = 0.05
) -> list[Timing]:
    """Time a layer on inputs (B, T, C).

    Float32 weights run as models train: float32 inputs, and bf16 autocast on a GPU. Others run on
    inputs of their own dtype. "train" is a forward and the gradients of the input and of every
    weight, in new tensors at each call. "forward" is a forward without gradients, as in a prefill.
    `run` is the layer itself, or what `compiled` returned. Each of the passes takes so many
    seconds, and at least two calls.

    Raises:
        torch.OutOfMemoryError: if the batch does not fit into the GPU.
    """
    weight, device = layer.norm.weight, layer.norm.weight.device
    x = torch.randn(B, T, len(weight), device=device, dtype=weight.dtype)
    x.requires_grad_(phase == "train")
    inputs = (x, *(parameter for parameter in layer.parameters() if parameter.requires_grad))
    dout = torch.randn_like(x) if phase == "train" else None

    def forward() -> Tensor:
        mixed = weight.is_cuda and weight.dtype == torch.float32
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            return run(x)

    def train() -> None:
        torch.autograd.grad(forward(), inputs, dout)

    work = train if phase == "train" else torch.no_grad()(forward)
    with torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS):
        return [
            measure(work, device, seconds=seconds, warmup=0 if i else WARMUP_CALLS, least=2)
            for i in range(passes)
        ]
