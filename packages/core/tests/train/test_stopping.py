"""Ctrl-C, SIGTERM and SIGHUP: the step is finished and saved, and the run says where it stands."""

import io
import os
import signal
import threading

import pytest
from mezzo_core.errors import UserError
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.train import build
from mezzo_core.train.checkpoint import Checkpoints
from mezzo_core.train.loop import train
from mezzo_core.train.stopping import StoppedError, watch_signals

SIGNALS = [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
SIGNALS += [(signal.SIGHUP, 129, "SIGHUP")]


def send(number, step):
    def on_step(row):
        if row["step"] == step:
            os.kill(os.getpid(), number)

    return on_step


def stopped(config, out, **options):
    """Train until a signal ends it; return the error, whose words are one line."""
    before = {number: signal.getsignal(number) for number, *_ in SIGNALS}
    with pytest.raises(StoppedError) as error:
        train(config, out, quiet=True, **options)
    assert {number: signal.getsignal(number) for number in before} == before
    assert "\n" not in str(error.value)
    return error.value


@pytest.mark.parametrize(("number", "code", "name"), SIGNALS)
def test_a_signal_before_the_first_checkpoint_loses_no_step(
    tiny, tmp_path, losses_of, number, code, name
):
    config = tiny(checkpoint_every=100)
    train(config, tmp_path / "whole", quiet=True)
    out = tmp_path / "run"
    error = stopped(config, out, on_step=send(number, 3))
    assert error.exit_code == code
    assert f"stopped by {name} after step 3 of 6; the last checkpoint is " in str(error)
    assert str(out / "checkpoints" / "step-3") in str(error)
    assert load_model(out / "model")[2]["step"] == 3
    assert len(losses_of(out)) == 3
    train(config, out, quiet=True)
    assert losses_of(out) == losses_of(tmp_path / "whole")


def test_a_signal_during_a_save_lets_it_finish(tiny, tmp_path, monkeypatch):
    honest = Checkpoints.save

    def save(self, step, *arguments):
        os.kill(os.getpid(), signal.SIGINT)
        honest(self, step, *arguments)

    monkeypatch.setattr(Checkpoints, "save", save)
    error = stopped(tiny(), tmp_path)
    assert "after step 2 of 6" in str(error)
    assert str(tmp_path / "checkpoints" / "step-2") in str(error)


def test_a_second_signal_leaves_at_once_whatever_libraries_make_of_it(tiny, tmp_path, monkeypatch):
    honest = Checkpoints.save

    def save(self, step, *arguments):
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException as error:
                raise UserError("cannot save ()") from error
        honest(self, step, *arguments)

    monkeypatch.setattr(Checkpoints, "save", save)
    error = stopped(tiny(), tmp_path)
    assert "stopped by Ctrl-C at once; the last checkpoint is" in str(error)
    assert "step-2" in str(error)
    monkeypatch.undo()
    assert train(tiny(), tmp_path, quiet=True).steps == 6


def test_a_closed_terminal_is_told_twice_and_the_step_still_saved(tiny, tmp_path):
    """A shell that ends sends SIGHUP again."""

    def on_step(row):
        if row["step"] == 3:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)

    error = stopped(tiny(checkpoint_every=100), tmp_path, on_step=on_step)
    assert "stopped by SIGHUP after step 3 of 6" in str(error)


@pytest.mark.parametrize("gone", [BrokenPipeError, OSError])
def test_a_run_goes_on_when_nobody_can_read_along(tiny, tmp_path, monkeypatch, capsys, gone):
    class Gone(io.StringIO):
        def write(self, _):
            raise gone

    monkeypatch.setattr("sys.stderr", Gone())
    assert train(tiny(), tmp_path).steps == 6


def test_a_signal_while_the_data_is_read_ends_the_start(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "copy_weights", None)  # not reached

    def read(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal came first")

    monkeypatch.setattr(type(tiny().data), "build", read)
    error = stopped(tiny(), tmp_path)
    assert error.exit_code == 143
    assert "there is no checkpoint yet" in str(error)
    assert not (tmp_path / "config.json").exists()


def test_a_signal_after_the_last_step_is_not_forgotten(tiny, tmp_path):
    error = stopped(tiny(), tmp_path, on_step=send(signal.SIGINT, 6))
    assert "after step 6 of 6" in str(error)
    assert train(tiny(), tmp_path, quiet=True).val_loss is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with watch_signals() as request:
            os.kill(os.getpid(), number)
            assert not request.is_made
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.fixture
def start_two(start_children):
    """Start two processes that send themselves signals, each "RANK:STEP:NAME"."""

    def start(config, out, *signals):
        return start_children("signalled", config, out, *signals, size=2)

    return start


def spoken(child):
    """Wait for the end of a child; return its exit code and its own lines."""
    _, errors = child.communicate(timeout=120)
    lines = [line for line in errors.splitlines() if line.startswith(("StoppedE", "UserE"))]
    return child.returncode, lines


@pytest.mark.slow
def test_processes_agree_on_the_step_at_which_they_stop(tiny, tmp_path, start_two, rows_of):
    out = tmp_path / "run"
    ended = [spoken(child) for child in start_two(tiny(checkpoint_every=9), out, "1:3:SIGTERM")]
    for code, lines in ended:
        assert code == 143, ended
        assert len(lines) == 1
        assert str(out / "checkpoints" / "step-4") in lines[0]
    assert [row["step"] for row in rows_of(out)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_survivor_names_the_checkpoint_before_its_launcher_ends_it(tiny, tmp_path, start_two):
    # torchrun sends SIGTERM to those that are left.
    signals = ("0:3:SIGTERM", "1:3:SIGKILL")
    survivor, _ = start_two(tiny(), tmp_path / "run", *signals)
    code, lines = spoken(survivor)
    assert code == 2, lines
    assert len(lines) == 1
    assert "another process of the run" in lines[0]
    assert "step-2" in lines[0]


@pytest.mark.slow
def test_a_survivor_that_waits_for_ever_says_so(tiny, tmp_path, start_two):
    signals = ("0:3:SIGTERM", "1:3:SIGSTOP")
    survivor, _ = start_two(tiny(), tmp_path / "run", *signals)
    limit = threading.Timer(100, survivor.kill)
    limit.start()
    said = next((line for line in survivor.stderr if "its step does not end" in line), "nothing")
    limit.cancel()
    assert "step-2" in said
