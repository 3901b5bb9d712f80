"""Products of memories keep their dtype, whatever autocast says around them."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which products keep their dtype; the meta device knows no autocast."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
