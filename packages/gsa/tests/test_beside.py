"""Ops and layers beside fla's: what is measured."""

import sys
from itertools import product
from types import ModuleType

import pytest
import torch
from mezzo_core.reproduction.result_file import FAILED
from mezzo_gsa.ops import chunk_gla, chunk_gsa
from mezzo_gsa.reproduction import fla
from mezzo_gsa.reproduction.fla import Shapes
from mezzo_gsa.reproduction.speed import FULL, SPEEDS, ops

CPU = torch.device("cpu")
TINY = Shapes(((2, 24), (1, 48)), 2, 8, 4, 0.0)


class StandIn(torch.nn.Module):
    """A layer with the signature of fla's."""

    def __init__(self, hidden_size, num_heads, layer_idx, num_slots=None):
        super().__init__()
        self.proj = torch.nn.Linear(hidden_size, hidden_size)

    def forward(self, x):
        return self.proj(x), None, None


def fla_gsa(q, k, v, s, g, *, scale, checkpoint_level):
    return chunk_gsa(q, k, v, g, s, scale=scale).out, None


@pytest.fixture
def stand_in(monkeypatch):
    """A library in fla's place, with its ops and layers under its names."""
    parts = {
        "fla": {"__version__": "0.6.0"},
        "fla.ops": {},
        "fla.ops.gsa": {"chunk_gsa": fla_gsa},
        "fla.ops.gla": {"chunk_gla": chunk_gla},
        "fla.layers": {"GatedSlotAttention": StandIn, "GatedLinearAttention": StandIn},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fla, "runs_on", lambda device: device == "cuda")


def measured():
    """Measure all of a GPU's rows on a CPU; return the entries, and the rows of each job."""
    jobs = fla.jobs(TINY, "cuda")
    entries = [e for job in jobs for each in job.measure(None, CPU) for e in each]
    return entries, [cell.model for job in jobs for cell in job.cells]


@pytest.mark.usefixtures("stand_in")
def test_fla_is_measured_in_the_same_run():
    entries, every = measured()
    rows = [entry.model for entry in entries]
    assert rows == every
    assert FAILED not in {entry.value for entry in entries}
    for kind, phase in product(
        ("gsa op", "gla op", "gsa layer", "gla layer"), ("forward", "train")
    ):
        assert {f"{kind} {phase} ({impl})" for impl in ("triton", "fla 0.6.0")} <= {*rows}


@pytest.mark.usefixtures("stand_in")
def test_an_fla_that_fails_says_why_and_leaves_our_rows(monkeypatch):
    for name in ("gsa", "gla"):
        monkeypatch.setattr(sys.modules[f"fla.ops.{name}"], f"chunk_{name}", None)
    monkeypatch.setitem(sys.modules, "fla.layers", None)
    entries, every = measured()
    assert [entry.model for entry in entries] == every
    for entry in entries:
        assert (entry.value == FAILED) == ("fla" in entry.model)
    why = {e.model: e.details["error"] for e in entries if e.value == FAILED}
    assert why["gsa op forward (fla 0.6.0)"].startswith("failed: TypeError: ")
    assert why["gla layer train (fla 0.6.0)"].startswith("failed: ModuleNotFoundError: ")


def test_without_fla_the_rows_are_ours(monkeypatch):
    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: None)
    assert not any("fla" in cell.model for job in fla.jobs(TINY, "cuda") for cell in job.cells)


def test_the_readme_has_its_columns():
    columns = {cell.column for job in ops(FULL)[1] for cell in job.cells}
    assert {"B8 T2048 H4 K512 V512 M64", "B1 T16384 H4 K512 V512 M64"} <= columns
    assert {"B8 T2048 C2048 M64", "B8 T2048 C2048"} <= columns


@pytest.mark.gpu
def test_a_gpu_measures_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr(fla, "runs_on", lambda device: False)
    SPEEDS.bench(torch.device("cuda"), quick=True, out=tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == len(SPEEDS.makers)
