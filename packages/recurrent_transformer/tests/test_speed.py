"""The speeds, rehearsed on a CPU: what is written, kept, left out and refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.papers.measurement import How, read_result
from mezzo_core.testing.scripts import run_script
from mezzo_recurrent_transformer import RecurrentBlock, RecurrentBlockConfig, speed
from mezzo_recurrent_transformer.claims import ANSWERS, REPRODUCTION
from mezzo_recurrent_transformer.schedule import tiled_forward
from mezzo_recurrent_transformer.speed import DRY, LAYERS, MEASURERS, MODELS, NAIVE, OP

SCRIPT = Path(__file__).parents[1] / "experiments/speed.py"


def quiet(line):
    pass


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """A dry run of everything."""
    folder = tmp_path_factory.mktemp("results") / "cpu"
    assert run_script(SCRIPT, "--dry-run", "--out", str(folder)) == 0
    return {name: read_result(folder / f"speed_{name}.json") for name in MEASURERS}


def test_a_rehearsal_measures_every_cell_three_times(rehearsal):
    models = {**LAYERS, "throughput": tuple(MODELS), "decoding": tuple(MODELS)}
    for name, ours in rehearsal.items():
        assert tuple(model for _, model in ours.rows) == models[name]
        assert ours.how is How.SCALED_DOWN
        for model in models[name]:
            for column in ours.columns:
                passes = ours.by_seed(model, column)
                assert list(passes) == [0, 1, 2]
                assert min(passes.values()) > 0


def test_batches_and_lengths_are_as_the_columns_say(rehearsal):
    assert all(e.column == f"B={e.details['B']}" for e in rehearsal["graphs"].entries)
    assert {e.details["B"] for e in rehearsal["length"].entries} == {DRY.batch}
    assert rehearsal["length"].columns == tuple(map(str, DRY.lengths))


@pytest.mark.parametrize("id", ["throughput", "claim.throughput_12", "claim.throughput_6"])
def test_the_claims_read_the_names_that_are_written(rehearsal, id):
    (answer,) = (each for each in ANSWERS if each.id == f"rt.{id}")
    printed = REPRODUCTION.published.by_id[answer.id]
    summary = answer.evidence[0].criterion(printed, rehearsal["throughput"]).summary
    assert "not measured" not in summary
    assert "of 3 neighbours" in summary or "at tokens/s" in summary


def test_the_naive_loop_is_left_out_where_it_would_take_minutes(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "check_layer", lambda layer: None)
    sizes = replace(DRY, naive=4, models=(NAIVE,))
    assert {e.column for e in MEASURERS["length"](sizes, tmp_path, quiet).entries} == {"4"}


def test_a_second_run_measures_only_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "check_layer", lambda layer: None)
    lines = []
    sizes = replace(DRY, batches=(1,))
    for models in ((OP,), (OP, "Transformer"), (OP, "Transformer")):
        MEASURERS["graphs"](replace(sizes, models=models), tmp_path, lines.append)
    assert [line.split(",")[0] for line in lines] == [
        f"speed_graphs: {OP}",
        "speed_graphs: Transformer",
    ]


def test_a_file_without_any_wanted_model_is_no_measurement(tmp_path):
    assert MEASURERS["graphs"](replace(DRY, models=(NAIVE,)), tmp_path, quiet) is None


def test_a_layer_that_decodes_wrongly_is_not_timed(tmp_path, monkeypatch):
    right = RecurrentBlock.step
    monkeypatch.setattr(RecurrentBlock, "step", lambda self, x, state: 1.1 * right(self, x, state))
    with pytest.raises(UserError, match="RecurrentBlock: the output in decoding is wrong"):
        MEASURERS["graphs"](DRY, tmp_path, quiet)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("persistent_norm", [True, False])
@pytest.mark.parametrize("T", [0, 1, 7, 32])
def test_what_is_timed_is_the_layer(persistent_norm, T):
    torch.manual_seed(0)
    config = RecurrentBlockConfig(4, persistent_norm=persistent_norm, residual_scale=0.5)
    block = config.build(12).double()
    x = torch.randn(3, T, 12, dtype=torch.float64)
    z, _ = block(x)
    torch.testing.assert_close(tiled_forward(block, x), z)
    torch.testing.assert_close(speed.by_definition(block, x), z)


@pytest.mark.gpu
def test_all_speeds_run_on_a_gpu(tmp_path):
    small = replace(DRY, device="cuda", d_model=128, head_dim=64)
    for measurer in MEASURERS.values():
        ours = measurer(small, tmp_path, quiet)
        assert all(entry.value == "OOM" or entry.value > 0 for entry in ours.entries)
