"""The ops of GSA and GLA, and layers in training, beside those of fla (flash-linear-attention).

That is the library of the paper's authors. Only the benchmarks use it, if it is installed. A layer
is the mixer alone, with weights and inputs of one dtype, as in fla's benchmarks.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from mezzo_core.nn.configs import MixerConfig
from mezzo_core.reproduction import Timing
from mezzo_core.reproduction.layer_speed import build_layer, compiled, op_job, time_layer, time_op
from mezzo_core.reproduction.runner import Job
from torch import nn
from torch.nn import functional as F

from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.ops import chunk_gla, chunk_gsa

Timer = Callable[..., list[Timing]]


@dataclass(frozen=True)
class Shapes:
    """The shapes of the op and the layers; the defaults are the README's."""

    batches: tuple[tuple[int, int], ...] = ((8, 2048), (1, 16_384))  # (B, T)
    num_heads: int = 4
    head_dim: int = 512
    num_slots: int = 64
    seconds: float = 0.3  # for each timing

    @property
    def d_model(self) -> int:
        """C, of the layers and of all heads together."""
        return self.num_heads * self.head_dim

    def ops(self) -> dict[str, dict[str, int]]:
        """Return the sizes of a head of each op; GLA's keys are half as wide as its values."""
        H, D = self.num_heads, self.head_dim
        return {
            "gsa": {"H": H, "K": D, "V": D, "M": self.num_slots},
            "gla": {"H": H, "K": D // 2, "V": D},
        }

    def layers(self) -> dict[str, MixerConfig]:
        """Return our layers."""
        gsa = GSAConfig(num_heads=self.num_heads, num_slots=self.num_slots)
        return {"gsa": gsa, "gla": GLAConfig(num_heads=self.num_heads)}


def runs_on(device: str) -> bool:
    """Tell whether fla can be measured: it is installed, and its kernels have a GPU."""
    return device == "cuda" and importlib.util.find_spec("fla") is not None


def jobs(shapes: Shapes, device: str) -> list[Job]:
    """List what is timed; fla's rows only on a GPU where it is installed."""
    ours = "triton" if device == "cuda" else "reference"
    theirs = []
    if runs_on(device):
        from fla import __version__

        theirs = [f"fla {__version__}"]
    found = []
    for impl, (name, sizes), (B, T) in product(
        [ours, *theirs], shapes.ops().items(), shapes.batches
    ):
        make = partial(_op, name, (B, T), sizes, impl in theirs, shapes.seconds)
        found.append(op_job(f"{name} op", impl, {"B": B, "T": T, **sizes}, make))
    eager = [f"{ours}, eager"] if device == "cuda" else []
    for impl, name, (B, T) in product([ours, *eager, *theirs], shapes.layers(), shapes.batches):
        make = partial(_layer, shapes, name, (B, T), impl)
        sizes = {"B": B, "T": T, "C": shapes.d_model} | (
            {"M": shapes.num_slots} if name == "gsa" else {}
        )
        found.append(op_job(f"{name} layer", impl, sizes, make))
    return [replace(job, is_excused="(fla " in job.cells[0].model) for job in found]


def _op(
    name: str,
    batch: tuple[int, int],
    sizes: dict[str, int],
    is_fla: bool,
    seconds: float,
    device: torch.device,
) -> Timer:
    """Return what times an op of q, k (B, T, H, K), v (B, T, H, V) and log gates as a layer's."""
    H, K, V = (sizes[size] for size in "HKV")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    widths = {"q": K, "k": K, "v": V}
    inputs = {x: torch.randn(*batch, H, D, device=device, dtype=dtype) for x, D in widths.items()}
    gates = torch.randn(*batch, H, sizes.get("M", K), device=device)
    inputs["g"] = F.logsigmoid(gates) / (GSAConfig if name == "gsa" else GLAConfig)().damping
    op: Callable[..., Any] = chunk_gsa if name == "gsa" else chunk_gla
    options = {"scale": K**-0.5}
    if is_fla:
        op = getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")
    if is_fla and name == "gsa":
        # Its write strengths are an argument, so computing them is not timed.
        inputs["s"] = -torch.expm1(inputs["g"]).to(dtype)
        options["checkpoint_level"] = 2
    return partial(time_op, lambda **x: op(**x, **options)[0], inputs, seconds=seconds)


def _layer(
    shapes: Shapes, name: str, batch: tuple[int, int], impl: str, device: torch.device
) -> Timer:
    """Return what times a layer as a function of x (B, T, C) and of its weights."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if impl.startswith("fla "):
        theirs = _fla_layer(shapes, name).to(device, dtype)
        x = torch.randn(*batch, shapes.d_model, device=device, dtype=dtype)
        inputs = {"x": x, **dict(theirs.named_parameters())}
        options: dict[str, Any] = {"seconds": shapes.seconds, "allow_unused": True}
        return partial(time_op, lambda x, **_: theirs(x)[0], inputs, **options)
    layer = build_layer(shapes.layers()[name], shapes.d_model, device, alone=True).to(dtype)
    run, (B, T) = layer if impl.endswith("eager") else compiled(layer), batch
    return partial(time_layer, layer, run, B=B, T=T, passes=1, seconds=shapes.seconds)


def _fla_layer(shapes: Shapes, name: str) -> nn.Module:
    from fla.layers import GatedLinearAttention, GatedSlotAttention

    sizes = {"hidden_size": shapes.d_model, "num_heads": shapes.num_heads, "layer_idx": 0}
    if name == "gsa":
        return GatedSlotAttention(num_slots=shapes.num_slots, **sizes)
    return GatedLinearAttention(**sizes)
