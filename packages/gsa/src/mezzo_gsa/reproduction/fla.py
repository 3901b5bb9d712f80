"""GSA's op, and layers in training, beside those of fla (flash-linear-attention).

That is the library of the paper's authors; only the benchmarks use it, where it is installed. A
layer is the mixer alone, with weights and inputs of one dtype, as fla's benchmarks take it.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from mezzo_core.nn.configs import MixerConfig
from mezzo_core.reproduction import Timing
from mezzo_core.reproduction.layer_speed import build_layer, compiled, op_job, time_layer, time_op
from mezzo_core.reproduction.runner import Job, excused
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.ops import chunk_gsa

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
    H, D, M = shapes.num_heads, shapes.head_dim, shapes.num_slots
    found = []
    for (B, T), impl in product(shapes.batches, [ours, *theirs]):
        make = partial(_op, shapes, (B, T), impl in theirs)
        found.append(op_job("gsa op", impl, {"B": B, "T": T, "H": H, "K": D, "V": D, "M": M}, make))
    eager = [f"{ours}, eager"] if device == "cuda" else []
    for name, impl, (B, T) in product(shapes.layers(), [ours, *eager, *theirs], shapes.batches):
        make = partial(_layer, shapes, name, (B, T), impl)
        sizes = {"B": B, "T": T, "C": shapes.d_model} | ({"M": M} if name == "gsa" else {})
        found.append(op_job(f"{name} layer", impl, sizes, make))
    return [excused(job) if "(fla " in job.cells[0].model else job for job in found]


def _op(shapes: Shapes, batch: tuple[int, int], is_fla: bool, device: torch.device) -> Timer:
    """Return what times an op of q, k, v (B, T, H, D) and log gates (B, T, H, M) as a layer's."""
    (B, T), H, D, M = batch, shapes.num_heads, shapes.head_dim, shapes.num_slots
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = {x: torch.randn(B, T, H, D, device=device, dtype=dtype) for x in "qkv"}
    gates = torch.randn(B, T, H, M, device=device)
    inputs["g"] = F.logsigmoid(gates) / GSAConfig().damping
    if not is_fla:
        return partial(time_op, partial(_output, scale=D**-0.5), inputs, seconds=shapes.seconds)
    from fla.ops.gsa import chunk_gsa as fla_gsa

    # Its write strengths are an argument, so computing them is not timed.
    inputs["s"] = -torch.expm1(inputs["g"]).to(inputs["q"].dtype)

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, s: Tensor) -> Tensor:
        return fla_gsa(q, k, v, s, g, scale=D**-0.5, checkpoint_level=2)[0]

    return partial(time_op, run, inputs, seconds=shapes.seconds)


def _output(**inputs: Any) -> Tensor:
    return chunk_gsa(**inputs).out


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
