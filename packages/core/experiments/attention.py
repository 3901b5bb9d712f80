"""Measure attention's backends on a GPU, by which `impl="auto"` chooses.

    python packages/core/experiments/attention.py --out packages/core/results/nvidia-h200
    python packages/core/experiments/attention.py --out DIR --dry-run    # toy sizes, on a CPU

Writes attention.json, which says why a backend failed that cannot do a request or is not
installed.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from mezzo_core.ops.attention import attention
from mezzo_core.reproduction import Options, Timing, run_script
from mezzo_core.reproduction.layer_speed import op_job, time_op
from torch import Tensor

BACKENDS = ("sdpa", "flex", "flash")
MASKED = ("flex", "flash")
"""Those that skip what a mask hides."""
SHAPES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "causal": ({"B": 8, "T": 2048, "HQ": 16, "H": 16, "D": 128}, {}),
    "causal, long": ({"B": 4, "T": 16_384, "HQ": 16, "H": 16, "D": 128}, {}),
    "causal, narrow": ({"B": 16, "T": 2048, "HQ": 16, "H": 16, "D": 64}, {}),
    "causal, grouped": ({"B": 4, "T": 8192, "HQ": 8, "H": 2, "D": 128}, {}),
    "window": ({"B": 4, "T": 16_384, "HQ": 12, "H": 12, "D": 64}, {"window_size": 512}),
    "wide window": ({"B": 4, "T": 16_384, "HQ": 16, "H": 16, "D": 128}, {"window_size": 1024}),
    "packed": ({"B": 1, "T": 32_768, "HQ": 16, "H": 16, "D": 64}, {"cu_seqlens": 1000}),
}
"""Each request's sizes and options; packed sequences have 1,000 tokens each."""


def measure(options: Options) -> None:
    """Time every backend that the command line names at every shape, bf16."""
    jobs = []
    for name, (sizes, extra) in SHAPES.items():
        if options.dry_run:
            sizes = {letter: min(n, 64 if letter == "T" else 4) for letter, n in sizes.items()}
        for impl in MASKED if extra else BACKENDS:
            make = partial(prepare, impl, sizes, extra, 0.02 if options.dry_run else 0.3)
            job = op_job(f"{name} attention op", impl, sizes, make)
            jobs.append(replace(job, is_excused=True))
    names = [cell.model for job in jobs for cell in job.cells]
    chosen = tuple(row for row in names if row.partition("(")[2].strip(")") in options.models)
    replace(options, models=chosen).run(
        "attention",
        jobs,
        kind="timings",
        title="Attention's backends",
        setting="medians of repeated calls",
        how="scaled down" if options.dry_run else "other hardware",
        unit="ms",
    )


def prepare(
    impl: str, sizes: dict[str, int], extra: dict[str, Any], seconds: float, device: torch.device
) -> Callable[..., list[Timing]]:
    """Return what times a backend on random inputs."""
    torch.manual_seed(0)
    B, T, HQ, H, D = sizes.values()
    inputs = {
        x: torch.randn(B, T, heads, D, device=device, dtype=torch.bfloat16)
        for x, heads in (("q", HQ), ("k", H), ("v", H))
    }
    if "cu_seqlens" in extra:
        lengths = [extra["cu_seqlens"]] * (T // extra["cu_seqlens"])
        borders = torch.tensor([0, *accumulate(lengths), T], dtype=torch.int32).unique()
        extra = {"cu_seqlens": borders.to(device)}
    return partial(time_op, partial(output, impl=impl, **extra), inputs, seconds=seconds)


def output(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return attention's output alone."""
    return attention(q, k, v, **options).out


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, BACKENDS))
