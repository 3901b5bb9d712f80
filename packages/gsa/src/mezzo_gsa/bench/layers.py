"""Benchmarks of one layer, a mixer with its projections: training, prefill and decoding step."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from mezzo_core.bench import Row, captured, measure
from mezzo_core.layer_bench import Layer, check_layer
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.contract import AbstractMixer, MixerConfig
from torch import Tensor, nn

from mezzo_gsa.bench import fla
from mezzo_gsa.bench.benchmark import Benchmark, Contender, Shapes, timed
from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig

Run = Callable[[Tensor], Tensor]
ROOM = 8
"""Tokens reserved beyond the position, for the steps before a capture."""


def layers(shapes: Shapes) -> dict[str, MixerConfig]:
    """Return the layers that are compared."""
    return {
        "gsa": GSAConfig(num_heads=shapes.num_heads, num_slots=shapes.slots[0]),
        "gla": GLAConfig(num_heads=shapes.num_heads),
        "attention": AttentionConfig(head_dim=shapes.attention_dim),
    }


def layer_rows(benchmark: Benchmark) -> Iterator[Row]:
    """Time each layer, with weights in the benchmark's dtype; then fla's layers, eagerly."""
    for name, config in layers(benchmark.shapes).items():
        mixer = build(config, benchmark)
        for impl, run in forms(config, mixer, benchmark).items():
            yield from _rows(benchmark, name, impl, run, mixer)
    if benchmark.has_fla:
        with fla.excused("its layers", benchmark.say):
            for name, layer in _fla_layers(benchmark).items():
                yield from _rows(benchmark, name, fla.title(), partial(fla.run_layer, layer), layer)


def decode_rows(benchmark: Benchmark) -> Iterator[Row]:
    """Time a decoding step of one sequence through each layer, in a CUDA graph."""
    for name, config in layers(benchmark.shapes).items():
        mixer = build(config, benchmark)
        prompt, x = _prompt_and_token(benchmark)
        with torch.no_grad():
            state = mixer.reserve(mixer(prompt, mixer.init_state(1))[1], ROOM)
            step = captured(partial(mixer.step, x, state), benchmark.device)
            rewind = partial(_rewind, state, benchmark.shapes.position)
            timing = measure(
                step, benchmark.device, seconds=benchmark.shapes.seconds, before=rewind
            )
        yield Row(f"{name} layer decode", benchmark.impl, _shape(benchmark, name, 1, 1), timing)
    if benchmark.has_fla:
        with fla.excused("its layers' steps", benchmark.say), torch.no_grad():
            for name, layer in _fla_layers(benchmark).items():
                yield from _fla_decode_rows(benchmark, name, layer)


def _fla_decode_rows(benchmark: Benchmark, name: str, layer: nn.Module) -> Iterator[Row]:
    step = fla.step(layer, *_prompt_and_token(benchmark))
    shape, seconds = _shape(benchmark, name, 1, 1), benchmark.shapes.seconds
    eager = measure(step, benchmark.device, seconds=seconds)
    yield Row(f"{name} layer decode", fla.title(), shape, eager)
    timing = measure(captured(step, benchmark.device), benchmark.device, seconds=seconds)
    yield Row(f"{name} layer decode", fla.title("in a graph"), shape, timing)


def build(config: MixerConfig, benchmark: Benchmark) -> AbstractMixer:
    """Build a mixer and check its results against float32 on the CPU.

    Raises:
        UserError: if the results are wrong.
    """
    torch.manual_seed(0)
    with benchmark.device:
        layer = Layer(config.build(benchmark.shapes.d_model), benchmark.shapes.d_model)
    check_layer(layer)
    return layer.mixer.to(benchmark.dtype)


def forms(config: MixerConfig, mixer: AbstractMixer, benchmark: Benchmark) -> Mapping[str, Run]:
    """Return the ways to run a layer: compiled and eager; on a CPU only eager."""
    impl = "sdpa" if isinstance(config, AttentionConfig) else benchmark.impl
    if benchmark.device.type != "cuda":
        return {impl: partial(_mix, mixer)}
    # Reset the compiler: past its limit of recompilations it would run layers eagerly.
    torch.compiler.reset()
    compiled = torch.compile(mixer, dynamic=False)
    return {impl: partial(_mix, compiled), f"{impl}, eager": partial(_mix, mixer)}


def _rows(benchmark: Benchmark, name: str, impl: str, run: Run, layer: nn.Module) -> Iterator[Row]:
    for B, T in benchmark.shapes.batches[:2]:
        x = benchmark.normal(B, T, benchmark.shapes.d_model)
        yield from timed(
            benchmark,
            Contender(
                f"{name} layer",
                impl,
                _shape(benchmark, name, B, T),
                run=lambda x, **parameters: run(x),
                inputs={"x": x, **dict(layer.named_parameters())},
            ),
        )


def _fla_layers(benchmark: Benchmark) -> Mapping[str, nn.Module]:
    shapes = benchmark.shapes
    sizes = (shapes.d_model, shapes.num_heads, shapes.slots[0])
    return fla.layers(*sizes, benchmark.device, benchmark.dtype)


def _shape(benchmark: Benchmark, name: str, B: int, T: int) -> dict[str, int]:
    shape = {"B": B, "T": T, "C": benchmark.shapes.d_model}
    return {**shape, "M": benchmark.shapes.slots[0]} if name == "gsa" else shape


def _prompt_and_token(benchmark: Benchmark) -> tuple[Tensor, Tensor]:
    C = benchmark.shapes.d_model
    return benchmark.normal(1, benchmark.shapes.position, C), benchmark.normal(1, 1, C)


def _mix(mixer: Callable[[Tensor], tuple[Tensor, Any]], x: Tensor) -> Tensor:
    return mixer(x)[0]


def _rewind(state: Any, position: int) -> None:
    """Set the lengths of a state, which are its only integer tensors."""
    for field in state:
        if not field.is_floating_point():
            field.fill_(position)
