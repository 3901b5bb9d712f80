"""Fills every new buffer of numbers with NaN, so that tests notice memory that is not written.

A kernel that forgets to write a part of its output usually passes its tests, because new memory
tends to hold zeros. To use this, write `from mezzo_core.testing.poison import poison_memory` in a
conftest.py, and use the fixture (or wrap it in an autouse fixture).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils._device
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def _filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Dynamo cannot trace into a wrapped builtin, so a compiled program must call this function.
    @torch.compiler.allow_in_graph
    @functools.wraps(allocate)
    def allocate_nan(*args: Any, **kwargs: Any) -> Tensor:
        fresh = allocate(*args, **kwargs)
        # A traced or meta tensor has no memory, and filling it would change the traced program.
        if torch.compiler.is_compiling() or fresh.is_meta or type(fresh) is not Tensor:
            return fresh
        # Modes that watch operations must not see this one.
        with torch.no_grad(), _disable_current_modes():
            if fresh.is_floating_point() or fresh.is_complex():
                fresh.fill_(float("nan"))
            elif fresh.dtype == torch.uint8:  # bytes may hold any numbers: these are NaN
                fresh.fill_(255)
        return fresh

    return allocate_nan


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill the results of torch.empty, empty_like, empty_strided and Tensor.new_empty* with NaN."""
    # torch builds a set of its constructors at its first use and keeps it. Built while they are
    # patched, it would hold the patches instead of the originals, and torch.device("meta") would
    # later have no effect on these constructors. So build it before.
    torch.utils._device._device_constructors()
    places = [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
        (Tensor, "new_empty_strided"),
    ]
    with ExitStack() as stack:
        for place, name in places:
            patch = mock.patch.object(place, name, _filled(getattr(place, name)))
            stack.enter_context(patch)
        yield


@pytest.fixture
def poison_memory() -> Iterator[None]:
    """Run the test with poisoned memory."""
    with poisoned():
        yield
