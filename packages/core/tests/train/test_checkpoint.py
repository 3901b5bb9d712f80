"""Checkpoints: complete or not there, whatever happens while they are written."""

import errno
import json
import os
import pickle

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.train.checkpoint import Checkpoints
from mezzo_core.train.distributed import World
from mezzo_core.train.loop import train
from mezzo_core.train.optim import build_optimizer


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path, World(torch.device("cpu")), keep=2)


@pytest.fixture
def trained(tiny):
    """A model and its optimizer after one step, so that no moment is zero."""

    def build(seed):
        torch.manual_seed(seed)
        config = tiny()
        model = config.model.build()
        optimizer = build_optimizer(model, config.optim)
        tokens = torch.randint(257, (2, 16))
        model.loss(tokens, tokens).backward()
        optimizer.step()
        return model, optimizer

    return build


def test_what_is_saved_is_what_is_loaded(checkpoints, trained):
    model, optimizer = trained(0)
    checkpoints.save(7, model, optimizer, {"place": 3})
    other, other_optimizer = trained(1)
    resumed = checkpoints.load(other, other_optimizer)
    assert resumed == (7, {"place": 3})
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key in ("exp_avg", "exp_avg_sq"):
            saved = optimizer.state[mine][key]
            assert saved.abs().sum() > 0
            assert torch.equal(saved, other_optimizer.state[theirs][key])
        assert other_optimizer.state[theirs]["step"] == 7


def test_only_the_newest_stay(checkpoints, trained):
    model, optimizer = trained(0)
    for step in (9, 10, 11):
        checkpoints.save(step, model, optimizer, {})
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-10", "step-11"]
    assert checkpoints.newest().name == "step-11"


@pytest.mark.parametrize("damage", ["shorten", "remove", "no marker", "half a marker"])
def test_a_damaged_checkpoint_is_passed_over(checkpoints, trained, damage):
    model, optimizer = trained(0)
    checkpoints.save(1, model, optimizer, {})
    checkpoints.save(2, model, optimizer, {})
    newest = checkpoints.folder / "step-2"
    shard = newest / "state" / "__0_0.distcp"
    marker = newest / "checkpoint.json"
    if damage == "shorten":
        os.truncate(shard, shard.stat().st_size - 1)
    elif damage == "remove":
        shard.unlink()
    elif damage == "no marker":
        marker.unlink()
    else:
        marker.write_text(marker.read_text()[:20])
    assert checkpoints.load(model, optimizer).step == 1


@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(
    checkpoints, trained, monkeypatch, failing
):
    model, optimizer = trained(0)
    checkpoints.save(1, model, optimizer, {})

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        with pytest.raises(UserError, match="No space left on device") as error:
            checkpoints.save(2, model, optimizer, {})
    assert "\n" not in str(error.value)
    assert str(checkpoints.folder / "step-1") in str(error.value)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-1"]
    assert checkpoints.load(model, optimizer).step == 1


def test_a_full_disk_in_a_run_names_the_checkpoint(tiny, tmp_path, monkeypatch):
    real = os.fsync

    def full(descriptor):
        if (tmp_path / "checkpoints" / "step-2").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"No space left.*the last checkpoint is .*step-2"):
        train(tiny(), tmp_path, quiet=True)


def test_an_index_that_runs_code_is_refused(checkpoints, trained, tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "attacked"),)

    model, optimizer = trained(0)
    checkpoints.save(1, model, optimizer, {})
    folder = checkpoints.folder / "step-1"
    index = folder / "state" / ".metadata"
    index.write_bytes(pickle.dumps(Attack()))
    marker = json.loads((folder / "checkpoint.json").read_text())
    marker["files"]["state/.metadata"] = index.stat().st_size
    (folder / "checkpoint.json").write_text(json.dumps(marker))
    with pytest.raises(UserError, match="mkdir"):
        checkpoints.load(model, optimizer)
    assert not (tmp_path / "attacked").exists()


def test_a_checkpoint_of_another_shape_is_one_line(checkpoints, trained):
    checkpoints.save(1, *trained(0), {})
    narrow = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(narrow.parameters())
    with pytest.raises(UserError, match="cannot resume from") as error:
        checkpoints.load(narrow, optimizer)
    assert "\n" not in str(error.value)
