"""On Hopper, Triton must not assemble with a ptxas that drops registers."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.ops.ptxas import require_ptxas

triton = pytest.importorskip("triton")


@pytest.fixture
def knobs(monkeypatch):
    """Pretend to be on a Hopper, with the tools that Triton 3.6 brings."""
    tools = SimpleNamespace(
        ptxas=SimpleNamespace(path="old", version="12.8"),
        ptxas_blackwell=SimpleNamespace(path="new", version="12.9"),
    )
    monkeypatch.setattr(triton.knobs, "nvidia", tools)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    return tools


def test_hopper_gets_the_newer_of_the_two(knobs):
    require_ptxas()
    assert knobs.ptxas == "new"


def test_another_gpu_and_a_right_ptxas_are_left_alone(knobs, monkeypatch):
    knobs.ptxas.version = "13.0"
    require_ptxas()
    knobs.ptxas.version = "12.8"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    require_ptxas()
    assert knobs.ptxas.path == "old"


def test_what_the_user_chose_is_kept_or_refused(knobs, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", "old")
    with pytest.raises(RuntimeError, match=r"ptxas 12\.8 \(old\).*set TRITON_PTXAS_PATH"):
        require_ptxas()


def test_two_old_ones_are_refused(knobs):
    knobs.ptxas_blackwell.version = "12.8"
    with pytest.raises(RuntimeError, match="compiles kernels wrong"):
        require_ptxas()


def test_results_tell_the_ptxas_with_which_their_process_began(knobs, request):
    """By torch.compile, Triton uses torch's own from then on."""
    origin = import_module("mezzo_core.reproduction.origin")
    origin._ptxas.cache_clear()
    request.addfinalizer(origin._ptxas.cache_clear)
    assert origin._ptxas() == "12.8, 12.9"
    knobs.ptxas.version = "13.0"
    assert origin._ptxas() == "12.8, 12.9"
