"""Models are trained once with each seed, and what is told of a run is what its log says."""

import json
import math
import random
import shutil
import statistics
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.bench import OOM, Header, Result, origin, training
from mezzo_core.bench.training import (
    conditions,
    corpus_name,
    in_words,
    measure_run,
    steady_and_first,
    train_models,
    train_swept,
)
from mezzo_core.data import DataConfig
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.stack import BlocksConfig
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.loop import DivergenceError
from toys.own_keys import OwnKeysConfig
from toys.running_mean import RunningMeanConfig

CPU = torch.device("cpu")
HERE = {**origin(CPU), "commit": "c1"}
HEADER = Header(
    kind="training",
    title="Table 2",
    setting="toy",
    how="scaled down",
    columns=("Val. PPL",),
    models=("Attention", "Mean"),
    unit="perplexity",
    better="lower",
)


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


def entries(result):
    return json.loads(result.path.read_text())["entries"]


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
        (lambda rows: [], "lacks the last step"),
        (lambda rows: rows[:-1], "lacks the last step"),
        (lambda rows: [row for row in rows if "loss" not in row], "lacks the last step"),
        (without("val_accuracy"), "lacks .* what was measured"),
        (without("val_perplexity"), "line 3 of .* is no row"),
        (without("tokens_per_second"), "line 1 of .* is no row"),
        (lambda rows: [{**rows[0], "tokens_per_second": 0}, *rows[1:]], "line 1 of .* is no row"),
        (lambda rows: [*rows[:-1], {**rows[-1], "val_accuracy": "x"}], "line 6 of .* is no row"),
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


def test_a_run_from_another_model_has_that_models_loss_first(configs, tmp_path):
    first = measure_run(configs["Attention"], tmp_path / "first", CPU)
    config = replace(configs["Attention"], init_from=str(tmp_path / "first/model"))
    found = measure_run(config, tmp_path / "second", CPU)
    (start, loss), *_ = found["steps"]["val"]
    assert (start, loss) == (0, pytest.approx(math.log(first["perplexity"]), rel=1e-5))


def test_a_killed_experiment_trains_only_what_is_missing(configs, result, tmp_path, monkeypatch):
    trained = []
    right = training.measure_run

    def measure_run(config, folder, device):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append((config.seed, config.name))
        return right(config, folder, device)

    monkeypatch.setattr(training, "measure_run", measure_run)
    with pytest.raises(KeyboardInterrupt):
        train_models(result, configs, (0, 1), tmp_path / "runs", CPU)
    assert trained == [(0, "Attention"), (0, "Mean"), (1, "Attention")]
    assert len(entries(result)) == 3
    trained.clear()
    train_models(Result(result.path, HEADER, HERE), configs, (0, 1), tmp_path / "runs", CPU)
    assert trained == [(1, "Mean")]
    found = entries(result)
    assert [(entry["seed"], entry["model"]) for entry in found] == [
        (seed, model) for seed in (0, 1) for model in configs
    ]
    assert len({entry["value"] for entry in found}) == 4
    for entry in found:
        assert 1 < entry["value"] < 257
        assert {"parameters", "tokens_per_second", "steps"} <= set(entry)
        assert "peak_gb" not in entry


def test_trainings_at_the_same_time_are_the_same_and_have_no_speed(configs, result, tmp_path):
    train_models(result, configs, (0,), tmp_path / "runs", CPU, jobs=2)
    alone = Result(tmp_path / "alone.json", HEADER, HERE)
    train_models(alone, configs, (0,), tmp_path / "runs", CPU)
    values = [
        {entry["model"]: entry["value"] for entry in entries(each)} for each in (result, alone)
    ]
    assert values[0] == values[1]
    assert all("tokens_per_second" not in entry for entry in entries(result))


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
        return {"perplexity": 1 + abs(math.log(lr / best)) if best else training.DIVERGED}

    monkeypatch.setattr(training, "measure_run", measure_run)
    return taught


def test_the_first_seed_tries_the_rates_and_the_others_take_the_best(taught, tmp_path):
    header, rates = replace(HEADER, columns=("low", "high")), {"low": 1e-3, "high": 1e-2}
    result = Result(tmp_path / "swept.json", header, HERE)
    train_swept(result, taught.configs, rates, (0, 1), tmp_path / "runs", CPU)
    assert taught.trained == [
        *(("Attention", 0, 1e-3, 2.5e-4), ("Mean", 0, 1e-3, 2.5e-4)),
        *(("Attention", 0, 1e-2, 2.5e-3), ("Mean", 0, 1e-2, 2.5e-3)),
        *(("Attention", 1, 1e-2, 2.5e-3), ("Mean", 1, 1e-3, 2.5e-4)),
    ]
    taught.trained.clear()
    result = Result(result.path, header, HERE)
    train_swept(result, taught.configs, rates, (2,), tmp_path / "runs", CPU)
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
    train_swept(result, config, rates, (0, 1), tmp_path / "runs", CPU)
    assert {rate for _, seed, rate, _ in taught.trained if seed == 0} == tried
    assert [rate for _, seed, rate, _ in taught.trained if seed == 1] == ([best] if best else [])


@pytest.mark.parametrize(
    ("error", "value"),
    [(torch.OutOfMemoryError("full"), OOM), (DivergenceError("nan"), training.DIVERGED)],
)
def test_a_training_that_fails_is_a_value_and_the_others_go_on(
    configs, result, tmp_path, monkeypatch, error, value
):
    right = training.measure_run

    def measure_run(config, folder, device):
        if config.name == "Attention":
            raise error
        return right(config, folder, device)

    monkeypatch.setattr(training, "measure_run", measure_run)
    train_models(result, configs, (0,), tmp_path / "runs", CPU)
    first, second = entries(result)
    assert first == {"model": "Attention", "column": "Val. PPL", "seed": 0, "value": value}
    assert second["value"] > 1


def test_the_first_step_is_what_the_warm_up_took_beyond_its_speed():
    # Ten steps of 100 tokens in 19 s, then one a second: the first took 10 s.
    speeds = [10 * 100 / 19] * 10 + [100, 100, 200]
    assert steady_and_first(speeds, 100) == (100, pytest.approx(10))
    assert steady_and_first([50.0], 100) == (50, 2)
    assert steady_and_first([10.0, 50.0], 100) == (50, 10)


def test_a_run_that_is_done_is_only_read(configs, tmp_path, monkeypatch):
    found = measure_run(configs["Mean"], tmp_path, CPU)
    monkeypatch.setattr(torch.Tensor, "backward", None)  # a step would fail
    assert measure_run(configs["Mean"], tmp_path, CPU, resume=True) == found
    with pytest.raises(TypeError):
        measure_run(configs["Mean"], tmp_path, CPU)


@pytest.mark.gpu
def test_a_run_that_is_only_read_has_no_peak(configs, tmp_path):
    measure = partial(measure_run, configs["Mean"], tmp_path, torch.device("cuda"), resume=True)
    first, second = measure(), measure()
    assert first["peak_gb"] > 0
    assert second == {**first, "peak_gb": None}


def test_a_corpus_is_called_by_its_files(tmp_path):
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text("text")
    assert corpus_name(str(tmp_path)) == "a.txt, b.jsonl"
    assert corpus_name(str(tmp_path / "a*")) == "a.txt"
    assert [corpus_name(each) for each in ("embedded", "hub:x/y")] == ["embedded", "hub:x/y"]


def test_a_run_is_told_in_words(configs):
    words = in_words(configs["Mean"], CPU)
    assert words == (
        "C 16, 1 layers, T 16, 4 steps of 2 sequences (128 tokens of words.txt, tokenizer byte), "
        "lr 0.003, warm-up 5% of the steps, fp32, torch.compile off"
    )


def test_the_layers_of_a_stack_are_told_too(configs):
    mean = configs["Mean"]
    stack = BlocksConfig((OwnKeysConfig(),) * 3)
    words = in_words(replace(mean, model=replace(mean.model, mixers=(), stack=stack)), CPU)
    assert words == f"C 16, 3 layers, {conditions(mean, CPU)}"
