"""Our ops and layers beside fla's: chunk_gsa, chunk_gla, and layers in training and decoding.

A layer is the mixer alone, with weights and inputs of one dtype, as fla's benchmarks take it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from mezzo_core.nn.contract import MixerConfig
from mezzo_core.reproduction import Cell, Entry, captured, measure
from mezzo_core.reproduction.generation_speed import time_step
from mezzo_core.reproduction.layer_speed import Layer, build_layer, compiled
from mezzo_core.reproduction.op_speed import Contender, excused, op_job, shape
from mezzo_core.reproduction.runner import Job, passes
from torch import Tensor
from torch.nn import functional as F

from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.ops import chunk_gla, chunk_gsa
from mezzo_gsa.reproduction import fla

KEPT = ", states kept"
"""Follows an implementation that keeps its states for the backward."""


@dataclass(frozen=True)
class Shapes:
    """The shapes of ops and layers; the defaults are the README's."""

    batches: tuple[tuple[int, int], ...] = ((8, 2048), (1, 16_384), (4, 16_384))
    """(B, T). Ops take all of them, layers the first two, other M the first."""
    narrow: tuple[tuple[int, int], int, int] = ((128, 512), 32, 32)
    """(B, T), M and D of GSA's op with narrow heads."""
    num_heads: int = 4
    head_dim: int = 512  # K = V of GSA; GLA's K is half of it
    slots: tuple[int, ...] = (64, 32, 128)  # M of the ops; layers use the first
    position: int = 2048  # of the token that is decoded
    seconds: float = 0.3  # for each timing

    @property
    def d_model(self) -> int:
        """C, of the layers and of all heads together."""
        return self.num_heads * self.head_dim

    def layers(self) -> dict[str, MixerConfig]:
        """Return our layers."""
        gsa = GSAConfig(num_heads=self.num_heads, num_slots=self.slots[0])
        return {"gsa": gsa, "gla": GLAConfig(num_heads=self.num_heads)}


def jobs(shapes: Shapes, device: str) -> list[Job]:
    """List what is timed; fla's rows only on a GPU where it is installed."""
    ours = "triton" if device == "cuda" else "reference"
    impls = [ours, ours + KEPT]
    if fla.runs_on(device):
        impls += [fla.title(), fla.title() + KEPT]
    (first, *_), (usual, *others) = shapes.batches, shapes.slots
    D = shapes.head_dim
    sizes = [*((b, usual, D) for b in shapes.batches), *((first, M, D) for M in others)]
    found = []
    for ((B, T), M, width), impl in product([*sizes, shapes.narrow], impls):
        make = partial(_gsa, shapes, (B, T), M, width, impl)
        column = shape(B=B, T=T, H=shapes.num_heads, K=width, V=width, M=M)
        phases = ("train",) if impl.endswith(KEPT) else ("forward", "train")
        found.append(op_job("gsa op", impl, column, make, shapes.seconds, phases))
    for (B, T), impl in product(shapes.batches, impls[::2]):
        make = partial(_gla, shapes, (B, T), impl)
        column = shape(B=B, T=T, H=shapes.num_heads, K=D // 2, V=D)
        found.append(op_job("gla op", impl, column, make, shapes.seconds))
    eager = [f"{ours}, eager"] if device == "cuda" else []
    for name, impl in product(shapes.layers(), [ours, *eager, *impls[2:3]]):
        for B, T in shapes.batches[:2]:
            make = partial(_layer, shapes, name, (B, T), impl)
            column = _layer_shape(shapes, name, B, T)
            found.append(op_job(f"{name} layer", impl, column, make, shapes.seconds))
    steps = [ours, *(f"{impl}{graph}" for impl in impls[2:3] for graph in ("", ", in a graph"))]
    for name, impl in product(shapes.layers(), steps):
        cell = Cell(f"{name} layer decode ({impl})", _layer_shape(shapes, name, 1, 1))
        found.append(Job((cell,), partial(_decode, shapes, name, impl)))
    return [excused(job) if "(fla " in job.cells[0].model else job for job in found]


def _gsa(
    shapes: Shapes, batch: tuple[int, int], M: int, D: int, impl: str, device: torch.device
) -> Contender:
    inputs = _inputs(shapes, batch, D, D, M, GSAConfig().damping, device)
    scale = shapes.head_dim**-0.5
    keep = impl.endswith(KEPT)
    if impl.startswith("fla "):
        inputs["s"] = -torch.expm1(inputs["g"]).to(inputs["q"].dtype)
        return Contender(fla.gsa_op(scale, keep_states=keep), inputs)
    return Contender(_op(chunk_gsa, scale, keep_states=keep), inputs)


def _gla(shapes: Shapes, batch: tuple[int, int], impl: str, device: torch.device) -> Contender:
    V = shapes.head_dim
    K = V // 2
    inputs, scale = _inputs(shapes, batch, K, V, K, GLAConfig().damping, device), K**-0.5
    op = fla.gla_op(scale) if impl.startswith("fla ") else _op(chunk_gla, scale)
    return Contender(op, inputs)


def _inputs(
    shapes: Shapes, batch: tuple[int, int], K: int, V: int, M: int, damping: float,
    device: torch.device,
) -> dict[str, Tensor]:  # fmt: skip
    """Return random q, k (B, T, H, K), v (B, T, H, V), and g (B, T, H, M) as a layer's."""
    (B, T), H = batch, shapes.num_heads
    torch.manual_seed(0)
    inputs = {name: _normal(device, B, T, H, D) for name, D in {"q": K, "k": K, "v": V}.items()}
    inputs["g"] = F.logsigmoid(torch.randn(B, T, H, M, device=device)) / damping
    return inputs


def _op(op: Callable[..., Any], scale: float, **options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, g: op(q, k, v, g, scale=scale, **options).out


def _layer(
    shapes: Shapes, name: str, batch: tuple[int, int], impl: str, device: torch.device
) -> Contender:
    """Return a layer as a function of x (B, T, C) and of its weights."""
    is_fla = impl.startswith("fla ")
    layer = _theirs(shapes, device)[name] if is_fla else _ours(shapes, name, device)
    run = layer if is_fla or impl.endswith("eager") else compiled(layer)
    x, weights = _normal(device, *batch, shapes.d_model), layer.mixer.named_parameters()
    return Contender(lambda x, **weights: run(x), {"x": x, **dict(weights)})


def _decode(
    shapes: Shapes, name: str, impl: str, cells: tuple[Cell, ...], folder: Path,
    device: torch.device,
) -> Iterator[list[Entry]]:  # fmt: skip
    """Time a decoding step of one sequence, in a CUDA graph but for fla's own way."""
    if not impl.startswith("fla "):
        layer = _ours(shapes, name, device)
        found = time_step(layer, 1, shapes.position, passes=1, seconds=shapes.seconds)
        yield passes(cells[0], found, "ms")
        return
    with torch.no_grad():
        prompt, x = (_normal(device, 1, T, shapes.d_model) for T in (shapes.position, 1))
        step = fla.step(_theirs(shapes, device)[name], prompt, x)
        step = captured(step, device) if impl.endswith("in a graph") else step
        yield passes(cells[0], [measure(step, device, seconds=shapes.seconds)], "ms")


def _ours(shapes: Shapes, name: str, device: torch.device) -> Layer:
    layer = build_layer(shapes.layers()[name], shapes.d_model, device, alone=True)
    return layer.bfloat16() if device.type == "cuda" else layer


def _theirs(shapes: Shapes, device: torch.device) -> Mapping[str, Layer]:
    return fla.layers(shapes.d_model, shapes.num_heads, shapes.slots[0], _normal(device, 0))


def _layer_shape(shapes: Shapes, name: str, B: int, T: int) -> str:
    slots = {"M": shapes.slots[0]} if name == "gsa" else {}
    return shape(B=B, T=T, C=shapes.d_model, **slots)


def _normal(device: torch.device, *size: int) -> Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(size, device=device, dtype=dtype)
