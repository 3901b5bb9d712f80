"""The implementations of core's ops that run here, where they run, and arguments to refuse."""

from importlib.util import find_spec

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NO_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton here")
impls = pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=NO_TRITON)])


def changed(inputs, changes):
    """Return inputs of which some have another dtype or device, or are ones of another shape."""
    found = dict(inputs)
    for name, change in changes.items():
        if isinstance(change, tuple):
            dtype = torch.int64 if name == "lengths" else torch.float32
            found[name] = torch.ones(change, dtype=dtype, device=DEVICE)
        else:
            found[name] = inputs[name].to(change)
    return found
