"""The command line of an experiment: what it selects, and mistakes in one line."""

import re
import signal

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.reproduction import Cell, run_script
from mezzo_core.reproduction.runner import Job
from mezzo_core.train.stopping import StoppedError

MODELS = ("RNN", "RAT(L=16)", "Attention")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script; return its exit code and the options that its function got."""

    def run(*words, measure=None, **kinds):
        seen = []
        monkeypatch.setattr("sys.argv", ["script", "--out", str(tmp_path / "out"), *words])
        what = (measure or seen.append, "Measure a table.\n\nMore.", MODELS)
        return run_script(*what, **kinds), seen

    return run


def test_everything_is_measured_unless_models_are_named(run, tmp_path):
    code, (options,) = run("--dry-run")
    assert code == 0
    assert options.models == MODELS
    assert (options.out, options.device) == (tmp_path / "out", torch.device("cpu"))
    _, (options,) = run("--dry-run", "--models", "Attention", "RNN")
    assert options.models == ("RNN", "Attention")


def test_the_tokens_of_a_training_can_be_chosen_where_the_script_says_so(run):
    told = [run("--dry-run", *words, tokens=1000)[1] for words in ((), ("--tokens", "250"))]
    assert [options.tokens for (options,) in told] == [1000, 250]


def test_seeds_can_be_chosen_only_where_models_train_with_several(run, capsys):
    _, (options,) = run("--dry-run", "--seeds", "3", trains=True, parallel=True)
    assert options.seeds == (3,)
    with pytest.raises(SystemExit):
        run("--dry-run", "--seeds", "3", trains=True)
    assert "unrecognized arguments: --seeds" in capsys.readouterr().err


@pytest.mark.parametrize("named", [(), ("Attention",), ("Attention", "RNN")])
def test_of_a_job_of_several_models_those_are_measured_that_are_named(run, named):
    def work(cells, folder, device):
        yield [cell.entry(1.0) for cell in cells]

    def measure(options):
        job = Job(tuple(Cell(model, "T=8") for model in MODELS), work)
        result = options.run("numbers", [job], title="Numbers", setting="small")
        assert result.header.models == MODELS
        assert {entry.model for entry in result.entries} == set(named or MODELS)

    words = ["--models", *named] if named else []
    assert run("--dry-run", *words, measure=measure)[0] == 0


def stopped(options):
    raise StoppedError(signal.SIGTERM, "after step 3 of 9")


def test_a_training_that_is_stopped_is_one_line(run, capsys):
    assert run("--dry-run", measure=stopped) == (143, [])
    assert capsys.readouterr().err == "stopped by SIGTERM after step 3 of 9\n"


def mistaken(options):
    raise UserError("this file\x1b is bad")


@pytest.mark.parametrize(
    ("words", "measure", "named"),
    [
        (["--dry-run", "--models", "RAT(L=17)"], None, r"'RAT\(L=17\)'; did you mean RAT\(L=16\)"),
        ([], None, "needs a CUDA GPU: --dry-run"),
        (["--dry-run"], mistaken, r"this file\\x1b is bad"),
        (["--dry-run", "--jobs", "0"], None, "--jobs must be 1 or more, got 0"),
    ],
)
def test_a_mistake_is_one_line(run, capsys, monkeypatch, tmp_path, words, measure, named):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(*words, measure=measure, parallel=True) == (2, [])
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(named, line)
    assert not (tmp_path / "out").exists()
