"""Checkpoints on a full disk, under interruptions, and among other people's files."""

import errno
import os
import pathlib
import shutil

import pytest
from mezzo_core.errors import UserError
from mezzo_core.train.loop import train


@pytest.fixture
def trained(small):
    return small()


class WatchedFile:
    """A file that reports before each write and flush."""

    def __init__(self, file, report):
        self.file = file
        self.report = report

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def fileno(self):
        return self.file.fileno()

    def write(self, data):
        self.report("write")
        return self.file.write(data)

    def flush(self):
        self.report("flush")
        self.file.flush()


@pytest.fixture
def watch_disk(monkeypatch):
    """Call `report` with the name of each action that needs the disk, before it is done."""

    def watch(report):
        def first_report(owner, name):
            real = getattr(owner, name)

            def watched(*arguments, **keywords):
                report(name)
                return real(*arguments, **keywords)

            monkeypatch.setattr(owner, name, watched)

        real_open = pathlib.Path.open

        def watched_open(path, mode="r", *arguments, **keywords):
            if mode[0] in "wax":
                report("open")
                return WatchedFile(real_open(path, mode, *arguments, **keywords), report)
            return real_open(path, mode, *arguments, **keywords)

        monkeypatch.setattr(pathlib.Path, "open", watched_open)
        for name in ("mkdir", "rename", "replace"):
            first_report(pathlib.Path, name)
        first_report(os, "fsync")

    yield watch
    monkeypatch.undo()


class Failing:
    """Counts what is reported, and raises at the chosen one, or from it on."""

    def __init__(self):
        self.seen = []
        self.rest(None)

    def rest(self, at, error=None, *, for_good=False):
        self.seen.clear()
        self.at, self.error, self.for_good = at, error, for_good

    def __call__(self, name):
        self.seen.append(name)
        count = len(self.seen)
        if self.at is not None and (count == self.at or (count > self.at and self.for_good)):
            raise self.error


def test_a_disk_that_fills_at_any_moment_is_one_line_and_costs_nothing(
    checkpoints, trained, watch_disk
):
    failing = Failing()
    watch_disk(failing)
    checkpoints.save(1, *trained, {})
    actions = len(failing.seen)
    assert {"write", "flush", "fsync", "open", "mkdir", "rename", "replace"} <= set(failing.seen)
    last = []
    for action in range(1, actions + 1):
        failing.rest(action, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), for_good=True)
        with pytest.raises(UserError) as error:
            checkpoints.save(2, *trained, {})
        failing.rest(None)
        newest = checkpoints.newest()
        assert str(error.value) == (
            f"cannot save the checkpoint of step 2 in {checkpoints.folder} (No space left on "
            f"device); the last checkpoint is {newest}"
        ), action
        last.append(newest.name)
        assert {path.name for path in checkpoints.folder.iterdir()} == {"step-1", newest.name}
        assert checkpoints.load(*trained).step == int(newest.name[-1])
    # Only when the finished folder's own name is put on disk is the new checkpoint there.
    assert last == ["step-1"] * (actions - 2) + ["step-2"] * 2


def test_an_interruption_at_any_moment_leaves_no_half_of_a_checkpoint(
    checkpoints, trained, watch_disk
):
    failing = Failing()
    watch_disk(failing)
    checkpoints.save(1, *trained, {})
    for action in range(1, len(failing.seen) + 1):
        failing.rest(action, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, *trained, {})
        failing.rest(None)
        newest = checkpoints.newest()
        names = {path.name for path in checkpoints.folder.iterdir()}
        assert names == {"step-1", newest.name}, action
        assert checkpoints.load(*trained).step == int(newest.name[-1])


def test_a_full_disk_in_a_run_names_the_checkpoint(tiny, tmp_path, monkeypatch):
    real = os.fsync

    def full(descriptor):
        if (tmp_path / "checkpoints" / "step-2").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"No space left.*the last checkpoint is .*step-2"):
        train(tiny(), tmp_path, quiet=True)


def test_what_a_killed_save_left_is_removed_and_nothing_else(checkpoints, trained, tmp_path):
    outside = tmp_path / "outside"
    (outside / "state").mkdir(parents=True)
    (outside / "state" / "process-0.safetensors").write_text("not ours")
    folder = checkpoints.folder
    leftover = folder / ".step-1.0123456789abcdef"
    (leftover / "state").mkdir(parents=True)
    (leftover / "state" / "linked").symlink_to(outside)
    foreign = ["step-2.tmp", ".step-2", ".step-2.0123", ".step-2.0123456789abcdeg", "step-02", "x"]
    for name in foreign:
        (folder / name).mkdir()
        (folder / name / "notes").write_text("not ours")
    (folder / ".step-2.fedcba9876543210").symlink_to(outside)
    for step in (1, 2, 3):
        checkpoints.save(step, *trained, {})
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*foreign, ".step-2.fedcba9876543210", "step-2", "step-3"]
    )
    assert all((folder / name / "notes").read_text() == "not ours" for name in foreign)
    assert (outside / "state" / "process-0.safetensors").read_text() == "not ours"


def test_links_in_the_place_of_a_checkpoint_go_and_what_they_lead_to_stays(
    checkpoints, trained, tmp_path
):
    checkpoints.save(1, *trained, {})
    outside = tmp_path / "outside"
    (checkpoints.folder / "step-1").rename(outside)
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    for step in (1, 2, 5):
        (checkpoints.folder / f"step-{step}").symlink_to(outside)
    assert checkpoints.load(*trained).step == 1  # a link may be read; the others name another step
    for step in (2, 3):
        checkpoints.save(step, *trained, {})
    assert {p.name for p in checkpoints.folder.iterdir()} == {"step-2", "step-3", "step-5"}
    assert not (checkpoints.folder / "step-2").is_symlink()
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("fate", ["removed", "renamed", "moved away"])
@pytest.mark.parametrize("taken", [False, True])
def test_a_run_whose_folder_is_gone_stops_and_leaves_a_new_one_alone(tiny, tmp_path, fate, taken):
    out, there = tmp_path / "run", tmp_path / ("other" if fate == "renamed" else "far/other")
    (tmp_path / "far").mkdir()

    def lose(row):
        if row["step"] == 3:
            if fate == "removed":
                shutil.rmtree(out)
            else:
                out.rename(there)
            if taken:
                out.mkdir()
                (out / "config.json").write_text("of another run")

    with pytest.raises(UserError, match=rf"{out} was removed or renamed") as stop:
        train(tiny(), out, quiet=True, on_step=lose)
    newest = there / "checkpoints" / "step-2"
    told = f"the last checkpoint is {newest}" if fate == "renamed" else "not beside its old name"
    assert told in str(stop.value)
    assert "\n" not in str(stop.value)
    assert newest.exists() or fate == "removed"
    assert [path.name for path in out.rglob("*")] == ["config.json"] * taken


def test_a_save_into_an_emptied_folder_stops(checkpoints, trained, tmp_path):
    checkpoints.save(1, *trained, {})
    shutil.rmtree(checkpoints.folder)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"lost its config\.json .*; there is no checkpoint yet$"):
        checkpoints.save(2, *trained, {})
    assert not any(tmp_path.iterdir())


def test_a_file_may_be_a_link_which_is_read_and_never_written(checkpoints, trained, tmp_path):
    checkpoints.save(1, *trained, {})
    shard = checkpoints.folder / "step-1" / "state" / "process-0.safetensors"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    content = shard.read_bytes()
    assert checkpoints.load(*trained).step == 1
    for step in (1, 2, 3):
        checkpoints.save(step, *trained, {})
    assert (tmp_path / "elsewhere").read_bytes() == content


def test_somebodys_folder_in_the_place_of_a_checkpoint_is_left_alone(checkpoints, trained):
    for step in (1, 4):
        (checkpoints.folder / f"step-{step}").mkdir(parents=True)
        (checkpoints.folder / f"step-{step}" / "notes").write_text("not ours")
    with pytest.raises(UserError, match="step-4 is there and is no checkpoint"):
        checkpoints.save(4, *trained, {})
    for step in (5, 6, 7):
        checkpoints.save(step, *trained, {})
    names = sorted(path.name for path in checkpoints.folder.iterdir())
    assert names == ["step-1", "step-4", "step-6", "step-7"]
    assert (checkpoints.folder / "step-4" / "notes").read_text() == "not ours"


def test_a_damaged_checkpoint_gives_way_when_its_step_is_done_again(checkpoints, trained):
    for step in (1, 2):
        checkpoints.save(step, *trained, {})
    (checkpoints.folder / "step-2" / "index.json").unlink()
    assert checkpoints.load(*trained).step == 1
    checkpoints.save(2, *trained, {})
    assert checkpoints.load(*trained).step == 2
