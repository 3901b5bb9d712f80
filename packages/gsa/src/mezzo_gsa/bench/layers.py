"""One layer, that is a mixer with its projections: training, prefill, and the step of a decoder."""

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
from mezzo_gsa.bench.setting import Contender, Scale, Setting, timed
from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig

Run = Callable[[Tensor], Tensor]
ROOM = 8
"""Tokens beyond the position: those of the steps before a capture."""


def layers(scale: Scale) -> dict[str, MixerConfig]:
    """Return the layers that are compared."""
    return {
        "gsa": GSAConfig(num_heads=scale.num_heads, num_slots=scale.slots[0]),
        "gla": GLAConfig(num_heads=scale.num_heads),
        "attention": AttentionConfig(head_dim=scale.attention_dim),
    }


def layer_rows(setting: Setting) -> Iterator[Row]:
    """Time each layer with weights in the benchmark's dtype; then fla's, which runs eagerly."""
    for name, config in layers(setting.scale).items():
        mixer = build(config, setting)
        for impl, run in forms(config, mixer, setting).items():
            yield from _rows(setting, name, impl, run, mixer)
    if setting.has_fla:
        with fla.excused("its layers", setting.say):
            for name, layer in _fla_layers(setting).items():
                yield from _rows(setting, name, fla.title(), partial(fla.run_layer, layer), layer)


def decode_rows(setting: Setting) -> Iterator[Row]:
    """Time one token of one sequence through each layer, as a CUDA graph runs it."""
    for name, config in layers(setting.scale).items():
        mixer = build(config, setting)
        prompt, x = _prompt_and_token(setting)
        with torch.no_grad():
            state = mixer.reserve(mixer(prompt, mixer.init_state(1))[1], ROOM)
            step = captured(partial(mixer.step, x, state), setting.device)
            rewind = partial(_rewind, state, setting.scale.position)
            timing = measure(step, setting.device, seconds=setting.scale.seconds, before=rewind)
        yield Row(f"{name} layer decode", setting.impl, _shape(setting, name, 1, 1), timing)
    if setting.has_fla:
        with fla.excused("its layers' steps", setting.say), torch.no_grad():
            for name, layer in _fla_layers(setting).items():
                yield from _fla_decode_rows(setting, name, layer)


def _fla_decode_rows(setting: Setting, name: str, layer: nn.Module) -> Iterator[Row]:
    step = fla.step(layer, *_prompt_and_token(setting))
    shape, seconds = _shape(setting, name, 1, 1), setting.scale.seconds
    eager = measure(step, setting.device, seconds=seconds)
    yield Row(f"{name} layer decode", fla.title(), shape, eager)
    timing = measure(captured(step, setting.device), setting.device, seconds=seconds)
    yield Row(f"{name} layer decode", fla.title("in a graph"), shape, timing)


def build(config: MixerConfig, setting: Setting) -> AbstractMixer:
    """Build a mixer, check that it computes what float32 on the CPU does, and return it.

    Raises:
        UserError: if it does not.
    """
    torch.manual_seed(0)
    with setting.device:
        layer = Layer(config.build(setting.scale.d_model), setting.scale.d_model)
    check_layer(layer)
    return layer.mixer.to(setting.dtype)


def forms(config: MixerConfig, mixer: AbstractMixer, setting: Setting) -> Mapping[str, Run]:
    """Return how a layer is run: compiled and as it is; on a CPU only as it is."""
    impl = "sdpa" if isinstance(config, AttentionConfig) else setting.impl
    if setting.device.type != "cuda":
        return {impl: partial(_mix, mixer)}
    # A fresh compiler each time: past its limit of recompilations it runs layers eagerly.
    torch.compiler.reset()
    compiled = torch.compile(mixer, dynamic=False)
    return {impl: partial(_mix, compiled), f"{impl}, eager": partial(_mix, mixer)}


def _rows(setting: Setting, name: str, impl: str, run: Run, layer: nn.Module) -> Iterator[Row]:
    for B, T in setting.scale.batches[:2]:
        x = setting.normal(B, T, setting.scale.d_model)
        yield from timed(
            setting,
            Contender(
                f"{name} layer",
                impl,
                _shape(setting, name, B, T),
                run=lambda x, **parameters: run(x),
                inputs={"x": x, **dict(layer.named_parameters())},
            ),
        )


def _fla_layers(setting: Setting) -> Mapping[str, nn.Module]:
    scale = setting.scale
    sizes = (scale.d_model, scale.num_heads, scale.slots[0])
    return fla.layers(*sizes, setting.device, setting.dtype)


def _shape(setting: Setting, name: str, B: int, T: int) -> dict[str, int]:
    shape = {"B": B, "T": T, "C": setting.scale.d_model}
    return {**shape, "M": setting.scale.slots[0]} if name == "gsa" else shape


def _prompt_and_token(setting: Setting) -> tuple[Tensor, Tensor]:
    C = setting.scale.d_model
    return setting.normal(1, setting.scale.position, C), setting.normal(1, 1, C)


def _mix(mixer: Callable[[Tensor], tuple[Tensor, Any]], x: Tensor) -> Tensor:
    return mixer(x)[0]


def _rewind(state: Any, position: int) -> None:
    """Set the lengths of a state, which are all the integers that it holds."""
    for field in state:
        if not field.is_floating_point():
            field.fill_(position)
