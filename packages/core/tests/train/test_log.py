import json
import sys

import pytest
from mezzo_core.errors import UserError
from mezzo_core.train.log import RunLog
from mezzo_core.train.loop import train


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
    ("track", "module"), [("tensorboard", "tensorboard.compat.proto.event_pb2"), ("trackio", "trackio")]
)
def test_a_missing_tracker_says_what_to_install(tiny, tmp_path, monkeypatch, track, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"{track}.*pip install"):
        train(tiny(track=track), tmp_path, quiet=True)


def test_trackio_gets_every_step(tiny, tmp_path, monkeypatch):
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
    monkeypatch.setitem(sys.modules, "trackio", fake)
    train(tiny(track="trackio"), tmp_path, quiet=True)
    assert [step for step, values in fake.logged if "loss" in values] == [1, 2, 3, 4, 5, 6]
    assert fake.finished
