"""Benchmarks of one layer (training, prefill, decoding step) and of tiny models.

A layer is the mixer alone, with weights and inputs of one dtype, as fla's benchmarks take it.
"""

from collections.abc import Iterator
from functools import partial

import torch
from mezzo_core import bench
from mezzo_core.bench import Contender, Layer, Row, training_step
from mezzo_core.bench.layer import Run
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.contract import MixerConfig

from mezzo_gsa.bench import fla
from mezzo_gsa.bench.setting import Setting
from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.recipes import PAPER_NAMES, recipe


def layer_rows(setting: Setting) -> Iterator[Row]:
    """Time each layer, on a GPU compiled and eager; then fla's, eager."""
    is_gpu = setting.device.type == "cuda"
    for name, layer in _layers(setting).items():
        impl = "sdpa" if name == "attention" else setting.impl
        yield from _time(setting, name, impl, layer, bench.compiled(layer))
        if is_gpu:
            yield from _time(setting, name, f"{impl}, eager", layer, layer)
    if setting.has_fla:
        with fla.excused("its layers", setting.say):
            for name, layer in _fla_layers(setting).items():
                yield from _time(setting, name, fla.title(), layer, layer)


def decode_rows(setting: Setting) -> Iterator[Row]:
    """Time a decoding step of one sequence through each layer, in a CUDA graph."""
    C, position = setting.shapes.d_model, setting.shapes.position
    measure = partial(bench.measure, device=setting.device, seconds=setting.shapes.seconds)
    for name, layer in _layers(setting).items():
        (timing,) = bench.time_step(layer, 1, position, passes=1, seconds=setting.shapes.seconds)
        yield Row(f"{name} layer decode", setting.impl, _shape(setting, name, 1, 1), timing)
    if setting.has_fla:
        with fla.excused("its layers' steps", setting.say), torch.no_grad():
            for name, layer in _fla_layers(setting).items():
                step = fla.step(layer, setting.normal(1, position, C), setting.normal(1, 1, C))
                graph = bench.captured(step, setting.device)
                for impl, work in {fla.title(): step, fla.title("in a graph"): graph}.items():
                    shape = _shape(setting, name, 1, 1)
                    yield Row(f"{name} layer decode", impl, shape, measure(work))


def model_rows(setting: Setting) -> Iterator[Row]:
    """Time training steps of the paper's architectures at the tiny recipes' size."""
    (B, T), seconds = setting.shapes.batches[0], setting.shapes.seconds
    for architecture in PAPER_NAMES:
        config = recipe("tiny", architecture)
        model = (config.name, setting.impl, config.model)
        yield from training_step.model_rows(*model, B, T, setting.device, seconds)


def _layers(setting: Setting) -> dict[str, Layer]:
    """Return the layers that are compared, after a check of each."""
    shapes = setting.shapes
    configs: dict[str, MixerConfig] = {
        "gsa": GSAConfig(num_heads=shapes.num_heads, num_slots=shapes.slots[0]),
        "gla": GLAConfig(num_heads=shapes.num_heads),
        "attention": AttentionConfig(head_dim=shapes.attention_dim),
    }
    layers = {}
    for name, config in configs.items():
        layers[name] = bench.build_layer(config, shapes.d_model, setting.device, alone=True)
        bench.check_layer(layers[name])
        layers[name].to(setting.dtype)
    return layers


def _fla_layers(setting: Setting) -> dict[str, Layer]:
    shapes, like = setting.shapes, setting.normal(0)
    return fla.layers(shapes.d_model, shapes.num_heads, shapes.slots[0], like)


def _time(setting: Setting, name: str, impl: str, layer: Layer, run: Run) -> Iterator[Row]:
    """Time a layer at the first two batches."""
    for B, T in setting.shapes.batches[:2]:
        x, weights = setting.normal(B, T, setting.shapes.d_model), layer.mixer.named_parameters()
        inputs, shape = {"x": x, **dict(weights)}, _shape(setting, name, B, T)
        yield from setting.time(
            Contender(f"{name} layer", impl, shape, lambda x, **weights: run(x), inputs)
        )


def _shape(setting: Setting, name: str, B: int, T: int) -> dict[str, int]:
    shape = {"B": B, "T": T, "C": setting.shapes.d_model}
    return {**shape, "M": setting.shapes.slots[0]} if name == "gsa" else shape
