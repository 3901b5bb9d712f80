"""Products of states keep their dtype, also under autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast; the meta device has no autocast to switch off."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
