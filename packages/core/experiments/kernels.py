"""Profile the work that is slower than we want, kernel by kernel: what stands in its way.

    python packages/core/experiments/kernels.py --out packages/core/results/nvidia-h200
    python packages/core/experiments/kernels.py --out DIR --dry-run     # toy sizes, on a CPU

Writes kernels.json: for each work the milliseconds of one forward and backward (of a whole model,
one training step), and as details those of its kernels by the profiler. Our kernels have their
names; those of libraries stand together.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from mezzo_core.nn import AttentionConfig
from mezzo_core.nn.configs import MixerConfig
from mezzo_core.reproduction import Cell, Entry, Options, run_script, timing
from mezzo_core.reproduction.layer_speed import (
    build_layer,
    build_model,
    compiled,
    layer_step,
    op_step,
)
from mezzo_core.reproduction.runner import Job
from mezzo_core.reproduction.training_speed import training_step
from mezzo_drt.recipes import SIZES
from mezzo_drt.reproduction.speed import BASE, DRT1, model_config
from mezzo_gsa import GSAConfig
from mezzo_gsa.ops import chunk_gsa
from mezzo_rat import RATConfig
from mezzo_recurrent_transformer import RecurrentBlockConfig, RecurrentStackConfig
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
    return layer_step(one, compiled(one), "train", 1, T)


def recurrent(batch: int, tiny: bool, device: torch.device) -> Step:
    """Return the step of twelve recurrent layers."""
    B, T, C, depth = (1, 16, 128, 2) if tiny else (batch, 512, 1024, 12)
    config = RecurrentStackConfig(depth, RecurrentBlockConfig(head_dim=64))
    layers = build_layer(config, C, device, alone=True)
    return layer_step(layers, layers, "train", B, T)


def gsa_op(B: int, T: int, tiny: bool, device: torch.device) -> Step:
    """Return the step of the op on random inputs."""
    B, T, H, D, M = (1, 32, 4, 16, 8) if tiny else (B, T, 4, 512, 64)
    inputs = {x: torch.randn(B, T, H, D, device=device, dtype=torch.bfloat16) for x in "qkv"}
    gates = F.logsigmoid(torch.randn(B, T, H, M, device=device)) / GSAConfig().damping
    return op_step(lambda **x: chunk_gsa(**x).out, {**inputs, "g": gates}, "train")


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
