"""Launches Triton kernels with less work on the host.

At each launch Triton writes all constants and options as a text, by which it looks up the compiled
kernel, it calls the hooks of profilers, and it asks the driver about the address of each tensor.
Here a tuple is the key, which Triton's own function makes of the arguments. Without hooks, the
compiled kernel is called directly, with addresses, which Triton takes as they are.
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
from triton.runtime.jit import JITFunction

from mezzo_core.ops.watched import thread

try:
    from triton.runtime.jit import native_specialize_impl as kind_of
except ImportError:  # before Triton 3.6
    kind_of = None

KNOWN = ("3.6.", "3.7.", "3.8.")
"""The versions of Triton that call a compiled kernel as `launch` does."""

_is_known = kind_of is not None and triton.__version__.startswith(KNOWN)
# If another function is in its place already, such as one that only compiles, none is called.
_run = JITFunction.run if JITFunction.run.__qualname__ == "JITFunction.run" else None
_compiled: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Do what `kernel[grid](*arguments, **constants)` does, in less time.

    Args:
        kernel: from `triton.jit`.
        grid: one to three numbers of programs.
        arguments: the first arguments of the kernel. Its tensors must be on the current device:
            what lies elsewhere is found out in the first launch alone.
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
    """Let Triton launch a kernel, which is never repeated."""
    if thread.recorder is not None:
        thread.recorder.can_repeat = False
    return kernel[grid](*arguments, **constants)


def current_stream(device: int) -> int:
    """Return the stream of a device on which kernels are to run now."""
    return driver.active.get_current_stream(device)


def call_kernel(
    compiled: CompiledKernel, size: tuple[int, ...], stream: int, arguments: Sequence[Any]
) -> None:
    """Launch a compiled kernel; its arguments are addresses and numbers, and then its constants."""
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
    """Tell whether nothing but the compiled kernel has to be called: no interpreter, no hooks."""
    if type(kernel) is not JITFunction or kernel.pre_run_hooks:
        return False
    # As Triton does, which raises an error if the module's value is another one by now.
    uses = kernel.used_global_vals.items()
    return not any(module.get(name) != value for (name, _), (value, module) in uses)


@cache
def _named(kernel: JITFunction, num_arguments: int, *names: str) -> tuple[str, ...]:
    """Return which of the names in a launch are those of the next arguments, in their order."""
    rest = kernel.params[num_arguments:]
    following = takewhile(lambda each: not each.is_constexpr and each.name in names, rest)
    return tuple(each.name for each in following)


def _key(
    kernel: JITFunction, device: int, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[Any, ...]:
    """Return what decides which compiled kernel a launch takes."""
    backend = kernel.device_caches[device][3]
    # As if the kernel specialized all arguments: two keys may have the same compiled kernel.
    kinds = tuple([kind_of(backend, x, False, True, True) for x in arguments])
    return kernel.fn, device, kinds, tuple(constants), tuple(constants.values())


def _are_apart(kernel: JITFunction, num_arguments: int, constants: dict[str, Any]) -> bool:
    """Tell whether the constants, all given by name, come after the arguments."""
    first, rest = kernel.params[:num_arguments], kernel.params[num_arguments:]
    if any(each.is_constexpr for each in first):
        return False
    return all(each.is_constexpr and each.name in constants for each in rest)
