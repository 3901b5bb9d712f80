"""The law of replays: a call that repeats launches equals one that does not, to the bit.

Without a GPU the compiled kernels are those of Triton's interpreter: each gets its arguments as
addresses, as on a GPU.
"""

import ctypes
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from itertools import takewhile
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mezzo_core.ops import replay

Draw = Callable[[], Mapping[str, Tensor]]


def assert_replayed(op: Callable[..., Tensor], draw: Draw, *, times: int = 2) -> None:
    """Assert that an op repeats its launches, with equal output and gradients.

    Args:
        op: the op; it takes the tensors by name.
        draw: returns other tensors in each call, of the same form.
        times: how many functions of a call are repeated: the forward and the backward.

    Raises:
        AssertionError: if it does not.
    """
    for i in range(4):
        inputs = draw()
        with mock.patch.object(replay, "_stream", return_value=None):  # a GPU would repeat this too
            expected = _results(op, inputs)
        with replays() as done:
            found = _results(op, inputs)
        if i > 1:
            assert len(done) == times, f"{len(done)} functions were repeated, not {times}"
            assert not any(map(held, done)), "a recording keeps memory of the call it was made of"
        for name, x in expected.items():
            assert torch.equal(found[name], x), name


def held(recording: replay.Recording) -> list[Tensor]:
    """Return the tensors that a recording keeps, but for those that its function keeps anyway."""
    parts = [x for call in recording.calls for x in call.arguments]
    parts += [descriptor for call in recording.calls for *_, descriptor in call.places]
    found = [getattr(x, "base", x) for x in parts]
    known = {id(x) for x in recording.kept}
    return [x for x in found if isinstance(x, Tensor) and id(x) not in known]


def _results(op: Callable[..., Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the output of an op and the gradients of its inputs."""
    given = {n: x.detach().requires_grad_(x.is_floating_point()) for n, x in inputs.items()}
    leaves = {name: x for name, x in given.items() if x.requires_grad}
    out = op(**given)
    dout = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    found = torch.autograd.grad(out, [*leaves.values()], dout)
    return {"out": out.detach(), **dict(zip(leaves, found, strict=True))}


@contextmanager
def replays() -> Iterator[list[replay.Recording]]:
    """Let ops repeat launches, on a CPU too; yield a list that collects what is repeated."""
    done: list[replay.Recording] = []
    repeat = replay._replay

    def counted(recording: replay.Recording, *rest: Any) -> Any:
        done.append(recording)
        return repeat(recording, *rest)

    patches = [mock.patch.object(replay, "_replay", counted)]
    if os.environ.get("TRITON_INTERPRET") == "1":
        patches += _interpreted()
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield done


def _interpreted() -> list[Any]:
    """Return patches by which `launch` and `replay` take the interpreter for a GPU."""
    from mezzo_core.ops import launch

    gpu = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    patches = {
        "is_direct": lambda: True,
        "_is_plain": lambda kernel: True,
        "_key": lambda kernel, device, *given: (kernel, *given),
        "_named": _named,
        "_compiled": _Compiled(),
        "driver": SimpleNamespace(active=gpu),
    }
    return [
        *(mock.patch.object(launch, name, value) for name, value in patches.items()),
        mock.patch.object(replay, "_stream", _stream),
        mock.patch.object(replay, "_is_captured", return_value=False),
    ]


def _stream(tensors: list[Tensor]) -> int | None:
    return 0 if all(x.data_ptr() % replay.ALIGNED == 0 for x in tensors) else None


def _constants(kernel: Any) -> dict[str, bool]:
    """Tell of each parameter of a kernel whether it is a constant."""
    kinds = inspect.signature(kernel.fn).parameters.items()
    return {name: "constexpr" in str(kind.annotation) for name, kind in kinds}


def _named(kernel: Any, num_arguments: int, *names: str) -> list[str]:
    rest = [*_constants(kernel).items()][num_arguments:]
    return [name for name, _ in takewhile(lambda each: not each[1] and each[0] in names, rest)]


class _Compiled:
    """Stands for `launch`'s table of compiled kernels: it has every kernel that can be in it."""

    def get(self, key: Any) -> tuple["_Kernel", tuple[Any, ...]] | None:
        kernel, arguments, constants = key
        kinds, n = [*_constants(kernel).values()], len(arguments)
        if any(kinds[:n]) or not all(kinds[n:]):
            return None
        return _Kernel(kernel, [*map(_dtype, arguments)], tuple(constants)), (*constants.values(),)


class _Kernel:
    """Makes a kernel of the interpreter callable as a compiled one."""

    function = packed_metadata = None

    def __init__(self, kernel: Any, dtypes: list[Any], names: tuple[str, ...]) -> None:
        self._kernel, self._dtypes, self._names = kernel, dtypes, names

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        n = 6  # of the stream, the function, its metadata and the hooks
        m = n + len(self._dtypes)
        given = map(_at, rest[n:m], self._dtypes)
        with _disable_current_modes():
            self._kernel[x, y, z](*given, **dict(zip(self._names, rest[m:], strict=True)))


def _dtype(x: Any) -> torch.dtype | None:
    return getattr(getattr(x, "base", None) if not isinstance(x, Tensor) else x, "dtype", None)


def _at(x: Any, dtype: torch.dtype | None) -> Any:
    """Return an argument of the interpreter: a tensor, or a descriptor, at an address."""
    if dtype is None:
        return x
    if isinstance(x, int):
        return _tensor(x, 1, dtype)
    found, n = copy(x), 1 + sum((m - 1) * s for m, s in zip(x.shape, x.strides, strict=True))
    found.base = _tensor(x.base.data_ptr(), n, dtype)
    return found


def _tensor(address: int, n: int, dtype: torch.dtype) -> Tensor:
    with _disable_current_modes():
        if not address:
            return torch.zeros(0, dtype=dtype)
        memory = (ctypes.c_byte * (n * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype, count=n)
