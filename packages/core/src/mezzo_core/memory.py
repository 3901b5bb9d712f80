"""How much memory is free."""

import math
from pathlib import Path

import torch


def available_memory(device: torch.device | str = "cpu") -> float:
    """Return the free bytes of a device's memory; infinite if the system does not tell.

    Limits of a container are not considered.
    """
    device = torch.device(device)
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else math.inf
