"""The benchmark measures what it says, and refuses to time what is wrong."""

import json
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.papers import load_bench
from mezzo_gsa import bench
from mezzo_gsa.bench import benchmark, fla, layers, models, ops, run
from mezzo_gsa.gsa import GSA
from mezzo_gsa.ops.gla import chunk_gla
from mezzo_gsa.ops.gsa import chunk_gsa
from mezzo_gsa.recipes import recipe

CPU = torch.device("cpu")
TINY = benchmark.Shapes(((2, 24), (1, 48)), 2, 8, 8, (4, 2), (1, 8), 8, 0.0)
HERE = benchmark.Benchmark(TINY, CPU)


def test_ops_are_timed_at_every_shape_and_number_of_slots():
    rows = [*ops.gsa_rows(HERE), *ops.gla_rows(HERE), *ops.attention_rows(HERE)]
    seen = {(row.name, row.shape["B"], row.shape["T"], row.shape.get("M")) for row in rows}
    for phase in ("forward", "train"):
        assert {(f"gsa op {phase}", 2, 24, M) for M in TINY.slots} <= seen
        for B, T in TINY.batches:
            assert {(f"gsa op {phase}", B, T, 4), (f"gla op {phase}", B, T, None)} <= seen
            assert (f"attention op {phase}", B, T, None) in seen
    kept = {row.name for row in rows if "kept" in row.impl}
    assert kept == {"gsa op train"}
    for row in rows:
        assert 0 < row.timing.ms_p20 <= row.timing.ms <= row.timing.ms_p80


def test_layers_are_timed_whole_and_step_by_step():
    rows = [*layers.layer_rows(HERE), *layers.decode_rows(HERE)]
    names = {f"{name} layer" for name in ("gsa", "gla", "attention")}
    assert {row.name for row in rows} == {
        f"{name} {phase}" for name in names for phase in ("forward", "train", "decode")
    }
    assert {row.shape["T"] for row in rows if row.name.endswith("decode")} == {1}


def test_whole_models_are_timed_by_their_recipes_names():
    names = [row.name for row in models.model_rows(HERE)]
    assert {"tiny_gsa model train", "tiny_attention model train"} < set(names)


def test_rows_can_be_read_back_by_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "QUICK", TINY)
    path = tmp_path / "machine" / "bench.jsonl"
    rows = bench.bench(CPU, quick=True, out=path, parts=("attention",), commit="c1")
    assert load_bench(tmp_path) == json.loads(json.dumps(rows))
    assert {row["commit"] for row in rows} == {"c1"}
    assert len(capsys.readouterr().out.splitlines()) == len(rows) == 4


def test_an_unknown_part_is_refused_by_name():
    with pytest.raises(UserError, match=r"no part is named 'lair'.*layer"):
        bench.bench(CPU, quick=True, parts=("lair",))


@pytest.mark.parametrize("name", ["out", "g"])
def test_a_wrong_op_is_not_timed(monkeypatch, name):
    def wrong(q, k, v, g, **options):
        if name == "g":
            g = g.detach() + 0.99 * (g - g.detach())
        found = chunk_gsa(q, k, v, g, **options)
        return found if name == "g" else found._replace(out=1.01 * found.out)

    monkeypatch.setattr(ops, "chunk_gsa", wrong)
    with pytest.raises(UserError, match=f"chunk_gsa is wrong here \\({name}: .*no speed"):
        list(ops.gsa_rows(HERE))


def test_a_layer_that_decodes_wrongly_is_not_timed(monkeypatch):
    right = GSA.step
    monkeypatch.setattr(GSA, "step", lambda self, x, state: 1.1 * right(self, x, state))
    with pytest.raises(UserError, match="GSA: the output in decoding is wrong"):
        list(layers.decode_rows(HERE))


def test_training_computes_the_gradient_of_every_input_and_a_forward_none():
    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return x * w

        @staticmethod
        def backward(ctx, dout):
            needed.append(ctx.needs_input_grad)
            return dout, dout

    needed = []
    inputs = {"x": torch.randn(3), "w": torch.nn.Parameter(torch.randn(3))}
    contender = benchmark.Contender("an op", "ours", {}, lambda x, w: Watched.apply(x, w), inputs)
    (row,) = benchmark.timed(HERE, replace(contender, phases=("forward",)))
    assert row.name == "an op forward"
    assert not needed
    assert [row.name for row in benchmark.timed(HERE, contender)][1] == "an op train"
    assert set(needed) == {(True, True)}


def test_what_does_not_fit_is_said_and_the_rest_is_timed():
    def run(x):
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError
        return 2 * x

    said = []
    contender = benchmark.Contender("an op", "ours", {"B": 1}, run, {"x": torch.randn(3)})
    rows = list(benchmark.timed(replace(HERE, say=said.append), contender))
    assert [row.name for row in rows] == ["an op forward"]
    assert said == ["an op train (ours) at {'B': 1}: out of memory"]


def test_another_librarys_op_is_timed_only_if_it_computes_the_same():
    def broken(x):
        raise RuntimeError("it does not compile")

    said, x = [], torch.randn(3)
    here = replace(HERE, say=said.append)
    for op, expected in ((lambda x: 2 * x, 2), (lambda x: 3 * x, 0), (broken, 0)):
        contender = benchmark.Contender("gsa op", "fla", {}, op, {"x": x})
        assert len(list(ops._peer_rows(here, contender, 2 * x))) == expected
    assert len(said) == 2
    assert "AssertionError" in said[0]
    assert "it does not compile" in said[1]


def test_fla_is_not_needed_and_its_faults_do_not_stop_the_benchmark(monkeypatch):
    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: None)
    assert not replace(HERE, device=torch.device("cuda"), with_fla=True).has_fla
    said = []
    with fla.excused("its layer", said.append):
        raise ImportError("no transformers")
    assert said == ["fla: its layer is not measured: ImportError: no transformers"]


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
    monkeypatch.setattr(benchmark.Benchmark, "has_fla", True)


@pytest.mark.usefixtures("stand_in")
def test_fla_is_measured_in_the_same_run():
    said = []
    here = replace(HERE, say=said.append)
    makers = (ops.gsa_rows, ops.gla_rows, layers.layer_rows, layers.decode_rows)
    rows = {(row.name, row.impl) for make in makers for row in make(here)}
    phases = ("forward", "train")
    fla = "fla 0.6.0"
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
    fla.replace_mixers(model, 128, 2, 16)
    tokens = torch.randint(257, (1, 8))
    model.loss(tokens, tokens).backward()
    for block in model.stack.blocks:
        assert isinstance(block.mixer.layer, StandIn)
        assert block.mixer.layer.proj.weight.grad is not None


@pytest.mark.gpu
def test_a_gpu_measures_every_part(tmp_path):
    parts = tuple(part for part in bench.PARTS if part != "fla")
    rows = bench.bench(torch.device("cuda"), True, tmp_path / "gpu/bench.jsonl", parts=parts)
    assert {row["impl"] for row in rows} >= {"triton", "triton, eager", "flash", "cudnn"}
    assert all(row["peak_gb"] > 0 for row in rows)
