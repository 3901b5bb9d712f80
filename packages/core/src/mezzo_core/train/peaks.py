"""The peak speed of GPUs, and the speed of training that it allows."""

import torch

from mezzo_core.nn.lm import LM
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.distributed import World

PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
"""FLOP/s of dense products in bf16 with float32 sums, by a part of the name that torch tells of a
GPU; the first part that fits counts (NVIDIA's data sheets, without sparsity)."""


def peak_flops(name: str) -> float | None:
    """Return the peak of the GPU of this name; None if it is not known."""
    words = name.split()
    return next(
        (peak for part, peak in PEAKS.items() if _has(words, part.split())),
        None,
    )


def _has(words: list[str], part: list[str]) -> bool:
    """Tell whether the words have all of these; "A100-SXM4" has A100."""
    return all(any(word.split("-")[0] == wanted for word in words) for wanted in part)


def peak_speed(config: TrainConfig, model: LM, world: World) -> float | None:
    """Return the tokens per second of a training whose products run at the GPUs' peak.

    A training step takes three times the FLOPs of a forward; those of activation checkpointing do
    not count. None if the peak is not known, or products are not in bf16.
    """
    if world.device.type != "cuda" or config.precision == "fp32":
        return None
    peak = peak_flops(torch.cuda.get_device_name(world.device))
    if peak is None:
        return None
    return peak * world.size / (3 * model.flops_per_token(config.seq_len))
