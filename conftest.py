"""Settings of every test: without a GPU, kernels run in Triton's interpreter; cores are shared."""

import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from mezzo_core.testing.interpreter import repair_interpreter, speed_up_interpreter
from mezzo_core.testing.poison import poison_memory as poison_memory

# What is imported stays: nothing looks for garbage until tests run, nor after each compilation.
gc.disable()
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

# Workers inherit the folder of tokens; the process that made it removes it.
OWN_TOKENS = None if "MEZZO_TOKENS" in os.environ else tempfile.mkdtemp(prefix="mezzo-tests-")
if OWN_TOKENS:
    os.environ["MEZZO_TOKENS"] = OWN_TOKENS

# Triton reads this when a kernel is defined, so it is set before any test is collected.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    repair_interpreter()
    speed_up_interpreter()

# Tests of ops run with every shape in a public signature checked; see tests/test_shape_types.py.
if find_spec("jaxtyping") and find_spec("beartype"):
    import jaxtyping

    SOURCES = Path(__file__).parent.glob("packages/*/src/mezzo_*/ops/*")
    APIS = [
        ".".join(path.relative_to(path.parents[3]).with_suffix("").parts)
        for folder in SOURCES
        for path in (folder / "api.py", folder / "step.py")
        if path.exists()
    ]
    jaxtyping.install_import_hook(APIS, "beartype.beartype")

    def pytest_runtest_setup(item: pytest.Item) -> None:
        """Check shapes in this test, or not."""
        checked = item.path.parent.name == "ops" and not item.get_closest_marker("any_shapes")
        jaxtyping.config.update("jaxtyping_disable", not checked)


@pytest.fixture(autouse=True)
def _run_ops_in_poisoned_memory(request: pytest.FixtureRequest) -> None:
    """Unwritten memory shows as NaN in every test of an op."""
    if request.path.parent.name == "ops":
        request.getfixturevalue("poison_memory")


# The same examples in every run; `pytest --hypothesis-profile=thorough` draws many, and new ones.
# A test that is slow takes a part of `settings().max_examples`, so that it draws more then too.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=5000)
settings.load_profile("steady")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be missing
def pytest_xdist_auto_num_workers() -> int:
    """Start a worker for each core: each one more imports all libraries and collects all tests."""
    return os.cpu_count() or 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Sequence[object]) -> None:
    """Let workers share the cores, with the processes that their tests start.

    They inherit this: torch and numpy read it at their import, and a plugin imports numpy before a
    worker reads this file. More threads than cores would wait for each other in every product of
    the interpreter.
    """
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(specs)))
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the inductor starts no pool of processes


def pytest_collection_finish() -> None:
    """Do less between tests, and search for garbage only among what they make, and seldom."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(100_000)
    # Before each test, pytest listens to each logger that keeps its records to itself: torch has
    # forty. While anybody listens to torch.__trace, torch.compile writes down every graph for it.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
    if log := sys.modules.get("mezzo_core.train.log"):
        DRAWN.append(log.draw_losses)
        log.draw_losses = lambda *_: None


DRAWN: list[Callable[..., None]] = []


@pytest.fixture
def losses_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the losses of runs, which takes longer than the runs: other tests do not look at it."""
    monkeypatch.setattr("mezzo_core.train.log.draw_losses", DRAWN[0])


def pytest_report_header() -> str:
    """Say with what the tests run: the versions differ between environments."""
    names = [name for name in ("torch", "triton", "numpy") if find_spec(name)]
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


def pytest_unconfigure() -> None:
    """Remove the tokens."""
    if OWN_TOKENS:
        shutil.rmtree(OWN_TOKENS, ignore_errors=True)
