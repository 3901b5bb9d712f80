"""Times ops, and layers as papers measure them: a norm, a mixer with projections, a residual.

A block, which has a norm and a residual of its own, and a stack of blocks are timed alone.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mezzo_core.nn.attention import Attention
from mezzo_core.nn.configs import BlockConfig, MixerConfig
from mezzo_core.nn.contract import AbstractSequenceModule
from mezzo_core.nn.init import init_own_weights
from mezzo_core.nn.lm import LM, LMConfig
from mezzo_core.reproduction.result_file import Cell
from mezzo_core.reproduction.runner import Job, timing
from mezzo_core.reproduction.timing import Timing, measure_passes, start_afresh

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
    config: MixerConfig | BlockConfig, d_model: int, device: torch.device, *, alone: bool = False
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


def time_model(
    time: Callable[..., list[Any]],
    config: LMConfig,
    device: torch.device,
    *,
    decodes: bool = False,
    compiles: bool = False,
    **options: Any,
) -> Callable[..., list[Any]]:
    """Build a model, and return the function that times it, for a job (`runner.timing`).

    It calls `time` with the model, the options and a cell's sizes. With `compiles`, the model's
    units are compiled on a GPU, each in one graph; for `decodes` see `build_model`.
    """
    model = build_model(config, device, decodes=decodes)
    for unit in model.units() if compiles and device.type == "cuda" else ():
        unit.compile(dynamic=False, fullgraph=True)
    return partial(time, model, **options)


def compiled(layer: Layer) -> Run:
    """Compile a layer in one graph, or return it as it is on a CPU; forget earlier compiled code.

    Shapes are symbolic, so that a new length compiles nothing: our ops have the same kernels for
    all lengths. Those of attention are not, because torch chooses its kernel by the length.
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
    """Time a layer on inputs (B, T, C); see `layer_step` and `time_op`."""
    step = layer_step(layer, run, phase, B, T)
    return measure_passes(step, layer.norm.weight.device, passes, seconds)


def layer_step(layer: Layer, run: Run, phase: Phase, B: int, T: int) -> Callable[[], object]:
    """Return a function that runs a layer on inputs (B, T, C); see `op_step`.

    Float32 weights run as models train: float32 inputs, and bf16 autocast on a GPU. Others run on
    inputs of their own dtype. `run` is the layer itself, or what `compiled` returned.
    """
    weight = layer.norm.weight
    x = torch.randn(B, T, len(weight), device=weight.device, dtype=weight.dtype)
    mixed = weight.is_cuda and weight.dtype == torch.float32

    def forward(x: Tensor, **weights: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, torch.bfloat16, enabled=mixed):
            return run(x)

    weights = {n: w for n, w in layer.named_parameters() if w.requires_grad}
    return op_step(forward, {"x": x, **weights}, phase)


def time_op(
    run: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    phase: Phase,
    *,
    passes: int = 1,
    seconds: float,
    allow_unused: bool = False,
) -> list[Timing]:
    """Time a function of tensors; see `op_step`.

    Each of the passes takes so many seconds, and at least two calls.
    """
    device = next(iter(inputs.values())).device
    step = op_step(run, inputs, phase, allow_unused=allow_unused)
    return measure_passes(step, device, passes, seconds)


def op_step(
    run: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    phase: Phase,
    *,
    allow_unused: bool = False,
) -> Callable[[], object]:
    """Return a function that calls another on tensors, which it takes by name.

    "train" is a forward and the gradients of all inputs, in new tensors at each call: parameters
    are used as they are, other tensors are detached; without `allow_unused`, each must have a
    gradient. "forward" is a forward without gradients, as in a prefill.
    """
    leaves = {
        name: x if x.requires_grad else x.detach().requires_grad_() for name, x in inputs.items()
    }
    dout: list[Tensor] = []  # of the first call, which is not timed

    def train() -> None:
        out = run(**leaves)
        dout[:] = dout or [torch.randn_like(out)]
        torch.autograd.grad(out, tuple(leaves.values()), dout, allow_unused=allow_unused)

    return train if phase == "train" else torch.no_grad()(partial(run, **inputs))


def op_job(
    name: str, impl: str, sizes: Mapping[str, int], make: Callable[[torch.device], Any]
) -> Job:
    """Return the job that times an op in the rows "NAME PHASE (IMPL)", one of each phase.

    `make` builds the inputs, and returns what times a phase.
    """
    column = " ".join(f"{letter}{size}" for letter, size in sizes.items())
    phases = {Cell(f"{name} {p} ({impl})", column): {"phase": p} for p in ("forward", "train")}
    return timing(phases, make, "ms")
