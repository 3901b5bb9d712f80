"""Compiles all kernels of an op in parallel, which its first call would compile one by one."""

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any

MOST_THREADS = 8
_known: set[Hashable] = set()
_lock = threading.Lock()
_in_work: int | None = None
"""The thread that compiles ahead now, if any."""


def compile_ahead(key: Hashable, launch: Callable[[], object]) -> None:
    """Compile all kernels that `launch` launches, in several threads, without running them.

    Only the first call with a key does so. If this Triton lacks `AsyncCompileMode`, nothing happens
    here, and each kernel is compiled when it is first launched.

    Args:
        key: the device, and all that determines the kernels.
        launch: launches the kernels; it must not read their results, which are uninitialized.
    """
    if key in _known or _in_work == threading.get_ident():
        return
    with _lock:
        if key not in _known:
            _known.add(key)
            # Triton's mode is a variable of the context, and stays set after an interruption (a
            # KeyboardInterrupt): then each later kernel would be given to threads that have ended.
            copy_context().run(_compile, launch)


def _compile(launch: Callable[[], object]) -> None:
    import triton

    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        return
    pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
    # A kernel that fails to compile here is compiled again where it is launched, or fails there.
    with suppress(Exception), pool, _without_launching(), mode(pool, ignore_errors=True):
        launch()


@contextmanager
def _without_launching() -> Iterator[None]:
    """Let launches of this thread only compile; other threads launch as usual."""
    global _in_work
    from triton.runtime.jit import JITFunction

    run, here = JITFunction.run, threading.get_ident()
    compiled: set[Any] = set()

    def compile_here(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        only = warmup or threading.get_ident() == here
        if only:
            compiled.add(self)
        return run(self, *arguments, grid=grid, warmup=only, **options)

    JITFunction.run, _in_work = compile_here, here
    try:
        yield
    finally:
        JITFunction.run, _in_work = run, None
        _forget_failed(compiled)


def _forget_failed(functions: set[Any]) -> None:
    """Remove kernels that failed from Triton's caches, which would keep the error for ever.

    The reason may have passed by the launch, as a full disk does.
    """
    from triton.runtime._async_compile import FutureKernel

    for function in functions:
        for kernels, *_ in function.device_caches.values():
            for key, kernel in list(kernels.items()):
                if isinstance(kernel, FutureKernel):  # what compiled has been replaced
                    del kernels[key]
