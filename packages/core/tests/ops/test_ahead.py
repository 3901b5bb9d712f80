"""Kernels are compiled ahead once for each key, while other threads launch as usual."""

from functools import partial
from threading import Thread
from unittest.mock import Mock

import pytest
from mezzo_core.ops.ahead import compile_ahead

jit = pytest.importorskip("triton.runtime.jit")
pytestmark = pytest.mark.skipif(
    not hasattr(jit, "_async_compile"), reason="this Triton compiles in one thread"
)


@pytest.fixture
def launch(monkeypatch):
    """Return a function that launches a kernel, and a list: whether each launch only compiled."""
    told, kernel = [], Mock(device_caches={})
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *, grid, warmup: told.append(warmup))
    return lambda: jit.JITFunction.run(kernel, grid=(1,), warmup=False), told


def test_what_is_launched_ahead_is_compiled_only_and_once(launch):
    run, told = launch
    key = object()

    def work():
        run()
        other = Thread(target=run)
        other.start()
        other.join()
        compile_ahead(object(), run)  # nested in this work, so it does nothing

    compile_ahead(key, work)
    assert told == [True, False]
    compile_ahead(key, work)
    run()
    assert told == [True, False, False]


def test_what_fails_ahead_fails_where_it_is_launched(launch):
    run, told = launch

    def work():
        run()
        raise RuntimeError("no such kernel")

    compile_ahead(object(), work)
    run()
    assert told == [True, False]


def test_what_fails_ahead_for_a_passing_reason_is_compiled_anew(monkeypatch):
    kernels = {}
    function = Mock(device_caches={0: (kernels, "others")})
    mode = jit._async_compile.active_mode
    compiling = {"no room": Mock(side_effect=OSError), "works": Mock(return_value="compiled")}

    def launch(self, *, grid, warmup):
        for key, compile_it in compiling.items():
            finish = partial(kernels.__setitem__, key)
            kernels[key] = mode.get().submit(key, compile_it, finish)

    monkeypatch.setattr(jit.JITFunction, "run", launch)
    compile_ahead(object(), lambda: jit.JITFunction.run(function, grid=(1,), warmup=False))
    assert kernels == {"works": "compiled"}


def test_after_an_interruption_later_kernels_are_compiled_as_usual(launch):
    run, told = launch
    mode = jit._async_compile.active_mode

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_ahead(object(), lambda: mode.get().submit("key", interrupted, print))
    assert mode.get() is None
    run()
    assert told == [False]
