"""Tables 6 and 7: training and prefill of one layer, with a fixed number of tokens a batch."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch._dynamo
from mezzo_core.bench import measure
from mezzo_core.layer_bench import Layer, check_layer
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.contract import MixerConfig
from mezzo_core.papers.cells import Result, Say, Timed, add_cell
from torch import Tensor

from mezzo_rat.reproduction.gpu.shapes import Selection, SpeedShapes, paper_layers

RECOMPILATIONS = 64
"""More than the lengths of a run: past torch's own limit (8), `fullgraph=True` raises an error."""


def measure_layers(
    shapes: SpeedShapes, selection: Selection, phases: Mapping[str, Result], say: Say
) -> None:
    """Measure every layer at every length, and add each cell to its phase's result.

    Args:
        shapes: the sizes.
        selection: which lengths and models.
        phases: "train" (Table 6), "prefill" (Table 7) or both, each with its result.
        say: see Say.

    Raises:
        UserError: if a layer computes wrong results; it is not timed.
    """
    for model, config in paper_layers(shapes.head_dim).items():
        cells = [
            (phase, T)
            for T in filter(selection.length, shapes.lengths)
            for phase, result in phases.items()
            if selection.model(model) and not result.has(("", model, str(T)))
        ]
        if not cells:
            continue
        layer = build_layer(config, shapes)
        check_layer(layer)
        run = compiled(layer, config)
        with torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS):
            for phase, T in cells:
                work = partial(time_layer, layer, run, phase, T, shapes)
                add_cell(phases[phase], ("", model, str(T)), work, say)


def build_layer(config: MixerConfig, shapes: SpeedShapes) -> Layer:
    """Build a layer (norm, mixer, residual) on the device, with the same weights at each call."""
    torch.manual_seed(0)
    with torch.device(shapes.device):
        return Layer(config.build(shapes.d_model), shapes.d_model)


def compiled(layer: Layer, config: MixerConfig) -> Callable[[Tensor], Tensor]:
    """Compile a layer on a GPU in one graph: torch raises an error instead of running it eagerly.

    Shapes are symbolic, so that not every length compiles anew; the kernels of our ops are the same
    for all lengths. torch's choice of an attention kernel depends on the length, so attention is
    compiled for each length.
    """
    if not next(layer.parameters()).is_cuda:
        return layer
    torch.compiler.reset()
    dynamic = not isinstance(config, AttentionConfig)
    run: Callable[[Tensor], Tensor] = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    return run


def time_layer(
    layer: Layer, run: Callable[[Tensor], Tensor], phase: str, num_tokens: int, shapes: SpeedShapes
) -> Timed:
    """Time a layer under bf16 autocast on a float32 residual stream, as in the training of models.

    "train" is a forward and the gradients of the input and of every weight, in new tensors at each
    call. "prefill" is a forward without gradients.
    """
    device = torch.device(shapes.device)
    batch = max(1, shapes.tokens // num_tokens)
    x = torch.randn(batch, num_tokens, shapes.d_model, device=device)
    inputs = (x, *layer.parameters())
    dout = torch.randn_like(x) if phase == "train" else None

    def forward() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return run(x)

    def train() -> None:
        torch.autograd.grad(forward(), inputs, dout)

    x.requires_grad_(phase == "train")
    work = train if phase == "train" else torch.no_grad()(forward)
    timings = [
        measure(work, device, seconds=shapes.seconds, warmup=1, least=2)
        for _ in range(shapes.passes)
    ]
    return [timing.ms for timing in timings], {"B": batch, "peak_gb": timings[-1].peak_gb}
