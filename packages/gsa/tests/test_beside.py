"""Ops and layers beside fla's: what is measured."""

import sys
from types import ModuleType

import pytest
import torch
from mezzo_core.reproduction.runner import names_of
from mezzo_gsa.ops.gla import chunk_gla
from mezzo_gsa.ops.gsa import chunk_gsa
from mezzo_gsa.recipes import recipe
from mezzo_gsa.reproduction import beside, fla
from mezzo_gsa.reproduction.beside import Shapes
from mezzo_gsa.reproduction.speed import FULL, SPEEDS, ops

CPU = torch.device("cpu")
TINY = Shapes(((2, 24), (1, 48)), ((3, 16), 4, 4), 2, 8, (4, 2), 8, 0.0)


class StandIn(torch.nn.Module):
    """A layer with the signature of fla's."""

    def __init__(self, hidden_size, num_heads, layer_idx, num_slots=None):
        super().__init__()
        self.proj = torch.nn.Linear(hidden_size, hidden_size)

    def forward(self, x, past_key_values=None, use_cache=False):
        return self.proj(x), None, past_key_values


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
        "fla.models": {},
        "fla.models.utils": {"Cache": dict},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fla, "runs_on", lambda device: device == "cuda")


def measured():
    """Measure all of a GPU's rows on a CPU; return them, and those of each job."""
    jobs = beside.jobs(TINY, "cuda")
    rows = [e.model for job in jobs for each in job.work(job.cells, None, CPU) for e in each]
    return rows, [cell.model for job in jobs for cell in job.cells]


@pytest.mark.usefixtures("stand_in")
def test_fla_is_measured_in_the_same_run(capsys):
    rows, every = measured()
    assert rows == every
    assert not capsys.readouterr().out
    phases, theirs = ("forward", "train"), "fla 0.6.0"
    for kind in ("gsa op", "gla op", "gsa layer", "gla layer"):
        assert {f"{kind} {phase} ({impl})" for phase in phases for impl in ("triton", theirs)} <= {
            *rows
        }
    assert {"gsa op train (triton, states kept)", f"gsa op train ({theirs}, states kept)"} <= {
        *rows
    }
    for impl in ("triton", theirs, f"{theirs}, in a graph"):
        assert {f"gsa layer decode ({impl})", f"gla layer decode ({impl})"} <= {*rows}


@pytest.mark.usefixtures("stand_in")
def test_an_fla_that_fails_leaves_our_rows(monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["fla.ops.gsa"], "chunk_gsa", None)
    for name in ("fla.ops.gla", "fla.layers"):
        monkeypatch.setitem(sys.modules, name, None)
    rows, every = measured()
    assert rows == [row for row in every if "fla" not in row]
    said = capsys.readouterr().out
    assert "gsa op forward (fla 0.6.0): not measured: TypeError" in said
    assert "gla layer train" not in said, "a job is said once"
    assert "gla layer forward (fla 0.6.0): not measured: UserError" in said


def test_without_fla_the_rows_are_ours(monkeypatch):
    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: None)
    assert not any("fla" in cell.model for job in beside.jobs(TINY, "cuda") for cell in job.cells)


def test_ops_are_timed_at_every_shape_and_number_of_slots():
    columns = names_of(ops(FULL)[1])["columns"]
    assert "B8 T2048 H4 K512 V512 M64" in columns
    for M in (32, 128):
        assert f"B8 T2048 H4 K512 V512 M{M}" in columns
    assert "B128 T512 H4 K32 V32 M32" in columns, "narrow heads"
    assert "B4 T16384 H4 K256 V512" in columns
    assert columns[-1] == "B1 T1 C2048"


@pytest.mark.usefixtures("stand_in")
def test_flas_layers_can_take_the_place_of_our_mixers():
    model = recipe("tiny", "gsa").model.build()
    fla.replace_mixers(model)
    tokens = torch.randint(257, (1, 8))
    model.loss(tokens, tokens).backward()
    for block in model.stack.blocks:
        assert isinstance(block.mixer.layer, StandIn)
        assert block.mixer.layer.proj.weight.grad is not None


@pytest.mark.gpu
def test_a_gpu_measures_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr(fla, "runs_on", lambda device: False)
    SPEEDS.bench(torch.device("cuda"), quick=True, out=tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == len(SPEEDS.makers)
