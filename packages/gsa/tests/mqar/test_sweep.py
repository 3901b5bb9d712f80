"""MQAR: the models, one training, and sweeps that go on where they were left."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
import typer
from mezzo_core.cli import run as run_app
from mezzo_core.config_json import from_json, to_json
from mezzo_core.errors import UserError
from mezzo_core.nn import generate
from mezzo_core.papers import load_experiments
from mezzo_core.testing.laws import check_segments, check_state_bytes
from mezzo_core.train.loop import train
from mezzo_gsa.mqar import sweep as sweeps
from mezzo_gsa.mqar.command import mqar
from mezzo_gsa.mqar.config import DROPOUT, MIXERS, SweepConfig
from mezzo_gsa.mqar.sweep import RecallRun, best, read_runs, result_path, sweep, write_runs
from mezzo_gsa.mqar.task import MQARConfig

CPU = torch.device("cpu")
TASK = MQARConfig(vocab_size=32, seq_len=16, num_pairs=4, train_rows=20, test_rows=8)
TINY = SweepConfig(
    task=TASK,
    models=("attention", "gsa"),
    widths=(16,),
    learning_rates=(1e-3,),
    batch_size=8,
    epochs=2,
)


def silent(line):
    assert isinstance(line, str)


def tiny_model(name, **changes):
    torch.manual_seed(0)
    return replace(TINY, **changes).run(name, 16, 1e-3).model.build().eval()


def content(folder, name="mqar.json"):
    return json.loads((folder / name).read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("conv_width", [0, 3])
@pytest.mark.parametrize("name", MIXERS)
def test_an_answer_depends_on_the_tokens_up_to_it_alone(name, conv_width):
    model = tiny_model(name, conv_width=conv_width)
    inputs = torch.randint(1, 32, (4, 16))
    answers = model(inputs).logits[:, 6]
    later, now, earlier = inputs.clone(), inputs.clone(), inputs.clone()
    later[:, 7:] = 0
    now[:, 6] = 0
    earlier[:, 5] = 0
    torch.testing.assert_close(model(later).logits[:, 6], answers, rtol=1e-5, atol=1e-6)
    for changed in (now, earlier):
        assert not torch.allclose(model(changed).logits[:, 6], answers, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("conv_width", [0, 3])
@pytest.mark.parametrize("name", MIXERS)
def test_the_models_keep_the_contract(name, conv_width):
    model = tiny_model(name, conv_width=conv_width)
    check_segments(model.stack, num_tokens=13, splits=(4, 0, 9))
    check_state_bytes(model.stack, 13)
    (new,) = generate(model, [[1, 2, 3]], max_new_tokens=4)
    logits = model(torch.tensor([[1, 2, 3, *new]])).logits[0, 2:-1]
    assert logits.argmax(-1).tolist() == new


def test_attention_alone_learns_positions_and_the_head_is_the_embedding():
    task = replace(TASK, vocab_size=1009)
    for name in MIXERS:
        names = dict(tiny_model(name, task=task).named_parameters())
        assert ("stack.blocks.0.embed.weight" in names) == (name == "attention")
        assert [key for key, weight in names.items() if 1009 in weight.shape] == ["embed.weight"]


@pytest.mark.parametrize("width", SweepConfig().widths)
def test_states_have_the_sizes_of_zoology(width):
    numbers = {
        "attention": 512 * 2 * width,
        "gsa": 2 * 64 * width,
        "gsa_one_head": 2 * 64 * width,
        "gla": width * width // 2,
        "hgrn2": min(width, 128) * width,
        "retnet": 2 * width * width,
    }
    assert set(numbers) == set(MIXERS)
    for name, count in numbers.items():
        with torch.device("meta"):
            model = SweepConfig().run(name, width, 1e-3).model.build()
        counters = 2 * 8 if name == "retnet" else 0
        assert model.state_bytes(512) == 2 * 4 * count + counters, name


def test_the_first_layer_may_be_a_convolution_and_drops_embeddings_out():
    plain, conv = (tiny_model("gla", conv_width=width).stack.blocks for width in (0, 3))
    assert len(plain) == len(conv) == 2
    assert conv[0].state_bytes(16) == 2 * 16 * 4
    assert conv[1].state_bytes(16) == plain[1].state_bytes(16)
    for blocks in (plain, conv, tiny_model("attention").stack.blocks[1:]):
        assert [block.dropout.p for block in blocks] == [DROPOUT, 0]
    for wrong in ({"conv_width": -1}, {"conv_width": 3, "num_layers": 1}):
        with pytest.raises(UserError, match="conv_width must be 0 or more"):
            replace(TINY, **wrong)


@pytest.mark.parametrize(
    ("change", "name", "setting"),
    [
        ({"conv_width": 3}, "conv", "a causal convolution of 3 tokens, then 1 of"),
        ({"init": "fan_in"}, "fan_in", "matrices of mixers started by fan_in"),
        ({"conv_width": 3, "init": "fan_in"}, "conv_fan_in", "started by fan_in"),
    ],
)
def test_a_sweep_of_other_models_has_a_file_of_its_own(tmp_path, change, name, setting):
    config = replace(TINY, models=("gla",))
    for each in (config, replace(config, **change)):
        assert len(sweep(each, tmp_path, silent, device="cpu")) == 1
    assert setting in content(tmp_path, f"mqar_{name}.json")["setting"]
    assert setting not in content(tmp_path)["setting"]


def test_a_run_trains_as_the_protocol_says(tmp_path):
    run = replace(TINY, epochs=4).run("attention", 16, 1e-3)
    train(run, tmp_path, quiet=True, device="cpu")
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    rates = [row["lr"] for row in rows if "lr" in row]
    falling = [1e-3 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(1, 9)]
    assert rates == pytest.approx(falling)
    found = [(row["step"], row["val_tokens"]) for row in rows if "val_accuracy" in row]
    assert found == [(2, 32), (4, 32), (6, 32), (8, 32)], "after each epoch, on all questions"
    assert from_json(to_json(run)) == run


def test_a_run_is_repeatable_and_says_what_it_is(tmp_path):
    config = replace(TINY, models=("gla",))
    (first,), (again,) = (sweep(config, tmp_path / name, silent, device="cpu") for name in "ab")
    assert replace(first, seconds=0.0) == replace(again, seconds=0.0)
    assert (first.model, first.width, first.lr, first.steps) == ("gla", 16, 1e-3, 4)
    assert first.parameters == sum(w.numel() for w in tiny_model("gla").parameters())
    log = (tmp_path / "a/mqar/gla_c16_lr0.001/log.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["val_accuracy"] == first.accuracy


def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path):
    class StoppedError(Exception):
        pass

    def stop(row):
        if row["step"] == 3:
            raise StoppedError

    def rows(folder):
        lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
        return [(row["step"], row.get("loss"), row.get("val_accuracy")) for row in lines]

    run = TINY.run("attention", 16, 1e-3)  # with dropout
    folder = tmp_path / "mqar/attention_c16_lr0.001"
    with pytest.raises(StoppedError):
        train(run, folder, quiet=True, device="cpu", on_step=stop)
    train(run, tmp_path / "whole", quiet=True, device="cpu")
    sweep(replace(TINY, models=("attention",)), tmp_path, silent, device="cpu")
    assert rows(folder) == rows(tmp_path / "whole")


def test_a_loss_that_is_no_number_ends_a_run(tmp_path):
    lines = []
    config = replace(TINY, models=("attention",), learning_rates=(1e38, 1e-3))
    diverged, other = sweep(config, tmp_path, lines.append, device="cpu")
    assert (diverged.accuracy, diverged.steps) == (None, None)
    assert "training diverged" in lines[0]
    assert content(tmp_path)["rows"][0]["values"] == [other.accuracy]
    assert best([diverged])["attention", 16] == diverged


@pytest.mark.slow
def test_attention_learns_to_recall(tmp_path):
    task = replace(TASK, train_rows=12_000, test_rows=200)
    config = replace(TINY, task=task, models=("attention",), widths=(64,), batch_size=64, epochs=6)
    (run,) = sweep(config, tmp_path, silent, device="cpu")
    assert run.accuracy > 0.99
    assert run.steps < 6 * 187


def test_a_sweep_leaves_a_result_that_reports_read(tmp_path):
    lines = []
    sweep(TINY, tmp_path / "results" / "here", lines.append, device="cpu")
    assert any(re.match(r"gsa C=16 lr 0.001: accuracy 0\.\d{4} after 4 steps", x) for x in lines)
    (experiment,) = load_experiments(tmp_path / "results")
    assert experiment.ids == ("gsa.claim.mqar",)
    assert not experiment.same_setting
    assert experiment.measurement.columns == ("C=16",)
    assert [row.model for row in experiment.measurement.rows] == ["attention", "gsa"]


def test_finished_runs_are_not_run_again_and_a_sweep_can_be_widened(tmp_path, monkeypatch):
    sweep(TINY, tmp_path, silent, device="cpu")
    done = []

    def watched(config, *arguments, **options):
        done.append(config.name)
        return train(config, *arguments, **options)

    monkeypatch.setattr(sweeps, "train", watched)
    before = (tmp_path / "mqar.json").read_text()
    assert (len(sweep(TINY, tmp_path, silent, device="cpu")), done) == (2, [])
    assert (tmp_path / "mqar.json").read_text() == before
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    sweep(replace(TINY, widths=(32, 16), compile=True), tmp_path, silent, device="cpu")
    assert done == ["mqar attention C=32 lr 0.001", "mqar gsa C=32 lr 0.001"]
    assert content(tmp_path)["columns"] == ["C=16", "C=32"]


def test_a_folder_keeps_one_way_of_training(tmp_path):
    config = replace(TINY, models=("attention",))
    sweep(config, tmp_path, silent, device="cpu")
    other = replace(config, epochs=3, task=replace(TASK, seed=5))
    with pytest.raises(UserError, match="runs with another seed, epochs: choose another folder"):
        sweep(other, tmp_path, silent, device="cpu")
    path = tmp_path / "mqar.json"
    path.write_text(path.read_text().replace('"gpu": null', '"gpu": "NVIDIA H200"'))
    with pytest.raises(UserError, match="runs with another gpu: choose another folder"):
        sweep(config, tmp_path, silent, device="cpu")
    for wrong in ("{}", '{"training": 3, "runs": []}', '{"training": {}, "runs": [{"lr": 1}]}'):
        path.write_text(wrong)
        with pytest.raises(UserError, match="no result of an MQAR sweep"):
            sweep(config, tmp_path, silent, device="cpu")


def finished(model="gsa", width=64, lr=1e-3, accuracy=0.5):
    return RecallRun(model, width, lr, accuracy, 1, 1, 1, 1.0, None)


def test_the_best_learning_rate_of_each_is_reported(tmp_path):
    runs = [finished("gsa", 128, 1e-3, 0.7), finished("gla", 128, 1e-3, None)]
    accuracies = {("gla", 64): (0.1, 0.3, 0.2), ("gsa", 64): (0.6, None, 0.4)}
    for (model, width), each in accuracies.items():
        runs += [
            finished(model, width, *pair) for pair in zip((1e-4, 1e-3, 1e-2), each, strict=True)
        ]
    rates = {key: run.lr for key, run in best(runs).items()}
    assert rates == {("gla", 64): 1e-3, ("gla", 128): 1e-3, ("gsa", 64): 1e-4, ("gsa", 128): 1e-3}
    write_runs(TINY, tmp_path / "mqar.json", CPU, runs)
    rows = {row["model"]: row["values"] for row in content(tmp_path)["rows"]}
    assert rows == {"gsa": [0.6, 0.7], "gla": [0.3, "-"]}
    assert read_runs(TINY, tmp_path / "mqar.json", CPU) == runs


def test_the_whole_protocol_alone_is_the_same_setting(tmp_path):
    whole = SweepConfig()
    runs = [finished(*choice) for choice in whole.choices()]
    fewer_rows = replace(whole, task=replace(whole.task, train_rows=20_000, train_pairs=(16, 64)))
    for config, some, same in (
        (whole, runs, True),
        (whole, runs[1:], False),
        (fewer_rows, runs, False),
    ):
        write_runs(config, tmp_path / "mqar.json", CPU, some)
        found = content(tmp_path)
        assert found["same_setting"] == same
    assert "20,000 rows of 16, 64 pairs, batch 128" in found["setting"]


def test_other_learning_rates_are_skipped_once_one_has_solved_the_task(tmp_path, monkeypatch):
    class Trained:
        steps = 1

        def __init__(self, config, *arguments, **options):
            self.val_accuracy = 0.995 if config.optim.lr == 1e-3 else 0.5

    monkeypatch.setattr(sweeps, "train", Trained)
    rates = (1e-4, 1e-3, 1e-2)
    config = replace(TINY, models=("gsa",), learning_rates=rates, skip_solved=True)
    lines = []
    runs = sweep(config, tmp_path / "skipping", lines.append, device="cpu")
    assert [run.lr for run in runs] == [1e-4, 1e-3]
    assert lines[-1] == "gsa C=16 lr 0.01: left out, another learning rate solved the task"
    runs = sweep(replace(config, skip_solved=False), tmp_path / "all", silent, device="cpu")
    assert [run.lr for run in runs] == [1e-4, 1e-3, 1e-2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ("gas",)}, "no model is named 'gas'; did you mean gsa"),
        ({"models": ()}, "models must be one or more different values"),
        ({"widths": (64, 64)}, "widths must be one or more different values"),
        ({"widths": (0,)}, "widths must be at least 1, got 0"),
        ({"learning_rates": (0.0,)}, r"learning_rates must be positive, got 0\.0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"task": MQARConfig(train_rows=100)}, "train_rows must fill a batch of 128, got 100"),
        ({"precision": "fp16"}, "precision must be one of .* got 'fp16'"),
        ({"init": "fan"}, "init must be one of .*, got 'fan'"),
    ],
)
def test_a_sweep_that_cannot_be_is_named(options, message):
    with pytest.raises(UserError, match=message):
        SweepConfig(**options)


def test_a_width_that_a_model_cannot_have_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(UserError, match="hgrn2 cannot have width 200: head_dim must divide"):
        sweep(replace(TINY, models=("gsa", "hgrn2"), widths=(200,)), tmp_path, silent)
    assert not list(tmp_path.iterdir())


def run_command(*arguments):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(mqar)
    with pytest.raises(SystemExit) as exit:
        run_app(app, [str(argument) for argument in arguments])
    return exit.value.code


def test_the_command_sweeps_and_shows_states_beside_accuracies(tmp_path, capsys):
    options = "--model gsa --width 16 --lr 0.001 --seq-len 16 --num-pairs 4 --vocab-size 32 "
    options += "--train-rows 16 --test-rows 4 --batch-size 8 --epochs 1 --seed 7 --device cpu"
    assert run_command(*options.split(), "--out", tmp_path) == 0
    shown = capsys.readouterr().out
    assert "state (bytes a row)" in shown
    assert f"{2 * 2 * 64 * 16 * 4:,}" in shown
    training = content(tmp_path)["training"]
    assert (training["epochs"], training["seed"]) == (1, 7)


def test_the_command_answers_a_wrong_value_in_one_line(tmp_path, capsys):
    assert run_command("--num-pairs", 200, "--out", tmp_path) == 2
    assert "error: num_pairs must be at most seq_len / 4" in capsys.readouterr().err


def test_results_are_named_by_what_is_not_the_protocols(tmp_path):
    assert result_path(TINY, tmp_path) == tmp_path / "mqar.json"


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXERS)
def test_a_compiled_run_learns_as_an_eager_one(name, tmp_path):
    task = replace(TASK, vocab_size=256, seq_len=128, num_pairs=16, train_rows=64)
    config = replace(TINY, task=task, precision="fp32", epochs=1)
    losses = []
    for compiled in (False, True):
        run = replace(config, compile=compiled).run(name, 64, 1e-3)
        first = run.model.stack.blocks  # without dropout, which compiled draws other numbers for
        plain = tuple(replace(b, dropout=0.0) if hasattr(b, "dropout") else b for b in first)
        stack = replace(run.model.stack, blocks=plain)
        run = replace(run, model=replace(run.model, stack=stack))
        losses.append(train(run, tmp_path / str(compiled), quiet=True, device="cuda").final_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
