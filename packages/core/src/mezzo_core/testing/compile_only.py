"""Compiles kernels for a GPU on a machine without one.

This is needed because the interpreter also runs kernels that the compiler would not accept.
"""

import gc
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def compile_only(
    capability: int = 90, *, assembled: bool = False, keys_only: bool = False
) -> Iterator[list[str]]:
    """Compile each launched Triton kernel for an NVIDIA GPU, without running it.

    The arguments may be tensors on a CPU; the kernels' outputs stay unwritten. TRITON_INTERPRET
    must not be set, so tests use this in a process of its own. Garbage stays until the end.

    Args:
        capability: compute capability times ten; 90 is Hopper.
        assembled: whether the assembler makes machine code of the PTX too, as `stack_of` needs.
            False skips it, and LLVM's optimization: both are slow. What is left still refuses
            wrong types, shapes, layouts and instructions, but does not read inline assembly.
        keys_only: compile nothing, as tests do that only ask which launches share a kernel.

    Yields:
        A list, to which the name of the kernel is appended at each compilation, or with `keys_only`
        where there would be one.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    compiled: list[str] = []
    seen: set[tuple[str, Any]] = set()

    def compile_it(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *arguments, grid=grid, warmup=True, **options)

    def note(**call: Any) -> bool:
        """Note a kernel that is in no cache yet; Triton does not compile it if this is True."""
        kernel = call["fn"].name, call["key"]
        if kernel not in seen:
            compiled.append(call["fn"].name)
            seen.add(kernel)
        return keys_only

    run, collecting = jit.JITFunction.run, gc.isenabled()
    gc.disable()  # else all that torch and Triton have made is searched again and again
    driver.set_active(_AbsentGPU(GPUTarget("cuda", capability, 32)))
    try:
        with (
            mock.patch.object(jit.JITFunction, "run", compile_it),
            mock.patch.object(knobs.runtime, "jit_cache_hook", note),
            nullcontext() if assembled else _without_assembler(),
        ):
            yield compiled
    finally:
        if collecting:
            gc.enable()
        driver.set_active(None)  # Triton then looks for a real GPU when it next needs one


@contextmanager
def _without_assembler() -> Iterator[None]:
    from triton.backends.nvidia.compiler import CUDABackend

    def apart(self: Any) -> str:
        """Return another key for Triton's cache: no GPU may get kernels without machine code."""
        return f"{key(self)}, not assembled"

    key = CUDABackend.hash
    with (
        mock.patch.dict(os.environ, DISABLE_LLVM_OPT="1"),
        mock.patch.object(CUDABackend, "make_cubin", return_value=b""),
        mock.patch.object(CUDABackend, "hash", apart),
    ):
        yield


@contextmanager
def keep_kernels() -> Iterator[list[Any]]:
    """Keep all kernels that are launched, in their order, inside `compile_only`."""
    from triton.runtime import jit

    kernels, run = [], jit.JITFunction.run

    def keep(self: Any, *arguments: Any, **options: Any) -> Any:
        kernels.append(run(self, *arguments, **options))
        return kernels[-1]

    with mock.patch.object(jit.JITFunction, "run", keep):
        yield kernels


def stack_of(kernel: Any) -> int:
    """Return the bytes of stack that a thread of an assembled kernel has, for spilled registers."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(told.split("STACK:")[1].split()[0])


def run_compiling(*scripts: str | Path) -> None:
    """Run Python scripts that compile kernels, in forks of a process without the interpreter.

    Raises:
        AssertionError: if one fails, with the end of what they printed.
    """
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__, *map(str, scripts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def compile_apart(compile: Callable[[str], None], names: Sequence[str]) -> None:
    """Call `compile` on each name in a process of its own, forked from this one.

    So each name compiles all that it needs, as if it came first, and libraries are imported once.

    Raises:
        RuntimeError: if one failed, naming it; its process has printed why.
    """
    for module in ("torch._dynamo", "triton.compiler.code_generator"):
        import_module(module)  # else each process would, at its first launch
    _hash_triton()
    for name in names:
        if os.fork() == 0:
            compile(name)
            os._exit(0)
        _, status = os.wait()
        if status != 0:
            raise RuntimeError(f"compiling {name!r} failed")


def _hash_triton() -> None:
    """Let Triton hash all its files, the name under which it caches kernels; it does so once."""
    compiler, cache = map(import_module, ("triton.compiler.compiler", "triton.runtime.cache"))
    (compiler if hasattr(compiler, "triton_key") else cache).triton_key()


class _AbsentGPU:
    """The part of Triton's driver interface that compiling a kernel needs."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _run_script(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    compile_apart(_run_script, sys.argv[1:])
