"""Compile kernels for a GPU that is not here: the interpreter runs what no compiler would take."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def compile_only(capability: int = 90) -> Iterator[list[str]]:
    """Compile each Triton kernel that is launched, for an NVIDIA GPU, and run none of them.

    The launches' tensors may be on a CPU, and what they should have written is not. It must be
    entered where TRITON_INTERPRET is not set (a process of its own).

    Args:
        capability: compute capability times ten; 90 is Hopper.

    Yields:
        The names of the kernels, one for each compilation, as they come.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    compiled: list[str] = []

    def compile_it(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *arguments, grid=grid, warmup=True, **options)

    run, hook = jit.JITFunction.run, knobs.runtime.jit_cache_hook
    driver.set_active(_AbsentGPU(GPUTarget("cuda", capability, 32)))
    jit.JITFunction.run = compile_it
    knobs.runtime.jit_cache_hook = lambda **call: compiled.append(call["fn"].name)
    try:
        yield compiled
    finally:
        jit.JITFunction.run, knobs.runtime.jit_cache_hook = run, hook
        driver.set_active(None)  # Triton looks for a GPU when it next needs one


class _AbsentGPU:
    """What Triton asks of a driver before it launches."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
