"""The device and the precision in which a model runs."""

import torch
from torch import Tensor

from mezzo_core.data import Batch
from mezzo_core.errors import UserError


def choose_device(device: str | torch.device | None, local_rank: int | None) -> torch.device:
    """Return the device to run on.

    Args:
        device: "cpu", "cuda" or "cuda:N"; None takes a GPU if there is one.
        local_rank: this process's number on its machine, which selects its GPU; None if there is
            only one process.

    Raises:
        UserError: if this machine has no such device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # torch.device knows further kinds, and warns of some in lines of its own.
        chosen = torch.device(device) if str(device).startswith(("cpu", "cuda")) else None
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is None or (chosen.type == "cpu" and chosen.index):  # there is one CPU, number 0
        raise UserError(f"device must be cpu, cuda or cuda:N, got {str(device)!r}")
    if chosen.type == "cpu":
        return chosen
    if not torch.cuda.is_available():
        raise UserError("no cuda device can be used here, but cpu can")
    index = local_rank if local_rank is not None else chosen.index or 0
    if index >= torch.cuda.device_count():
        raise UserError(
            f"GPU {index} was asked for, and this machine has {torch.cuda.device_count()}, "
            "numbered from 0"
        )
    return torch.device("cuda", index)


def told_device(name: str | None) -> torch.device:
    """Return the device that the option `--device` names; None takes a GPU if there is one.

    Raises:
        UserError: if this machine has no such device.
    """
    try:
        return choose_device(name, None)
    except UserError as error:
        raise UserError(f"--device {name}: {error}") from None


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context for a forward.

    Args:
        device: the model's device.
        precision: "bf16" multiplies matrices in bfloat16, and keeps weights, norms and losses in
            float32. "fp32" computes everything in float32. "auto" is "bf16" on a GPU, else "fp32".

    Raises:
        ValueError: if there is no such precision.
    """
    if precision not in ("auto", "fp32", "bf16"):
        raise ValueError(f'precision must be "auto", "fp32" or "bf16", got {precision!r}')
    use_bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=use_bf16)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device, unless it is already there."""
    return Batch(*(None if part is None else _move(part, device) for part in batch))  # type: ignore[arg-type]


def _move(values: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or values.device.type == "cuda":
        return values.to(device)
    # From pinned memory, the copy can run while the GPU still computes the previous step.
    return values.contiguous().pin_memory().to(device, non_blocking=True)
