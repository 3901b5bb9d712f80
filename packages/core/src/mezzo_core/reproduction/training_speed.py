"""The speed and the memory of whole training steps: forward, backward, optimizer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mezzo_core.device import autocast
from mezzo_core.nn.lm import LM
from mezzo_core.reproduction.timing import measure_passes
from mezzo_core.train.config import OptimConfig
from mezzo_core.train.optim import build_optimizer


@dataclass(frozen=True)
class TrainingSpeed:
    """The speed of training steps; see `Timing` for the host's time and the memory."""

    tokens_per_second: float
    step_ms: float
    host_ms: float | None
    peak_gb: float | None


def time_training(model: LM, B: int, T: int, *, passes: int = 3) -> list[TrainingSpeed]:
    """Time training steps, at least two in each pass; see `training_step`.

    Raises:
        torch.OutOfMemoryError: if the batch does not fit into the GPU.
    """
    timings = measure_passes(training_step(model, B, T), model.embed.weight.device, passes, 0.0)
    return [TrainingSpeed(B * T / t.ms * 1e3, t.ms, t.host_ms, t.peak_gb) for t in timings]


def training_step(model: LM, B: int, T: int) -> Callable[[], object]:
    """Return a function that trains a model on random tokens (B, T), always the same.

    The weights stay float32; a GPU multiplies under bf16 autocast. The optimizer is fused AdamW.
    Compile the model's units first to measure compiled code.
    """
    device = model.embed.weight.device
    optimizer = build_optimizer(model, OptimConfig())
    tokens = torch.randint(model.vocab_size, (B, T + 1), device=device)

    def step() -> None:
        with autocast(device, "auto"):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
