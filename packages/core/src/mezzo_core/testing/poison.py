"""Memory that was never written shows: every fresh floating-point buffer starts as NaN.

A kernel that forgets part of its output usually passes its tests, because fresh memory tends to
hold zeros. In a conftest.py: `from mezzo_core.testing.poison import poison_memory`, then use the
fixture (or wrap it in an autouse one).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils._device
from torch import Tensor


def _filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Dynamo cannot look into a wrapped builtin, so a compiled program calls this as it is.
    @torch.compiler.allow_in_graph
    @functools.wraps(allocate)
    def allocate_nan(*args: Any, **kwargs: Any) -> Tensor:
        fresh = allocate(*args, **kwargs)
        # A traced or meta tensor has no memory, and the fill would change the traced program.
        if torch.compiler.is_compiling() or fresh.is_meta or type(fresh) is not Tensor:
            return fresh
        if fresh.is_floating_point() or fresh.is_complex():
            with torch.no_grad():
                fresh.fill_(float("nan"))
        return fresh

    return allocate_nan


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what torch.empty, empty_like, empty_strided and Tensor.new_empty return with NaN."""
    # torch keeps a set of its constructors from the first time that it needs one. Filled while they
    # are patched it would hold the patches for good, and torch.device("meta") would miss the rest.
    torch.utils._device._device_constructors()
    places = [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
        (Tensor, "new_empty_strided"),
    ]
    patches = [
        mock.patch.object(place, name, _filled(getattr(place, name))) for place, name in places
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()


@pytest.fixture
def poison_memory() -> Iterator[None]:
    """Run the test with poisoned memory."""
    with poisoned():
        yield
