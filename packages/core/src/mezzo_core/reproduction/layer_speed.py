"""The time of one layer as papers measure it: norm, mixer with its projections, residual.

A block, which has a norm and a residual of its own, and a stack of blocks are timed alone.

A layer is checked before it is timed: a wrong result has no speed.
"""

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mezzo_core.errors import FailedRunError
from mezzo_core.nn.attention import Attention
from mezzo_core.nn.contract import AbstractSequenceModule, SequenceConfig
from mezzo_core.nn.init import init_own_weights
from mezzo_core.nn.lm import LM, LMConfig
from mezzo_core.reproduction.timing import WARMUP_CALLS, Timing, measure, start_afresh

RECOMPILATIONS = 64
"""More than the lengths of a table: past torch's own limit (8), `fullgraph=True` raises an error,
and without it the code runs eagerly."""
FACTOR = 3.0
"""A layer's error may be this many times that of the reference in bf16 on the CPU."""
TOKENS, DECODED = 160, 20  # of a check: two chunks of 128, ten of 16; the last 20 are decoded too
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
    Check the layer first (`check_layer`); `run` is the layer itself, or what `compiled` returned.
    Each of the passes takes so many seconds, and at least two calls.

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


def check_mixers(config: LMConfig, device: torch.device) -> None:
    """Check each kind of layer of a model that is described by its mixers; see `check_layer`."""
    for mixer in dict.fromkeys(config.mixers):
        check_layer(build_layer(mixer, config.d_model, device))


def check_layer(layer: Layer) -> None:
    """Check training under bf16 autocast and decoding with bf16 weights, against float32.

    The references of all ops run on the CPU, in float32, which is taken as exact, and in bf16.

    Raises:
        FailedRunError: if an output or the input's gradient is wrong; the message names it.
    """
    reference = copy.deepcopy(layer).float().cpu()
    x, dout = (torch.randn(2, TOKENS, len(layer.norm.weight)) for _ in range(2))
    exact = _train(reference, x, dout, autocast=False)
    low, ours = (_train(each, x, dout, autocast=True) for each in (reference, layer))
    for name in exact:
        _compare(layer, name, ours[name], exact[name], low[name])
    with torch.no_grad():
        half = reference.bfloat16()
        low_out = half.mixer(half.norm(x.bfloat16()))[0][:, -DECODED:]
        decoded = _decode(copy.deepcopy(layer).bfloat16(), x.bfloat16())
    expected = exact["the output in training"][:, -DECODED:]
    _compare(layer, "the output in decoding", decoded, expected, low_out)


def _train(layer: Layer, x: Tensor, dout: Tensor, *, autocast: bool) -> dict[str, Tensor]:
    """Return the output and the input's gradient, without the residual, which would hide errors."""
    device = layer.norm.weight.device
    x = x.to(device).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        out = layer.mixer(layer.norm(x))[0]
    (dx,) = torch.autograd.grad(out, x, dout.to(out))
    return {"the output in training": out.detach(), "the input's gradient": dx}


def _decode(layer: Layer, x: Tensor) -> Tensor:
    """Prefill all but the last tokens, and decode these in place: (B, DECODED, C)."""
    x = layer.norm(x.to(layer.norm.weight.device))
    _, state = layer.mixer(x[:, :-DECODED], layer.mixer.init_state(len(x)))
    state = layer.mixer.reserve(state, DECODED)
    last = x[:, -DECODED:].split(1, dim=1)
    return torch.cat([layer.mixer.step(token, state) for token in last], 1)


def _compare(layer: Layer, name: str, ours: Tensor, exact: Tensor, low: Tensor) -> None:
    error, usual = (float((x.float().cpu() - exact).norm() / exact.norm()) for x in (ours, low))
    if not error <= FACTOR * usual + 1e-4:  # not ">", so that NaN fails
        raise FailedRunError(
            f"{type(layer.mixer).__name__}: {name} is wrong here (error {error:.1e}, "
            f"the reference's in bf16 {usual:.1e}): no speed"
        )
