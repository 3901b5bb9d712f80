"""A run that is killed goes on as if nothing had happened."""

import json
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.train.loop import train


def losses(rows):
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_kill_at_any_change_of_the_folder_costs_nothing(tiny, tmp_path, start_child, rows_of):
    config = tiny(steps=4, eval_every=4)
    # Every third: a save has each kind of event more than once, and there are two saves.
    child = start_child("die_at", config, tmp_path, 3)
    ended = json.loads(child.communicate(timeout=280)[0])
    events = ended.pop("0")["events"]
    assert events > 40
    assert list(ended) == [str(moment) for moment in range(2, events + 1, 3)]

    expected = losses(rows_of(tmp_path / "0"))
    assert len(expected) == 4
    weights = load_model(tmp_path / "0" / "model")[0].state_dict()
    for moment, end in ended.items():
        out = tmp_path / moment
        assert end["signal"] == signal.SIGKILL
        assert end["again"] == 0, f"resuming failed after event {moment}"
        assert losses(rows_of(out)) == expected, f"killed at event {moment}"
        assert len(rows_of(out, "val_loss")) == 1
        resumed = load_model(out / "model")[0].state_dict()
        assert all(torch.equal(resumed[name], value) for name, value in weights.items())
        assert not list(out.glob("checkpoints/.*"))
        assert [path.name for path in out.glob(".*")] == [".mezzo.lock"]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 6])
def test_a_run_stopped_after_any_step_gives_the_same_bits(
    tiny, tmp_path, rows_of, train_until, step
):
    whole = train(tiny(), tmp_path / "whole", quiet=True)
    train_until(tiny(), tmp_path / "stopped", step)
    resumed = train(tiny(), tmp_path / "stopped", quiet=True)
    assert losses(rows_of(tmp_path / "stopped")) == losses(rows_of(tmp_path / "whole"))
    assert resumed.val_loss == whole.val_loss
    assert resumed.final_loss == whole.final_loss


def test_a_finished_run_is_not_trained_again(tiny, tmp_path, rows_of):
    first = train(tiny(), tmp_path, quiet=True)
    shutil.rmtree(tmp_path / "model")
    calls = []
    again = train(tiny(), tmp_path, quiet=True, on_step=calls.append)
    assert calls == []
    assert (again.final_loss, again.val_loss) == (first.final_loss, first.val_loss)
    assert load_model(tmp_path / "model")[2]["step"] == 6


def test_a_run_can_be_extended(tiny, tmp_path, rows_of):
    train(tiny(), tmp_path, quiet=True)
    result = train(tiny(steps=9), tmp_path, quiet=True)
    assert result.steps == 9
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 10))
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 9


def test_random_numbers_go_on_where_they_stopped(tiny, tmp_path, train_until):
    drawn = []

    def draw(row):
        drawn.append((row["step"], torch.rand(()).item()))

    train(tiny(), tmp_path / "whole", quiet=True, on_step=draw)
    whole = list(drawn)
    train_until(tiny(), tmp_path / "stopped", 4, on_step=draw)
    drawn.clear()
    train(tiny(), tmp_path / "stopped", quiet=True, on_step=draw)
    assert drawn == whole[2:]  # from the checkpoint of step 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed is 0 there, 1 here"),
        ({"seq_len": 16}, "seq_len is 32 there, 16 here"),
        ({"batch_size": 8}, "batch_size is 4 there, 8 here"),
    ],
)
def test_another_configuration_is_refused_in_one_line(tiny, tmp_path, changes, named):
    train(tiny(steps=2), tmp_path, quiet=True)
    with pytest.raises(UserError, match=named) as error:
        train(tiny(**changes), tmp_path, quiet=True)
    assert "\n" not in str(error.value)


def test_another_model_is_refused_and_its_field_named(tiny, tmp_path):
    config = tiny(steps=2)
    train(config, tmp_path, quiet=True)
    wider = replace(config, model=replace(config.model, d_model=64))
    with pytest.raises(UserError, match=r"model\.d_model is 32 there, 64 here"):
        train(wider, tmp_path, quiet=True)
    deeper = replace(config, model=replace(config.model, mixers=config.model.mixers * 2))
    with pytest.raises(UserError, match=r"model\.mixers has 2 items there, 4 here"):
        train(deeper, tmp_path, quiet=True)


def test_without_resuming_the_old_run_is_removed(tiny, tmp_path, rows_of):
    train(tiny(), tmp_path, quiet=True)
    train(tiny(seed=5, steps=3), tmp_path, quiet=True, resume=False)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.glob("checkpoints/*")) == ["step-2", "step-3"]


def test_a_folder_that_cannot_be_made_is_one_clear_line(tiny, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"file/run cannot be written: .*/file is no folder"):
        train(tiny(), tmp_path / "file" / "run", quiet=True)
