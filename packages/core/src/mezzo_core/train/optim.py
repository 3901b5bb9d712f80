"""AdamW on matrices and vectors, and the learning rate of each step."""

import math

import torch
from torch import Tensor, nn

from mezzo_core.train.config import OptimConfig


def build_optimizer(
    model: nn.Module, config: OptimConfig, *, captured: bool = False
) -> torch.optim.AdamW:
    """Build a fused AdamW whose moments exist from the start, as zeros.

    So a checkpoint has the same tensors at every step, also before the first. Weight decay applies
    to matrices: parameters of two or more dimensions whose name does not end in "bias", including
    the embedding. Norm scales and biases, also those of gates, are not decayed. If a CUDA graph
    captures its steps (`captured`), the rate is a tensor on the device.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and not name.endswith("bias")
        (decayed if is_matrix else kept).append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": kept, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=config.betas,
        fused=True,
        capturable=captured,
    )
    if captured:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(config.lr, device=next(model.parameters()).device)
    for parameter in decayed + kept:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the rate of step `step` (0 is the first) of `steps`.

    The rate rises linearly to `lr`, which it reaches at the last warm-up step. It then falls along
    half a cosine to `min_lr`, which it reaches at the last step.
    """
    warmup = round(config.warmup_fraction * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step + 1 - warmup) / (steps - warmup)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2
