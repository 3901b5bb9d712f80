"""Replays the kernel launches of an op, so that small calls wait less for the host.

The *form* of a call is all that determines its launches: the dtypes, shapes and strides of tensors,
and all other arguments. The second call of a form is recorded: which kernels it launches, and
whether each of their arguments lies in an input, a result or a temporary tensor. Later calls
allocate the results and one workspace for all temporary tensors, and call the compiled kernels on
addresses in them.

A function that does anything but allocate, view and launch is never replayed.
"""

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo_core.ops.watched import thread

MOST_BYTES = 2**28
"""The largest inputs and the largest workspace that are replayed. Larger calls do not wait for the
host, and the workspace would waste memory: it holds all temporary tensors at once."""
MOST_FORMS = 512
"""How many forms of a function are kept; then all are forgotten."""
ALIGNED = 16
"""All addresses must be multiples of this number of bytes: compiled kernels rely on it."""
APART = 512
"""The alignment of tensors in a workspace, in bytes: that of torch's allocator."""

aten = torch.ops.aten
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


class Call(NamedTuple):
    """A launch of a compiled kernel."""

    kernel: Any
    """Triton's `CompiledKernel`."""
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    """All arguments and constants; None for those in `places`."""
    places: tuple[tuple[int, int, int, Any], ...]
    """For each tensor: the index of the argument, the index of the buffer (first inputs, then the
    workspace, then results), the offset in it in bytes, and Triton's descriptor if the argument is
    one."""


class Recording(NamedTuple):
    """All launches and results of a call."""

    calls: tuple[Call, ...]
    workspace: int
    """Its size in bytes."""
    results: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None, ...]
    """The shape, the strides and the dtype of each tensor that is returned; None for None."""
    kind: type
    """What is returned: a tensor, a tuple or a list."""
    kept: tuple[Tensor, ...]
    """Tensors that live outside of the call, such as tables; kernels have their addresses."""


_SEEN, _PLAIN = object(), object()
"""In place of a recording: the form was seen once; the form cannot be replayed."""


def replayed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what `run` does, and replays forms that it has seen before.

    Args:
        run: launches kernels by `launch`, passes them addresses only as tensors or descriptors, and
            reads no values of tensors on a GPU. It returns a tensor, or a tuple or list of tensors
            and None. It does not change its arguments, which are tensors, None, lists of both, or
            hashable.
    """
    known: dict[Any, Any] = {}

    def call(*inputs: Any) -> Any:
        tensors: list[Tensor] = []
        form = _form(inputs, tensors)
        stream = None if thread.recorder else _stream(tensors)
        if stream is None:
            return run(*inputs)
        # Tensors that live outside of the call may be ready on this stream only.
        key = stream, form
        found = known.get(key)
        if found is None:
            if len(known) == MOST_FORMS:
                known.clear()
            known[key] = _SEEN
        elif found is _SEEN:
            if not _is_captured():
                result, known[key] = _record(run, inputs, tensors)
                return result
        elif found is not _PLAIN and not (found.kept and _is_captured()):
            return _replay(found, tensors, stream)
        return run(*inputs)

    return call


def _form(inputs: Any, tensors: list[Tensor]) -> tuple[Any, ...]:
    """Return the form of a call, and append its tensors to `tensors`."""
    form: list[Any] = []
    for x in inputs:
        if isinstance(x, Tensor):
            tensors.append(x)
            form.append((x.dtype, x.get_device(), x.shape, x.stride()))
        elif type(x) is list:
            form.append(_form(x, tensors))
        else:
            form.append(x)
    return tuple(form)


def _stream(tensors: list[Tensor]) -> int | None:
    """Return the stream on which a call can be replayed, or None if it cannot.

    It can if all tensors are on the current GPU and aligned, and nobody watches launches.
    """
    if not tensors or not tensors[0].is_cuda:
        return None
    from mezzo_core.ops.launch import is_direct

    device = torch.cuda.current_device()
    for x in tensors:
        if x.get_device() != device or x.data_ptr() % ALIGNED:
            return None
    return torch._C._cuda_getCurrentRawStream(device) if is_direct() else None


def _is_captured() -> bool:
    """Tell whether a CUDA graph is captured here.

    It would contain a recorder's copies of the inputs, and may outlive the tensors that a recording
    keeps.
    """
    return torch.cuda.is_current_stream_capturing()


def _replay(recording: Recording, tensors: list[Tensor], stream: int) -> Any:
    """Run a recording on other tensors."""
    from mezzo_core.ops.launch import call_kernel

    calls, size, results, kind, _ = recording
    device = tensors[0].device
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    made = [
        None if each is None else torch.empty_strided(*each[:2], dtype=each[2], device=device)
        for each in results
    ]
    starts = [0 if x is None else x.data_ptr() for x in (*tensors, workspace, *made)]
    for kernel, grid, given, places in calls:
        arguments = [*given]
        for i, buffer, offset, described in places:
            place = starts[buffer] + offset
            arguments[i] = place if described is None else _at_base(described, _Base(place))
        call_kernel(kernel, grid, stream, arguments)
    return made[0] if kind is Tensor else kind(made)


class _Base:
    """Stands for the tensor of a descriptor; a launch reads only its address."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def _at_base(descriptor: Any, base: _Base | None) -> Any:
    """Return a copy of a descriptor with another base; None if that is not known yet."""
    found = copy(descriptor)
    found.base = base
    return found


def _record(
    run: Callable[..., Any], inputs: tuple[Any, ...], tensors: list[Tensor]
) -> tuple[Any, Any]:
    """Run a function, and return its result and the recording, or _PLAIN."""
    try:
        if sum(x.nbytes for x in tensors) <= MOST_BYTES:
            return _watch(run, inputs, tensors)
    except torch.OutOfMemoryError:  # the copies need more memory
        pass
    return run(*inputs), _PLAIN


def _watch(
    run: Callable[..., Any], inputs: tuple[Any, ...], tensors: list[Tensor]
) -> tuple[Any, Any]:
    # Inputs may share memory, but copies do not: an address tells which input it belongs to.
    apart = [_copy(x) for x in tensors]
    recorder, there = Recorder(apart), iter(apart)
    thread.recorder = recorder
    try:
        with recorder:
            result = run(*(_replace(x, there) for x in inputs))
    finally:
        thread.recorder = None
    return result, recorder.recording(result) or _PLAIN


def _copy(x: Tensor) -> Tensor:
    """Return a copy in memory of its own, with the same strides, which may overlap."""
    if x.numel() == 0:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((span,), (1,)).clone().as_strided(x.shape, x.stride())


def _replace(x: Any, by: Any) -> Any:
    if isinstance(x, Tensor):
        return next(by)
    return [_replace(part, by) for part in x] if type(x) is list else x


class Recorder(TorchDispatchMode):
    """Records a function's allocations, and the launches that `launch` tells it of."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self._inputs = inputs
        self._made: list[Tensor] = []
        self._launches: list[tuple[Any, tuple[int, ...], list[Any]]] = []
        self.can_repeat = True
        """Becomes False once the function does anything else."""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of the function, and note whether it allocates or only views."""
        result = op(*args, **(kwargs or {}))
        if op in ALLOCATIONS:
            self._made.append(result)
        elif not op.is_view:
            self.can_repeat = False
        return result

    def add(self, kernel: Any, grid: tuple[int, ...], arguments: list[Any]) -> None:
        """Note a launch."""
        self._launches.append((kernel, grid, arguments))

    def recording(self, result: Any) -> Recording | None:
        """Return the recording of a call that returned `result`; None if it cannot be replayed."""
        kind = Tensor if isinstance(result, Tensor) else type(result)
        if not self.can_repeat or kind not in (Tensor, tuple, list):
            return None
        wanted = [result] if kind is Tensor else [*result]
        made = {_start(x): x for x in self._made if x.numel()}
        results = [x for x in wanted if x is not None]
        # No two results may share memory, and each must fill its own.
        whole = {_start(x) for x in results if x.numel()}
        if len(whole) != sum(x.numel() > 0 for x in results) or not whole <= made.keys():
            return None
        if any(x.numel() and _span(x) != x.untyped_storage().nbytes() for x in results):
            return None
        inputs, n = self._inputs, len(self._inputs)
        places = {_start(x): (i, x.data_ptr()) for i, x in enumerate(inputs) if x.numel()}
        size = 0
        for start, x in made.items():
            if start not in whole:
                places[start] = (n, start - size)
                size += -(-x.untyped_storage().nbytes() // APART) * APART
        for i, x in enumerate(wanted):
            if x is not None and x.numel():
                places[_start(x)] = (n + 1 + i, x.data_ptr())
        if size > MOST_BYTES:
            return None
        kept: list[Tensor] = []
        calls = [_call(*each, places, kept) for each in self._launches]
        return Recording(
            tuple(calls),
            size,
            tuple(None if x is None else (tuple(x.shape), x.stride(), x.dtype) for x in wanted),
            kind,
            tuple(kept),
        )


def _call(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: list[Any],
    places: dict[int, tuple[int, int]],
    kept: list[Tensor],
) -> Call:
    """Return a launch with the places of its tensors; append tensors from outside to `kept`."""
    given, found = [*arguments], []
    for i, argument in enumerate(arguments):
        described = None if isinstance(argument, Tensor) else argument
        x = argument if described is None else getattr(argument, "base", None)
        if x is None:
            continue
        place = places.get(_start(x)) if x.numel() else None
        if place is not None:  # keep no tensor here, as its memory would live as long as the form
            described = None if described is None else _at_base(described, None)
            found.append((i, place[0], x.data_ptr() - place[1], described))
            given[i] = None
        else:
            kept.extend([x] if x.numel() else [])
            given[i] = x.data_ptr() if described is None else described
    return Call(kernel, grid, tuple(given), tuple(found))


def _start(x: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return x.untyped_storage().data_ptr()


def _span(x: Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    steps = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return (1 + steps) * x.element_size()
