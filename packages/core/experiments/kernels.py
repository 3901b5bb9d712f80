"""Profile the work that is slower than we want, kernel by kernel: what stands in its way.

    python packages/core/experiments/kernels.py --out packages/core/results/nvidia-h200
    python packages/core/experiments/kernels.py --out DIR --dry-run     # toy sizes, on a CPU

Writes kernels.json: for each work the milliseconds of one forward and backward (of a whole model,
one training step), and as details those of its kernels by the profiler. Our kernels have their
names; those of libraries stand together.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from mezzo_core.device import autocast
from mezzo_core.nn import AttentionConfig
from mezzo_core.nn.configs import MixerConfig
from mezzo_core.reproduction import Cell, Entry, Options, run_script, timing
from mezzo_core.reproduction.layer_speed import build_layer, build_model, compiled
from mezzo_core.reproduction.runner import Job
from mezzo_core.reproduction.training_speed import training_step
from mezzo_drt.recipes import SIZES
from mezzo_drt.reproduction.speed import BASE, DRT1, model_config
from mezzo_gsa import GSAConfig
from mezzo_gsa.ops import chunk_gsa
from mezzo_rat import RATConfig
from mezzo_recurrent_transformer import RecurrentBlockConfig
from mezzo_recurrent_transformer.block import RecurrentBlock, run_layers
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn import functional as F

Step = Callable[[], object]
CALLS = 5
"""Calls under the profiler."""
LIBRARIES = {
    "nvjet": "cuBLAS",
    "gemm": "cuBLAS",
    "splitK": "cuBLAS",
    "cudnn": "cuDNN's attention",
    "at::native": "PyTorch's own",
    "triton_": "torch.compile",
    "Mem": "copies and zeros",
}
"""What stands for a kernel whose name has this part."""


def measure(options: Options) -> None:
    """Profile each work."""
    options.run(
        "kernels",
        [
            Job((Cell(name, "step"),), partial(profile, make, options.dry_run))
            for name, make in WORK.items()
        ],
        kind="timings",
        title="Kernels of the work that is slower than we want",
        setting=f"a forward and backward, bf16; kernels: by the profiler, means of {CALLS} calls",
        how="scaled down" if options.dry_run else "other hardware",
        unit="ms",
    )


def profile(
    make: Callable[[bool, torch.device], Step],
    tiny: bool,
    cells: tuple[Cell, ...],
    _: Path,
    device: torch.device,
) -> Iterator[list[Entry]]:
    """Yield the time of a step without the profiler, and the times of its kernels with it."""
    step = make(tiny, device)
    time = timing.measure(step, device)
    with torch.profiler.profile() as found:
        for _call in range(CALLS):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    kernels: Counter[str] = Counter()
    wanted = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    for event in found.key_averages():
        if event.device_type == wanted:
            spent = event.self_device_time_total or event.self_cpu_time_total
            kernels[named(event.key)] += spent / 1e3 / CALLS
    details = {name: round(ms, 4) for name, ms in kernels.most_common() if ms >= time.ms / 500}
    yield [cells[0].entry(time.ms, peak_gb=time.peak_gb, **details)]


def named(kernel: str) -> str:
    """Return the name under which a kernel is counted."""
    return next((words for part, words in LIBRARIES.items() if part in kernel), kernel[:60])


def layer(config: MixerConfig, tiny: bool, device: torch.device) -> Step:
    """Return the step of a layer at the sizes of RAT's Table 6."""
    T, C = (128, 256) if tiny else (262_144, 2048)
    one = build_layer(config, C, device)
    return step_of(compiled(one), [torch.randn(1, T, C, device=device)], one)


def recurrent(batch: int, tiny: bool, device: torch.device) -> Step:
    """Return the step of twelve recurrent layers."""
    B, T, C, depth = (1, 16, 128, 2) if tiny else (batch, 512, 1024, 12)
    config = RecurrentBlockConfig(head_dim=64)
    blocks = nn.ModuleList(build_layer(config, C, device, alone=True).mixer for _ in range(depth))
    layers = cast(tuple[RecurrentBlock, ...], tuple(blocks))

    def run(x: Tensor) -> Tensor:
        return run_layers(layers, x, None, None, None)[0]

    return step_of(run, [torch.randn(B, T, C, device=device)], blocks)


def gsa_op(B: int, T: int, tiny: bool, device: torch.device) -> Step:
    """Return the step of the op on random inputs."""
    B, T, H, D, M = (1, 32, 4, 16, 8) if tiny else (B, T, 4, 512, 64)
    inputs = [torch.randn(B, T, H, D, device=device, dtype=torch.bfloat16) for _ in range(3)]
    gates = F.logsigmoid(torch.randn(B, T, H, M, device=device)) / GSAConfig().damping
    return step_of(lambda q, k, v, g: chunk_gsa(q, k, v, g).out, [*inputs, gates])


def step_of(
    run: Callable[..., Tensor], inputs: Sequence[Tensor], module: nn.Module | None = None
) -> Step:
    """Return a forward and the gradients of all inputs, and of a module's weights by autocast."""
    leaves = [x.requires_grad_() for x in inputs]
    weights = [] if module is None else [w for w in module.parameters() if w.requires_grad]
    dout: list[Tensor] = []  # made in the first call

    def step() -> None:
        with autocast(inputs[0].device, "fp32" if module is None else "auto"):
            out = run(*leaves)
        dout[:] = dout or [torch.randn_like(out)]
        torch.autograd.grad(out, [*leaves, *weights], dout)

    return step


def drt(model: str, tiny: bool, device: torch.device) -> Step:
    """Return a training step of a whole model, its layers compiled one by one."""
    sizes = SIZES["tiny" if tiny else "128m_pg19"]()
    B, T = (1, 128) if tiny else (4, 16_384)
    lm = build_model(model_config(model, sizes), device)
    for unit in lm.units() if device.type == "cuda" else ():
        unit.compile(dynamic=False)
    return training_step(lm, B, T)


WORK = {
    "RAT(L=16), 1 x 262,144": partial(layer, RATConfig(chunk_size=16, head_dim=128)),
    "attention, 1 x 262,144": partial(layer, AttentionConfig(head_dim=128)),
    "chunk_gsa, 8 x 2,048": partial(gsa_op, 8, 2048),
    "chunk_gsa, 1 x 16,384": partial(gsa_op, 1, 16_384),
    f"{BASE}, 4 x 16,384": partial(drt, BASE),
    f"{DRT1}, 4 x 16,384": partial(drt, DRT1),
    "twelve recurrent layers, 32 x 512": partial(recurrent, 32),
    "twelve recurrent layers, 128 x 512": partial(recurrent, 128),
}

if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(WORK)))
