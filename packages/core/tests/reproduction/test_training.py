"""Models are trained once with each seed, and what is told of a run is what its log says."""

import json
import math
import random
import shutil
import statistics
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.data import DataConfig
from mezzo_core.errors import UserError
from mezzo_core.eval.evaluate import evaluate
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.reproduction import Cell, Header, Result, origin, training
from mezzo_core.reproduction.result_file import DIVERGED
from mezzo_core.reproduction.runner import Job, run
from mezzo_core.reproduction.training import Tuning, loss_by_length, measure_run, of_model, sweep
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.loop import DivergenceError
from toys.running_mean import RunningMeanConfig

CPU = torch.device("cpu")
HERE = {**origin(CPU), "commit": "c1"}
MODELS = ("Attention", "Mean")
HEADER = Header("training", "Table 2", "toy", ("Val. PPL",), MODELS, "perplexity")


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Two recipes that train in a fraction of a second."""
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    words = random.Random(0).choices(("half", "of", "the", "notes", "rest", "song"), k=4000)
    path.write_text(" ".join(words), encoding="utf-8")
    mixers = {"Attention": AttentionConfig(head_dim=8), "Mean": RunningMeanConfig()}
    return {
        model: TrainConfig(
            name=model,
            model=LMConfig(vocab_size=257, d_model=16, mixers=(mixer,)),
            data=DataConfig(source=str(path)),
            seq_len=16,
            batch_size=2,
            steps=4,
            eval_every=2,
            eval_batches=2,
            checkpoint_every=4,
        )
        for model, mixer in mixers.items()
    }


@pytest.fixture(scope="module")
def finished(configs, tmp_path_factory):
    """The folder of a run that is only read."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    measure_run(configs["Attention"], folder, CPU)
    return folder


@pytest.fixture
def result(tmp_path):
    return Result(tmp_path / "results/table2.json", HEADER, HERE)


def test_a_run_is_measured_by_its_log(configs, tmp_path):
    config = replace(configs["Attention"], steps=130, eval_every=65)
    found = measure_run(config, tmp_path, CPU)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [row for row in log if "loss" in row]
    tests = [row for row in log if "val_loss" in row]
    assert found["perplexity"] == tests[-1]["val_perplexity"]
    assert found["accuracy"] == tests[-1]["val_accuracy"]
    speeds = [row["tokens_per_second"] for row in steps]
    assert found["tokens_per_second"] == round(statistics.median(speeds[10:]))
    assert found["peak_gb"] is None
    with torch.device("meta"):
        assert found["parameters"] == config.model.build().num_parameters()
    train, val = found["steps"]["train"], found["steps"]["val"]
    assert len(train) == 65 <= training.POINTS
    losses = {row["step"]: row["loss"] for row in steps}
    assert all(losses[step] == loss for step, loss in train)
    assert train[-1][0] == 130
    assert val == [[65, tests[0]["val_loss"]], [130, tests[1]["val_loss"]]]


def without(name):
    return lambda rows: [{k: v for k, v in row.items() if k != name} for row in rows]


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (lambda rows: rows[:-1], "lacks the last step"),
        (without("val_accuracy"), "lacks .* what was measured"),
        (without("tokens_per_second"), "line 1 of .* is no row"),
        (lambda rows: [{**rows[0], "loss": True}, *rows[1:]], "line 1 of .* is no row"),
    ],
)
def test_a_finished_run_whose_log_is_damaged_is_not_measured(
    configs, finished, tmp_path, damaged, words
):
    run = shutil.copytree(finished, tmp_path / "run")
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in damaged(rows)))
    with pytest.raises(UserError, match=words):
        measure_run(configs["Attention"], run, CPU, resume=True)


def test_a_training_has_a_value_in_every_column_and_its_details_once(configs, tmp_path):
    lengths = {"T=8": 8, "T=32": 32}
    header = replace(HEADER, columns=tuple(lengths))
    result = Result(tmp_path / "tested.json", header, HERE)
    test = partial(of_model, partial(loss_by_length, lengths=lengths, windows=2))
    config = replace(configs["Attention"], seed=1)
    run(result, [training.training("Attention", [*lengths], config, test)], tmp_path / "runs", CPU)
    first, second = result.entries
    assert (first.column, second.column, first.seed) == ("T=8", "T=32", 1)
    assert first.value != second.value
    assert {"parameters", "tokens_per_second", "steps"} <= set(first.details)
    assert not second.details


def test_a_training_that_diverges_is_a_word_in_every_column(configs, tmp_path, monkeypatch):
    def measure(*_):
        raise DivergenceError("the loss exploded")

    monkeypatch.setattr(training, "measure_run", measure)
    header = replace(HEADER, columns=("a", "b"))
    result = Result(tmp_path / "a.json", header, HERE)
    run(result, [training.training("Mean", ["a", "b"], configs["Mean"])], tmp_path, CPU)
    assert [entry.value for entry in result.entries] == [DIVERGED] * 2


def test_all_lengths_have_the_same_targets(configs):
    torch.manual_seed(0)
    # A window of one token: the context does not matter, so equal targets give equal losses.
    mixers = (AttentionConfig(head_dim=8, window_size=1),)
    config = replace(configs["Attention"], data=DataConfig())
    model = replace(config.model, mixers=mixers).build()
    lengths = {"T=8": 8, "T=32": 32}
    losses = loss_by_length(model, config, lengths=lengths, windows=3)
    assert losses["T=8"] == pytest.approx(losses["T=32"], rel=1e-6)
    batches = islice(config.data.build(32, None).validation_batches(1), 3)
    assert losses["T=32"] == pytest.approx(evaluate(model, batches).loss, rel=1e-6)


@pytest.fixture
def taught(configs, monkeypatch):
    """Trainings whose perplexity is told by their rates' distances from a best one, each noted."""
    taught = SimpleNamespace(
        best={"Attention": 1e-2, "Mean": 1e-3},
        trained=[],
        configs={m: replace(c, optim=OptimConfig(4e-3, 1e-3)) for m, c in configs.items()},
    )

    def measure_run(config, folder, device):
        taught.trained.append((config.name, config.seed, config.optim.lr, config.optim.min_lr))
        best, lr = taught.best[config.name], config.optim.lr
        return {"perplexity": 1 + abs(math.log(lr / best)) if best else DIVERGED}

    monkeypatch.setattr(training, "measure_run", measure_run)
    return taught


def test_the_first_seed_tries_the_rates_and_the_others_take_the_best(taught, tmp_path):
    header, rates = replace(HEADER, columns=("low", "high")), {"low": 1e-3, "high": 1e-2}
    result = Result(tmp_path / "swept.json", header, HERE)
    sweep(result, taught.configs, rates, (0, 1), tmp_path / "runs", CPU)
    assert taught.trained == [
        *(("Attention", 0, 1e-3, 2.5e-4), ("Mean", 0, 1e-3, 2.5e-4)),
        *(("Attention", 0, 1e-2, 2.5e-3), ("Mean", 0, 1e-2, 2.5e-3)),
        *(("Attention", 1, 1e-2, 2.5e-3), ("Mean", 1, 1e-3, 2.5e-4)),
    ]
    taught.trained.clear()
    result = Result(result.path, header, HERE)
    sweep(result, taught.configs, rates, (2,), tmp_path / "runs", CPU)
    assert [(name, seed) for name, seed, *_ in taught.trained] == [("Attention", 2), ("Mean", 2)]


@pytest.mark.parametrize(
    ("best", "tried"),
    [(4, {2, 4, 8}), (1, {1, 2, 4, 8}), (32, {2, 4, 8, 16, 32}), (None, {2, 4, 8})],
)
def test_a_sweep_begins_in_the_middle_and_goes_on_at_its_ends(taught, tmp_path, best, tried):
    """And what has no number at all three rates is tried at no other."""
    rates = {str(rate): float(rate) for rate in (1, 2, 4, 8, 16, 32)}
    result = Result(tmp_path / "swept.json", replace(HEADER, columns=tuple(rates)), HERE)
    taught.best["Mean"] = best
    config = {"Mean": taught.configs["Mean"]}
    sweep(result, config, rates, (0, 1), tmp_path / "runs", CPU)
    assert {rate for _, seed, rate, _ in taught.trained if seed == 0} == tried
    assert [rate for _, seed, rate, _ in taught.trained if seed == 1] == ([best] if best else [])


def test_the_best_run_comes_first_and_a_diverged_one_last(configs, tmp_path, monkeypatch, capsys):
    """Of equal accuracies the second measure decides; it has a cell of its own."""
    measured, folders = {1e-4: (0.5, 0.5), 1e-3: None, 1.0: (0.9, 0.6), 1e-2: (0.9, 0.7)}, []

    def measure(config, folder, device, *, resume):
        assert resume
        folders.append(folder)
        if (found := measured[config.optim.lr]) is None:
            raise DivergenceError("the loss exploded")
        return {"perplexity": 1.0, "tokens_per_second": 2, "accuracy": found[0], "second": found[1]}

    monkeypatch.setattr(training, "measure_run", measure)
    every = [replace(configs["Mean"], optim=OptimConfig(lr, min_lr=0.0)) for lr in measured]
    cells = tuple(Cell("Mean", "Val. PPL", group) for group in ("first", "second"))
    by, details = ("accuracy", "second"), {"state_bytes": 8}
    work = Tuning("toy", cells, every, Path("runs/toy"), by=by, details=details)
    result = Result(tmp_path / "tuned.json", replace(HEADER, groups=("first", "second")), HERE)
    run(result, [Job(cells, work)], tmp_path, CPU)
    entry, second = result.entries
    assert (entry.value, entry.details["lr"], entry.details["state_bytes"]) == (0.9, 1e-2, 8)
    assert (second.value, second.details) == (0.7, {})
    others = [(run["lr"], run["accuracy"]) for run in entry.details["others"]]
    assert others == [(1.0, 0.9), (1e-4, 0.5), (1e-3, DIVERGED)]
    assert folders[1] == Path("runs/toy_lr0.001")
    told = "toy lr0.0001: 0.5, 0.5\ntoy lr0.001: diverged, diverged\n"
    assert capsys.readouterr().out.startswith(told)
    assert not {"perplexity", "tokens_per_second"} & set(entry.details)
    assert [*work(cells[1:], tmp_path, CPU)] == [[second]], "what a kill left out"
    ((first, _),) = replace(work, enough=0.4)(cells, tmp_path, CPU)
    assert first.details["others"] is None, "after the first run none is made"


def test_a_run_that_is_done_is_only_read(configs, tmp_path, monkeypatch):
    found = measure_run(configs["Mean"], tmp_path, CPU)
    monkeypatch.setattr(torch.Tensor, "backward", None)  # a step would fail
    assert measure_run(configs["Mean"], tmp_path, CPU, resume=True) == found
    with monkeypatch.context() as patch:
        patch.setattr(training, "origin", lambda device: {**origin(device), "commit": "other"})
        with pytest.raises(UserError, match=r"has another commit \(.*not 'other'.*remove it"):
            measure_run(configs["Mean"], tmp_path, CPU, resume=True)
    with pytest.raises(TypeError):
        measure_run(configs["Mean"], tmp_path, CPU)
