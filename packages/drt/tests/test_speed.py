"""The speeds, rehearsed on a CPU: what is written, kept, left out and refused."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.bench.generation import fill
from mezzo_core.bench.training_step import training_step
from mezzo_core.errors import FailedRunError
from mezzo_core.papers.measurement import How, read_result
from mezzo_core.testing.scripts import run_script
from mezzo_drt import bench, inference, speed
from mezzo_drt.claims import ANSWERS, REPRODUCTION
from mezzo_drt.recipes import RECIPES, tiny
from mezzo_drt.speed import (
    BASE,
    BLOCK_RECURRENT,
    CAN_OFFLOAD,
    DECODING,
    DRT1,
    DRT2,
    DRY,
    GROWING,
    LANDMARK,
    MEASURERS,
    OFFLOADED,
    PAPER,
    PLAIN,
    READING,
    TRAINING,
    WINDOW,
    Cell,
    model_config,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

SCRIPT = Path(__file__).parents[1] / "experiments/speed.py"


def run(folder, *words):
    return run_script(SCRIPT, "--dry-run", "--out", str(folder), *words)


def quiet(line):
    pass


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """A dry run of everything."""
    folder = tmp_path_factory.mktemp("results") / "cpu"
    assert run(folder) == 0
    return {name: read_result(folder / f"{name}.json") for name in MEASURERS}


def test_a_rehearsal_measures_every_cell(rehearsal):
    """Three times, but for the long texts."""
    models = {
        "inference": DECODING,
        "length": GROWING,
        "training_speed": TRAINING,
        "reading": READING,
    }
    for name, ours in rehearsal.items():
        assert {model for _, model in ours.rows} == set(models[name])
        assert ours.how is How.SCALED_DOWN
        for group, model in ours.rows:
            for column in ours.columns:
                passes = ours.by_seed(model, column, group)
                left_out = column in OFFLOADED[True] and model not in CAN_OFFLOAD
                expected = range(0 if left_out else 1 if name == "reading" else 3)
                assert list(passes) == list(expected)
                assert all(value > 0 for value in passes.values())


def test_the_state_is_what_a_prompt_leaves(rehearsal):
    ours = rehearsal["inference"]
    memory = OFFLOADED[False][1]
    for group, model in ours.rows:
        lm = model_config(model, tiny()).build()
        room = DRY.prompts[group] + 2 * 16 + 2 + 3 * DRY.new_tokens
        told = (lm.state_bytes(room) + lm.host_state_bytes(room)) / 1e9
        assert ours.by_seed(model, memory, group)[0] == pytest.approx(told, rel=0.1)
    longer = [ours.typical(DRT1, memory, group) for group in DRY.prompts]
    assert longer[0] < longer[1]
    # On a CPU both sides are one: offload has what is fetched besides.
    for group in DRY.prompts:
        assert ours.typical(DRT1, OFFLOADED[True][1], group) > ours.typical(DRT1, memory, group)


def test_a_text_is_read_whole():
    lm = model_config(DRT1, tiny()).build().eval()
    for T in DRY.texts:
        places = inference.read(lm, T, DRY.segment).num_places
        assert places.tolist() == [T + T // tiny().drt.chunk_size]  # with landmarks
    assert PAPER.texts[-1] == 2**24
    assert PAPER.segment % speed.SIZES[PAPER.size]().drt.chunk_size == 0


def test_a_sequences_time_is_its_share_of_the_step(rehearsal):
    for entry in rehearsal["length"].entries:
        B, T = entry.details["B"], int(entry.column)
        assert DRY.tokens == B * T
        assert entry.value * entry.details["tokens_per_second"] == pytest.approx(1e3 * T, rel=1e-3)


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("table3", f"{DRT1} over BaseLM, prompts of 48K"),
        ("table4.throughput", "of 10 neighbours"),
        ("claim.brt_time", "not measured"),  # at 16,384 tokens
        ("claim.train_time_linear", "not measured"),
        ("claim.multiple_retrievals", "at 350M, 32K"),
    ],
)
def test_the_claims_read_the_names_that_are_written(rehearsal, id, words):
    (answer,) = (each for each in ANSWERS if each.id == f"drt.{id}")
    printed = REPRODUCTION.published.by_id[answer.id]
    found = [
        each.criterion(printed, ours)
        for each in answer.evidence
        if (ours := each.find(SimpleNamespace(results={}, measured=rehearsal.get), printed))
    ]
    assert len(found) == 1
    assert words in found[0].summary


def test_a_full_run_has_the_lengths_that_the_claims_read():
    assert {"4096", "16384", "65536"} <= set(map(str, PAPER.lengths))
    table = REPRODUCTION.published.table("drt.table4.throughput")
    assert tuple(PAPER.trained) == table.columns
    printed = REPRODUCTION.published.table("drt.table3")
    assert sum(OFFLOADED.values(), ()) == printed.columns[2:]
    assert {str(row.values[0]) for row in printed.rows} == set(PAPER.prompts)
    for name, s in PAPER.trained.items():
        with torch.device("meta"):
            weights = model_config(WINDOW, s).build().num_parameters()
        size, length = name.split(", ")
        factor = {"M": 1e6, "B": 1e9}[size[-1]]
        assert weights == pytest.approx(float(size[:-1]) * factor, rel=0.05)
        assert s.seq_len == int(length[:-1]) * 1024


def test_models_are_those_of_the_recipes():
    s = speed.SIZES["128m_pg19"]()
    for model, recipe in ((PLAIN, "base"), (BASE, "base"), (DRT1, "drt1"), (DRT2, "drt2")):
        assert model_config(model, s) == RECIPES[f"128m_pg19_{recipe}"]().model
    assert model_config(BLOCK_RECURRENT, s) == speed.block_recurrent_lm(speed.ModelSize())
    assert model_config(LANDMARK, s) == speed.landmark_lm(speed.ModelSize())


def test_files_and_models_are_measured_alone_and_once(tmp_path, capsys):
    words = ("--models", "length", DRT1)
    assert run(tmp_path, *words) == 0
    assert run(tmp_path, *words, BASE) == 0
    lines = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    lengths = len(DRY.lengths)
    assert lines == [f"length: {DRT1}"] * lengths + [f"length: {BASE}"] * lengths
    assert [path.name for path in tmp_path.glob("*.json")] == ["length.json"]


@pytest.mark.parametrize("name", MEASURERS)
def test_an_op_that_is_wrong_has_no_speed(name, tmp_path, monkeypatch):
    right = bench.grouped_cross_attention
    monkeypatch.setattr(bench, "grouped_cross_attention", lambda *a, **o: 1.1 * right(*a, **o))
    with pytest.raises(FailedRunError, match="the output is wrong here"):
        MEASURERS[name](DRY, tmp_path, quiet)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", GROWING)
def test_what_is_compiled_ahead_is_what_the_models_compile(model):
    """The layers of a model of two are, as graphs, those of the whole model."""
    s = replace(tiny(), drt=replace(tiny().drt, num_layers=8))
    cell, found = Cell(model, "", s, 2, 64), []
    for each in (cell, cell.shallow):
        torch._dynamo.reset()
        codes = set()

        def remember(graph, inputs, codes=codes):
            codes.add(graph.code)
            return graph

        torch.manual_seed(0)
        lm = model_config(each.model, each.s).build()
        for unit in lm.units():
            if not isinstance(getattr(unit, "mixer", None), speed.BlockRecurrent):
                unit.compile(dynamic=False, fullgraph=True, backend=remember)
        training_step(lm, each.B, each.T)()
        found.append(codes)
    assert found[0] == found[1]
    assert len(found[0]) == (3 if model in (DRT1, DRT2) else 1)


@pytest.mark.parametrize("model", [BLOCK_RECURRENT, LANDMARK])
def test_a_baseline_decodes_in_a_graph(model, monkeypatch):
    """It looks at no value: fake tensors have none. DRT has a test of its own."""
    lm = model_config(model, tiny()).build().eval()
    with torch.no_grad():
        state = lm.reserve(lm.init_state(1), 1600)
        fill(state, 1500)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        with FakeTensorMode() as mode:
            monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
            lm._apply(mode.from_tensor)
            state = tree_map(mode.from_tensor, state)
            x = torch.empty(1, 1, 64)
            if model == BLOCK_RECURRENT:
                y = lm.stack.step(x, state)
            else:  # without a check of values that is for CPUs
                y, *_ = lm.stack._run(x, state.k, state.v, lm.stack._places(state.seen, 1))
            assert y.shape == x.shape


@pytest.mark.gpu
def test_all_speeds_run_on_a_gpu(tmp_path):
    one = dict(list(DRY.trained.items())[:1])  # each cell is compiled
    sizes = replace(DRY, device="cuda", trained=one, lengths=DRY.lengths[:1])
    for measurer in MEASURERS.values():
        ours = measurer(sizes, tmp_path, quiet)
        wrong = [entry for entry in ours.entries if entry.value != "OOM" and entry.value <= 0]
        assert not wrong
