"""Launches Triton kernels with less work on the host.

At each launch Triton formats all constants and options as a string to look up the compiled kernel,
calls the hooks of profilers, and asks the driver about the address of each tensor. Here the key is
a tuple, in which Triton's own function describes the arguments. If there are no hooks, the compiled
kernel is called directly, with addresses in place of tensors.
"""

from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from mezzo_core.ops.watched import thread

try:
    from triton.runtime.jit import native_specialize_impl as kind_of
except ImportError:  # before Triton 3.6
    kind_of = None

KNOWN = ("3.6.", "3.7.", "3.8.")
"""The versions of Triton whose compiled kernels take the arguments that `launch` passes."""

_is_known = kind_of is not None and triton.__version__.startswith(KNOWN)
# None if somebody has replaced Triton's function already, as one that only compiles does.
_run = JITFunction.run if JITFunction.run.__qualname__ == "JITFunction.run" else None
_compiled: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Do what `kernel[grid](*arguments, **constants)` does, in less time.

    Args:
        kernel: from `triton.jit`.
        grid: one to three numbers of programs.
        arguments: the first arguments of the kernel. Tensors must be on the current device; only
            the first launch checks it.
        constants: all its constants, Triton's options, such as num_warps, and further arguments.
    """
    if not (is_direct() and _is_plain(kernel)):
        _by_triton(kernel, grid, arguments, constants)
        return
    if names := _named(kernel, len(arguments), *constants):
        arguments += tuple([constants.pop(name) for name in names])
    device = driver.active.get_current_device()
    key = _key(kernel, device, arguments, constants)
    found = _compiled.get(key)
    if found is None:
        compiled = _by_triton(kernel, grid, arguments, constants)
        if type(compiled) is CompiledKernel and _are_apart(kernel, len(arguments), constants):
            order = [each.name for each in kernel.params[len(arguments) :]]
            _compiled[key] = compiled, tuple([constants[name] for name in order])
        return
    compiled, values = found
    size = (*grid, 1, 1)[:3]
    if thread.recorder is not None:
        thread.recorder.add(compiled, size, [*arguments, *values])
    places = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    call_kernel(compiled, size, current_stream(device), [*places, *values])


def _by_triton(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> Any:
    """Let Triton launch a kernel; such a launch cannot be replayed."""
    if thread.recorder is not None:
        thread.recorder.can_repeat = False
    try:
        return kernel[grid](*arguments, **constants)
    except OutOfResources:
        if constants.get("num_stages") == 1:
            raise
    # Stages are chosen for GPUs with much shared memory. With one, most kernels need half of it.
    return kernel[grid](*arguments, **{**constants, "num_stages": 1})


def current_stream(device: int) -> int:
    """Return the current stream of a device."""
    return driver.active.get_current_stream(device)


def call_kernel(
    compiled: CompiledKernel, size: tuple[int, ...], stream: int, arguments: Sequence[Any]
) -> None:
    """Launch a compiled kernel on addresses and numbers, followed by its constants."""
    no_hooks = None, None, None
    compiled.run(*size, stream, compiled.function, compiled.packed_metadata, *no_hooks, *arguments)


def is_direct() -> bool:
    """Tell whether compiled kernels may be called directly: nobody watches the launches."""
    if not _is_known or JITFunction.run is not _run:
        return False
    runtime = knobs.runtime
    return not (
        runtime.launch_enter_hook.calls
        or runtime.launch_exit_hook.calls
        or runtime.debug
        or getattr(runtime, "add_stages_inspection_hook", None)
        or knobs.compilation.instrumentation_mode
    )


def _is_plain(kernel: Any) -> bool:
    """Tell whether a launch only calls the compiled kernel: no interpreter, no hooks."""
    if type(kernel) is not JITFunction or kernel.pre_run_hooks:
        return False
    # Triton raises an error if a global that the kernel uses has changed: let it.
    uses = kernel.used_global_vals.items()
    return not any(module.get(name) != value for (name, _), (value, module) in uses)


@cache
def _named(kernel: JITFunction, num_arguments: int, *names: str) -> tuple[str, ...]:
    """Return those of the names that are the kernel's next arguments and no constants, in order."""
    rest = kernel.params[num_arguments:]
    following = takewhile(lambda each: not each.is_constexpr and each.name in names, rest)
    return tuple(each.name for each in following)


def _key(
    kernel: JITFunction, device: int, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[Any, ...]:
    """Return a key that determines the compiled kernel."""
    backend = kernel.device_caches[device][3]
    # As if all arguments were specialized, so several keys may lead to one compiled kernel.
    kinds = tuple([kind_of(backend, x, False, True, True) for x in arguments])
    return kernel.fn, device, kinds, tuple(constants), tuple(constants.values())


def _are_apart(kernel: JITFunction, num_arguments: int, constants: dict[str, Any]) -> bool:
    """Tell whether all constants are given by name, and come after the arguments."""
    first, rest = kernel.params[:num_arguments], kernel.params[num_arguments:]
    if any(each.is_constexpr for each in first):
        return False
    return all(each.is_constexpr and each.name in constants for each in rest)
