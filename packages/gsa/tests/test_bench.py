"""The benchmark measures what it says, and refuses to time what is wrong."""

import json
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from mezzo_core.bench import Contender, Layer
from mezzo_core.errors import FailedRunError
from mezzo_gsa import bench
from mezzo_gsa.bench import fla, layers, ops
from mezzo_gsa.bench.setting import Setting, Shapes
from mezzo_gsa.gsa import GSA
from mezzo_gsa.ops.gla import chunk_gla
from mezzo_gsa.ops.gsa import chunk_gsa
from mezzo_gsa.recipes import recipe

CPU = torch.device("cpu")
TINY = Shapes(((2, 24), (1, 48)), ((3, 16), 4, 4), 2, 8, 8, (4, 2), (1, 8), 8, 0.0)
HERE = Setting(TINY, CPU)


def test_ops_are_timed_at_every_shape_and_number_of_slots():
    rows = [*ops.gsa_rows(HERE), *ops.gla_rows(HERE), *ops.attention_rows(HERE)]
    seen = {(row.name, row.shape["B"], row.shape["T"], row.shape.get("M")) for row in rows}
    for phase in ("forward", "train"):
        assert {(f"gsa op {phase}", 2, 24, M) for M in TINY.slots} <= seen
        assert (f"gsa op {phase}", 3, 16, 4) in seen
        for B, T in TINY.batches:
            assert {(f"gsa op {phase}", B, T, 4), (f"gla op {phase}", B, T, None)} <= seen
            assert (f"attention op {phase}", B, T, None) in seen
    assert {row.name for row in rows if "kept" in row.impl} == {"gsa op train"}
    assert {row.impl for row in rows if "gsa" in row.name} >= {
        "reference, steep",
        "reference, by chunks",
        "reference, by tokens",
    }


def test_steep_gates_are_steep_in_one_slot_of_each_head(monkeypatch):
    seen = []
    monkeypatch.setattr(Setting, "time", lambda self, contender: seen.append(contender) or [])
    list(ops.gsa_rows(HERE))
    gates = {contender.impl: contender.inputs["g"].amax((0, 1, 2)) for contender in seen}
    assert gates["reference, steep"][0] < -2
    assert gates["reference, steep"][1:].min() > -2
    assert gates["reference"].min() > -2


def test_a_bench_has_ops_layers_steps_and_models_as_rows_of_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "QUICK", TINY)
    path = tmp_path / "machine" / "bench.jsonl"
    rows = bench.bench(CPU, quick=True, out=path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == json.loads(
        json.dumps(rows)
    )
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    names = {row["name"] for row in rows}
    kinds = ("gsa", "gla", "attention")
    phases = ("forward", "train", "decode")
    assert {f"{kind} layer {phase}" for kind in kinds for phase in phases} <= names
    assert {"gsa op train", "tiny_gsa model train", "tiny_attention model train"} <= names
    assert {row["shape"]["T"] for row in rows if row["name"].endswith("decode")} == {1}
    assert {row["kind"] for row in rows} == {"op", "layer", "model"}


@pytest.mark.parametrize("name", ["out", "g"])
def test_a_wrong_op_is_not_timed(monkeypatch, name):
    def wrong(q, k, v, g, **options):
        if name == "g":
            g = g.detach() + 0.99 * (g - g.detach())
        found = chunk_gsa(q, k, v, g, **options)
        return found if name == "g" else found._replace(out=1.01 * found.out)

    monkeypatch.setattr(ops, "chunk_gsa", wrong)
    with pytest.raises(FailedRunError, match=f"chunk_gsa is wrong here \\({name}: .*no speed"):
        list(ops.gsa_rows(HERE))


def test_a_layer_that_decodes_wrongly_is_not_timed(monkeypatch):
    right = GSA.step
    monkeypatch.setattr(GSA, "step", lambda self, x, state: 1.1 * right(self, x, state))
    with pytest.raises(FailedRunError, match="GSA: the output in decoding is wrong"):
        list(layers.decode_rows(HERE))


def test_a_layer_that_does_not_fit_is_said_and_the_rest_is_timed(monkeypatch):
    right, said = Layer.forward, []

    def full(layer, x):
        if torch.is_grad_enabled() and x.shape[1] == 48:
            raise torch.OutOfMemoryError
        return right(layer, x)

    monkeypatch.setattr(Layer, "forward", full)
    rows = list(layers.layer_rows(replace(HERE, say=said.append)))
    assert len(rows) == 3 * 3
    assert said[0] == (
        "gsa layer train (reference) at {'B': 1, 'T': 48, 'C': 16, 'M': 4}: out of memory"
    )


def test_another_librarys_op_is_timed_only_if_it_computes_the_same():
    def broken(x):
        raise RuntimeError("it does not compile")

    said, x = [], torch.randn(3)
    here = replace(HERE, say=said.append)
    for op, expected in ((lambda x: 2 * x, 2), (lambda x: 3 * x, 0), (broken, 0)):
        contender = Contender("gsa op", "fla", {}, op, {"x": x})
        assert len(list(ops.peer_rows(here, contender, 2 * x))) == expected
    assert len(said) == 2
    assert "AssertionError" in said[0]
    assert "it does not compile" in said[1]


def test_fla_is_not_needed(monkeypatch):
    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: None)
    assert not replace(HERE, device=torch.device("cuda")).has_fla


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
    monkeypatch.setattr(Setting, "has_fla", True)


@pytest.mark.usefixtures("stand_in")
def test_fla_is_measured_in_the_same_run():
    said = []
    here = replace(HERE, say=said.append)
    makers = (ops.gsa_rows, ops.gla_rows, layers.layer_rows, layers.decode_rows)
    rows = {(row.name, row.impl) for make in makers for row in make(here)}
    phases, fla = ("forward", "train"), "fla 0.6.0"
    theirs = {(f"{kind} {phase}", fla) for kind in ("gsa op", "gla op") for phase in phases}
    theirs |= {(f"{name} layer {phase}", fla) for name in ("gsa", "gla") for phase in phases}
    theirs |= {(f"{name} layer decode", f"{fla}, in a graph") for name in ("gsa", "gla")}
    theirs |= {("gsa op train", f"{fla}, states kept"), ("gsa layer decode", fla)}
    assert theirs <= rows
    assert not said


@pytest.mark.usefixtures("stand_in")
def test_an_fla_that_cannot_be_imported_leaves_our_rows(monkeypatch):
    for name in ("fla.ops.gsa", "fla.ops.gla", "fla.layers"):
        monkeypatch.setitem(sys.modules, name, None)
    said = []
    here = replace(HERE, say=said.append)
    makers = (ops.gsa_rows, ops.gla_rows, layers.layer_rows, layers.decode_rows)
    rows = [row for make in makers for row in make(here)]
    assert rows
    assert not any("fla" in row.impl for row in rows)
    assert {line.split(":")[1] for line in said} == {
        f" its {part} is not measured" for part in ("GSA op", "GLA op")
    } | {f" its {part} is not measured" for part in ("layers", "layers' steps")}


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
    monkeypatch.setattr(Setting, "has_fla", False)
    rows = bench.bench(torch.device("cuda"), True, tmp_path / "gpu/bench.jsonl")
    assert {row["impl"] for row in rows} >= {"triton", "triton, eager", "flash", "cudnn"}
    assert all(row["peak_gb"] > 0 for row in rows)
