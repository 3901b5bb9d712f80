"""Kernels are compiled ahead once for each key, while other threads launch as usual."""

from threading import Thread

import pytest
from mezzo_core.ops.ahead import compile_ahead

jit = pytest.importorskip("triton.runtime.jit")
pytestmark = pytest.mark.skipif(
    not hasattr(jit, "_async_compile"), reason="this Triton compiles in one thread"
)


@pytest.fixture
def launch(monkeypatch):
    """Return a function that launches a kernel, and a list: whether each launch only compiled."""
    told = []
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *, grid, warmup: told.append(warmup))
    return lambda: jit.JITFunction.run(None, grid=(1,), warmup=False), told


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
