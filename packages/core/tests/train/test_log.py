import csv
import json
import os
import sys
from pathlib import Path

import pytest
from mezzo_core.errors import UserError
from mezzo_core.train.log import RunLog, read_rows
from mezzo_core.train.loop import train

pytestmark = pytest.mark.usefixtures("losses_drawn")


def row(step, loss=1.0):
    return {
        "step": step,
        "loss": loss,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens": 128 * step,
        "tokens_per_second": 100.0,
        "time": 0.0,
    }


def test_resuming_keeps_each_step_once(tiny, tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [json.dumps(row(step)) for step in (1, 2, 3, 4)]
    path.write_text("\n".join(lines) + '\n{"step": 5, "lo')  # a kill cut the last line
    with RunLog(tmp_path, tiny(), done=2, active=True, quiet=True) as log:
        log.step(row(3, loss=2.0))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in rows] == [(1, 1.0), (2, 1.0), (3, 2.0)]


DAMAGED = {
    "no step": b'{"loss": 1.0}\n',
    "no object": b"[1, 2]\n",
    "a word for a loss": json.dumps(row(2, loss="low")).encode() + b"\n",
    "a loss of 400 digits": json.dumps(row(2, loss=10**400)).encode() + b"\n",
    "half a row": b'{"step": 2, "loss": 1.0}\n',
    "half an evaluation": b'{"step": 2, "val_loss": 1.0}\n',
    "no UTF-8": b'{"step": 2, "name": "\xff"}\n',
    "deep": b"[" * 5000 + b"\n",
    "one long line": b"\0" * (1 << 17),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_row_before_the_checkpoint_is_named(tiny, tmp_path, name):
    path = tmp_path / "log.jsonl"
    last = json.dumps(row(3)).encode() + b"\n"
    path.write_bytes(json.dumps(row(1)).encode() + b"\n" + DAMAGED[name] + last)
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"line 2 of .*log\.jsonl is no row of a log") as error:
        RunLog(tmp_path, tiny(), done=3, active=True, quiet=True)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_row_after_the_checkpoint_does_not_matter(tiny, tmp_path, name):
    lines = [json.dumps(row(step)).encode() + b"\n" for step in (1, 2, 3)]
    (tmp_path / "log.jsonl").write_bytes(b"".join(lines) + DAMAGED[name])
    with RunLog(tmp_path, tiny(), done=2, active=True, quiet=True) as log:
        assert [found["step"] for found in log.rows] == [1, 2]


def test_the_log_and_the_figure_follow_no_link(tiny, tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    for name in ("log.jsonl", "loss.png"):
        (tmp_path / name).symlink_to(target)
    with RunLog(tmp_path, tiny(), done=0, active=True, quiet=True) as log:
        log.step(row(1))
        log.plot()
    assert target.read_text() == "precious"
    assert json.loads((tmp_path / "log.jsonl").read_text())["step"] == 1
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def fill_disk(file):
    """Leave no room for what is written to an open file."""
    with Path("/dev/full").open("w") as full:
        os.dup2(full.fileno(), file.fileno())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk here")
@pytest.mark.parametrize("name", ["log.jsonl", "loss.png", "tensorboard"])
def test_a_full_disk_names_the_file_and_the_checkpoint(tiny, tmp_path, monkeypatch, name):
    track = None
    if name == "tensorboard":
        pytest.importorskip("tensorboard")
        track = name
    honest = Path.open
    opened = []

    def open_file(path, mode="r", *arguments, **options):
        file = honest(path, mode, *arguments, **options)
        if name in str(path) and mode[0] in "ax":
            opened.append(file)
            if name == "loss.png":
                fill_disk(file)
        return file

    def fill(row):
        if row["step"] == 3 and name != "loss.png":
            fill_disk(opened[-1])

    monkeypatch.setattr(Path, "open", open_file)
    words = rf"No space left on device: .*{name}.*; the last checkpoint is .*step-\d"
    with pytest.raises(UserError, match=words) as error:
        train(tiny(track=track), tmp_path, quiet=True, on_step=fill)
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    assert train(tiny(), tmp_path, quiet=True).steps == 6


def test_no_escape_reaches_the_terminal(tiny, tmp_path, capsys, monkeypatch):
    config = tiny(name="a\x1b[2J[/]b$c")
    with RunLog(tmp_path, config, done=0, active=True, quiet=False) as log:
        log.note("found \x9b in it")
    assert capsys.readouterr().err == "a\\x1b[2J[/]b$c: found \\x9b in it\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with RunLog(tmp_path, config, done=0, active=True, quiet=False) as log:
        log.step(row(1))
        log.plot()
    shown = capsys.readouterr().err
    assert "a\\x1b[2J[/]b$c" in shown  # in the bar, where [/] could be markup
    assert "\x1b[2J" not in shown


def test_other_processes_write_nothing(tiny, tmp_path):
    with RunLog(tmp_path, tiny(), done=0, active=False, quiet=False) as log:
        log.step(row(1))
        log.note("hello")
        log.plot()
    assert list(tmp_path.iterdir()) == []
    assert len(log.rows) == 1


def test_tensorboard_gets_every_value(tiny, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny(track="tensorboard"), tmp_path, quiet=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("val_perplexity")] == [3, 6]


@pytest.mark.parametrize(
    ("track", "module"),
    [
        ("tensorboard", "tensorboard.compat.proto.event_pb2"),
        ("trackio", "trackio"),
        ("wandb", "wandb"),
    ],
)
def test_a_missing_tracker_says_what_to_install(tiny, tmp_path, monkeypatch, track, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"{track}.*pip install"):
        train(tiny(track=track), tmp_path, quiet=True)


@pytest.mark.parametrize("track", ["trackio", "wandb"])
def test_a_tracker_gets_every_step(tiny, tmp_path, monkeypatch, track):
    class Fake:
        def __init__(self):
            self.logged, self.finished = [], False

        def init(self, **_):
            pass

        def log(self, values, step):
            self.logged.append((step, values))

        def finish(self):
            self.finished = True

    fake = Fake()
    monkeypatch.setitem(sys.modules, track, fake)
    train(tiny(track=track), tmp_path, quiet=True)
    assert [step for step, values in fake.logged if "loss" in values] == [1, 2, 3, 4, 5, 6]
    assert fake.finished


def test_the_log_is_a_table_too(tiny, tmp_path):
    train(tiny(), tmp_path, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(lines) == 8
    for row, line in zip(rows, lines, strict=True):
        assert set(line) <= set(row)
        for name, value in row.items():
            assert value == ("" if line.get(name) is None else str(line[name]))


def test_a_line_tells_the_time_left_and_what_a_gpu_gives(tiny, tmp_path, capsys):
    config = tiny(steps=20)
    with RunLog(tmp_path, config, done=0, active=True, quiet=False) as log:
        log.step(row(1))
        log.step(row(2) | {"mfu": 0.414, "peak_gb": 19.06})
        log.step(row(20))
    first, second, last = capsys.readouterr().err.splitlines()
    assert first == "tiny: step 1/20: loss 1.0000, 100 tokens/s, 0:00:24 left"
    assert "loss 1.0000, 100 tokens/s, 41% MFU, 19.1 GB, 0:00:23 left" in second
    assert last.endswith("100 tokens/s")
    assert [found["step"] for found in read_rows(tmp_path / "log.jsonl", 20)] == [1, 2, 20]
