"""MQAR: the model, one training, and sweeps that go on where they were left."""

import json
import math
from dataclasses import replace

import pytest
import torch
import typer
from mezzo_core.cli import run as run_app
from mezzo_core.data.mqar import MQARConfig
from mezzo_core.errors import UserError
from mezzo_core.papers import load_experiments
from mezzo_gsa.gsa import SPANS, GSAConfig
from mezzo_gsa.mqar import model as models
from mezzo_gsa.mqar import sweep as sweeps
from mezzo_gsa.mqar import training as trainings
from mezzo_gsa.mqar.command import mqar
from mezzo_gsa.mqar.config import RecallTraining, SweepConfig
from mezzo_gsa.mqar.model import MIXERS, RecallModel, build_model
from mezzo_gsa.mqar.result import SweepResult
from mezzo_gsa.mqar.sweep import sweep
from mezzo_gsa.mqar.training import TrainStep, draw_rows, measure_accuracy, train_run

CPU = torch.device("cpu")
TINY = RecallTraining(
    task=MQARConfig(vocab_size=32, seq_len=16, num_pairs=4),
    train_rows=20,
    test_rows=8,
    batch_size=8,
    epochs=2,
)
TWO = SweepConfig(("attention", "gsa"), (16,), (1e-3,), training=TINY)


def silent(line):
    assert isinstance(line, str)


def tiny_model(name, d_model=16, **conv):
    torch.manual_seed(0)
    return build_model(name, d_model, vocab_size=32, seq_len=16, num_layers=2, **conv)


@pytest.mark.parametrize("name", MIXERS)
def test_an_answer_is_the_logits_at_its_position(name):
    model = tiny_model(name).eval()
    _, rows = draw_rows(TINY, CPU)
    everywhere = torch.arange(16).expand(len(rows.inputs), -1)
    whole = model(rows.inputs, everywhere)
    index = rows.positions[:, :, None].expand(-1, -1, 32)
    assert torch.equal(model(rows.inputs, rows.positions), whole.gather(1, index))


@pytest.mark.parametrize("conv_width", [0, 3])
@pytest.mark.parametrize("name", MIXERS)
def test_an_answer_depends_on_the_tokens_up_to_it_alone(name, conv_width):
    model = tiny_model(name, conv_width=conv_width).eval()
    inputs = torch.randint(1, 32, (4, 16))
    positions = torch.tensor([[6]]).expand(4, -1)
    answers = model(inputs, positions)
    later, now, earlier = inputs.clone(), inputs.clone(), inputs.clone()
    later[:, 7:] = 0
    now[:, 6] = 0
    earlier[:, 5] = 0
    torch.testing.assert_close(model(later, positions), answers, rtol=1e-5, atol=1e-6)
    for changed in (now, earlier):
        assert not torch.allclose(model(changed, positions), answers, rtol=1e-3, atol=1e-4)


def test_attention_alone_learns_positions_and_the_head_is_the_embedding():
    for name in MIXERS:
        model = build_model(name, 16, vocab_size=1009, seq_len=16, num_layers=2)
        names = dict(model.named_parameters())
        assert ("embed_position.weight" in names) == (name == "attention")
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
            model = build_model(name, width, vocab_size=8192, seq_len=512, num_layers=2)
        counters = 2 * 8 if name == "retnet" else 0
        assert model.state_bytes(512) == 2 * 4 * count + counters, name


def test_matrices_of_mixers_may_start_by_their_columns():
    torch.manual_seed(0)
    spread = GSAConfig(num_heads=1, gate_spans=SPANS)
    usual, wide = (
        RecallModel([spread.build(256)], 256, vocab_size=64, num_positions=None, fan_in=fan_in)
        for fan_in in (False, True)
    )
    for model, deviation in ((usual, 0.02), (wide, 1 / 16)):
        for mixer in model.mixers:
            for layer in (mixer.in_proj, mixer.out_proj):
                assert layer.weight.std().item() == pytest.approx(deviation, rel=0.02)
            assert torch.equal(mixer.in_proj.bias, usual.mixers[0].in_proj.bias)
        assert model.embed.weight.std().item() == pytest.approx(0.02, rel=0.05)
    with pytest.raises(UserError, match=r"init must be one of .*, got 'fan'"):
        replace(TINY, init="fan")


def test_a_convolution_is_the_first_layer_and_sees_its_width():
    model = tiny_model("gla", conv_width=3)
    assert len(model.mixers) == 1
    assert model.state_bytes(16) == tiny_model("gla").state_bytes(16) // 2 + 2 * 16 * 4
    x = torch.randn(1, 8, 16)
    out = model.conv(x)
    for back in range(4):
        changed = x.clone()
        changed[:, 5 - back] = 0
        assert torch.equal(model.conv(changed)[:, 5], out[:, 5]) == (back == 3), back
    for wrong in ({"conv_width": -1}, {"conv_width": 3, "num_layers": 1}):
        with pytest.raises(UserError, match="conv_width must be 0 or more"):
            replace(TINY, **wrong)


@pytest.mark.parametrize(
    ("change", "name", "setting", "left_out"),
    [
        ({"conv_width": 3}, "conv", "a causal convolution of 3 tokens, then 1 of", "3, the "),
        ({"init": "fan_in"}, "fan_in", "those of mixers started with a dev", "fan_in, the "),
        ({"conv_width": 3, "init": "fan_in"}, "conv_fan_in", "", "init is fan_in, the protocol's"),
    ],
)
def test_a_sweep_of_other_models_has_a_file_of_its_own(tmp_path, change, name, setting, left_out):
    config = SweepConfig(models=("gla",), widths=(16,), learning_rates=(1e-3,), training=TINY)
    changed = replace(config, training=replace(TINY, **change))
    for each in (config, changed):
        assert len(sweep(each, tmp_path, str, device="cpu").runs) == 1
    content = json.loads((tmp_path / f"mqar_{name}.json").read_text())
    assert setting in content["setting"]
    assert any(left_out in sentence for sentence in content["left_out"])
    training = json.loads((tmp_path / "mqar.json").read_text())["training"]
    assert (training["conv_width"], training["init"]) == (0, "zoology")


def test_accuracy_is_the_share_of_questions_answered_right():
    class HalfRight(torch.nn.Module):
        def forward(self, inputs, positions):
            answers = values.clone()
            answers[:, ::2] = 0
            return torch.nn.functional.one_hot(answers, 32).float()

    _, rows = draw_rows(replace(TINY, batch_size=16), CPU)
    values = rows.values
    assert measure_accuracy(HalfRight(), rows, replace(TINY, batch_size=16)) == 0.5


class WatchedStep(TrainStep):
    """A step that records what it is asked for."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.rates, self.rows = [], []
        WatchedStep.last = self

    def begin_epoch(self, lr):
        self.rates.append(lr)
        self.rows.append([])
        super().begin_epoch(lr)

    def __call__(self, rows):
        self.rows[-1].append(rows.tolist())
        super().__call__(rows)


def test_rows_of_fewer_pairs_ask_them_repeatedly():
    task = replace(TINY.task, num_pairs=4)
    training = replace(TINY, task=task, train_pairs=(2, 4), train_rows=20)
    train, test = draw_rows(training, CPU)
    assert {part.shape[0] for part in train} == {20}
    assert train.positions.shape == train.values.shape == (20, 4)
    few = train.positions[:10]
    assert torch.equal(few[:, :2], few[:, 2:]), "two questions, twice"
    asked = train.inputs.gather(1, train.positions)
    places = (train.inputs[:, None, : 2 * 4] == asked[:, :, None]).int().argmax(2)  # of the keys
    assert torch.equal(train.inputs.gather(1, places + 1), train.values)
    alone = draw_rows(replace(training, train_pairs=()), CPU)
    assert torch.equal(test.inputs, alone[1].inputs), "the test is the task's"


def test_the_rate_falls_by_epoch_and_an_epoch_takes_no_row_twice(monkeypatch):
    monkeypatch.setattr(trainings, "TrainStep", WatchedStep)
    train_run("attention", 16, 1e-3, replace(TINY, epochs=4), *draw_rows(TINY, CPU))
    rates = [1e-3 * (1 + math.cos(math.pi * epoch / 4)) / 2 for epoch in range(4)]
    assert WatchedStep.last.rates == pytest.approx(rates)
    for batches in WatchedStep.last.rows:
        assert [len(batch) for batch in batches] == [8, 8]
        assert len({row for batch in batches for row in batch}) == 16
    first, second = WatchedStep.last.rows[:2]
    assert first != second


def test_a_step_is_adamw_on_the_mean_loss_of_its_rows(monkeypatch):
    monkeypatch.setattr(models, "DROPOUT", 0.0)
    train, _ = draw_rows(TINY, CPU)
    ours, theirs = tiny_model("attention"), tiny_model("attention")
    step = TrainStep(ours, train, TINY)
    step.begin_epoch(1e-2)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    everywhere = torch.arange(16).expand(8, -1)
    for start in (0, 8):
        rows = torch.arange(start, start + 8)
        step(rows)
        labels = torch.full((8, 16), -100).scatter(1, train.positions[rows], train.values[rows])
        logits = theirs(train.inputs[rows], everywhere)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert step.take_mean_loss() == pytest.approx(sum(losses) / 2, rel=1e-5)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_a_run_is_repeatable_and_says_what_it_is():
    data = draw_rows(TINY, CPU)
    first, again = (train_run("gla", 16, 1e-3, TINY, *data) for _ in range(2))
    assert replace(first, seconds=0.0) == replace(again, seconds=0.0)
    assert (first.model, first.d_model, first.lr, first.stopped) == ("gla", 16, 1e-3, "epochs")
    assert len(first.curve) == 2
    assert first.accuracy == first.curve[-1].accuracy
    assert first.parameters == sum(w.numel() for w in tiny_model("gla").parameters())


def test_a_limit_of_seconds_ends_a_run_after_the_epoch_that_passed_it():
    run = train_run("attention", 16, 1e-3, replace(TINY, seconds=1e-9), *draw_rows(TINY, CPU))
    assert (run.stopped, len(run.curve)) == ("seconds", 1)


def test_a_loss_that_is_no_number_ends_a_run(tmp_path):
    config = replace(TWO, models=("attention",), learning_rates=(1e38,))
    (run,) = sweep(config, tmp_path, silent, device="cpu").runs
    assert run.stopped == "diverged"
    assert run.curve[-1].train_loss is None
    json.loads((tmp_path / "mqar.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.slow
def test_attention_learns_to_recall():
    training = replace(TINY, train_rows=12_000, test_rows=200, batch_size=64, epochs=6)
    run = train_run("attention", 64, 1e-3, training, *draw_rows(training, CPU))
    assert run.stopped == "solved"
    assert run.accuracy > 0.99
    assert len(run.curve) < 6


def test_a_sweep_leaves_a_result_that_reports_read(tmp_path):
    lines = []
    sweep(TWO, tmp_path / "results" / "here", lines.append, device="cpu")
    assert (tmp_path / "results" / "here" / "mqar.png").read_bytes().startswith(b"\x89PNG")
    assert any("gsa C=16 lr 0.001: accuracy" in line and "state" in line for line in lines)
    (experiment,) = load_experiments(tmp_path / "results")
    assert experiment.ids == ("gsa.claim.mqar",)
    assert not experiment.same_setting
    assert experiment.measurement.columns == ("C=16",)
    assert [row.model for row in experiment.measurement.rows] == ["attention", "gsa"]
    content = json.loads((tmp_path / "results" / "here" / "mqar.json").read_text())
    assert [len(run["curve"]) for run in content["runs"]] == [2, 2]


def test_finished_runs_are_not_run_again_and_a_sweep_can_be_widened(tmp_path, monkeypatch):
    sweep(TWO, tmp_path, silent, device="cpu")
    done = []

    def watched(*arguments):
        done.append(arguments[:3])
        return train_run(*arguments)

    monkeypatch.setattr(sweeps, "train_run", watched)
    before = (tmp_path / "mqar.json").read_text()
    again = sweep(TWO, tmp_path, silent, device="cpu")
    assert (done, len(again.runs)) == ([], 2)
    assert (tmp_path / "mqar.json").read_text() == before
    wider = replace(TWO, widths=(32, 16), training=replace(TINY, compile=True, graph=False))
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    result = sweep(wider, tmp_path, silent, device="cpu")
    assert done == [("attention", 32, 1e-3), ("gsa", 32, 1e-3)]
    assert result.to_json()["columns"] == ["C=16", "C=32"]


def test_a_folder_keeps_one_way_of_training(tmp_path):
    sweep(replace(TWO, models=("attention",)), tmp_path, silent, device="cpu")
    other = replace(TWO, training=replace(TINY, epochs=3, seed=5))
    with pytest.raises(UserError, match="runs with another epochs, seed: choose another folder"):
        sweep(other, tmp_path, silent, device="cpu")
    (tmp_path / "mqar.json").write_text("{}")
    with pytest.raises(UserError, match="no result of an MQAR sweep"):
        sweep(TWO, tmp_path, silent, device="cpu")


def finished(model="gsa", width=64, lr=1e-3, accuracy=0.5, stopped="epochs"):
    return trainings.RecallRun(model, width, lr, accuracy, stopped, 1, 1, 1.0, None, ())


def test_the_best_learning_rate_of_each_is_reported(tmp_path):
    result = SweepResult(TINY, tmp_path, CPU)
    accuracies = {("gla", 64): (0.1, 0.3, 0.2), ("gsa", 64): (0.6, 0.5, 0.4)}
    for (model, width), each in accuracies.items():
        for lr, accuracy in zip((1e-4, 1e-3, 1e-2), each, strict=True):
            result.add(finished(model, width, lr, accuracy))
    result.add(finished("gsa", 128, 1e-3, 0.7))
    best = [(run.model, run.d_model, run.lr) for run in result.best()]
    assert best == [("gsa", 64, 1e-4), ("gsa", 128, 1e-3), ("gla", 64, 1e-3)]
    rows = {row["model"]: row["values"] for row in result.to_json()["rows"]}
    assert rows == {"gsa": [0.6, 0.7], "gla": [0.3, "-"]}


def test_all_that_was_left_out_is_said(tmp_path):
    training = RecallTraining(train_rows=20_000, train_pairs=(16, 64), seconds=60.0)
    result = SweepResult(training, tmp_path, CPU)
    result.runs = [finished("gsa", 64, 1e-4, stopped="seconds"), finished(lr=2.15e-3)]
    result.runs += [finished("gla", 64, 1e-4, 0.995, "solved")]
    left_out = result.left_out()
    assert left_out[:2] == [
        "rows to train on have 16, 64 pairs, in equal shares, the protocol's 64",
        "train_rows is 20,000, the protocol's 100,000",
    ]
    assert "gsa C=64 was not trained with lr 0.000464, 0.01" in left_out
    assert (
        "gla C=64 was not trained with lr 0.000464, 0.00215, 0.01 (another solved the task)"
    ) in left_out
    assert "gla was not trained at C=128, 256, 512" in left_out
    assert left_out[-1] == "gsa C=64 lr 0.0001 was stopped after 0 epochs by the limit of 60 s"


def test_nothing_is_left_out_of_the_whole_protocol(tmp_path):
    result, config = SweepResult(RecallTraining(), tmp_path, CPU), SweepConfig()
    for model in config.models:
        for width in config.widths:
            result.runs += [finished(model, width, lr) for lr in config.learning_rates]
    assert result.left_out() == []
    assert result.to_json()["same_setting"]


def test_other_learning_rates_are_skipped_once_one_has_solved_the_task(tmp_path, monkeypatch):
    def solved(model, width, lr, *others):
        return finished(model, width, lr, 0.995, "solved" if lr == 1e-3 else "epochs")

    monkeypatch.setattr(sweeps, "train_run", solved)
    rates = (1e-4, 1e-3, 1e-2)
    config = replace(TWO, models=("gsa",), learning_rates=rates, skip_solved=True)
    result = sweep(config, tmp_path / "skipping", silent, device="cpu")
    assert [run.lr for run in result.runs] == [1e-4, 1e-3]
    config = replace(config, skip_solved=False)
    result = sweep(config, tmp_path / "all", silent, device="cpu")
    assert [run.lr for run in result.runs] == [1e-4, 1e-3, 1e-2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ("gas",)}, "no model is named 'gas'; did you mean gsa"),
        ({"models": ()}, "models must be one or more different values"),
        ({"widths": (64, 64)}, "widths must be one or more different values"),
        ({"widths": (0,)}, "widths must be at least 1, got 0"),
        ({"learning_rates": (0.0,)}, r"learning_rates must be positive, got 0\.0"),
    ],
)
def test_a_sweep_that_cannot_be_is_named(options, message):
    with pytest.raises(UserError, match=message):
        SweepConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"train_rows": 100}, "train_rows must fill a batch of 128, got 100"),
        ({"train_pairs": (8, 3)}, "train_pairs must divide the task's 64, got 3"),
        ({"seconds": 0.0}, r"seconds must be positive, got 0\.0"),
        ({"precision": "fp16"}, "precision must be one of .* got 'fp16'"),
    ],
)
def test_a_training_that_cannot_be_is_named(options, message):
    with pytest.raises(UserError, match=message):
        RecallTraining(**options)


def test_a_width_that_a_model_cannot_have_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(UserError, match="hgrn2 cannot have width 200: head_dim must divide"):
        sweep(replace(TWO, models=("gsa", "hgrn2"), widths=(200,)), tmp_path, silent)
    assert not list(tmp_path.iterdir())


def run_command(*arguments):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(mqar)
    with pytest.raises(SystemExit) as exit:
        run_app(app, [str(argument) for argument in arguments])
    return exit.value.code


def test_the_command_sweeps_and_shows_states_beside_accuracies(tmp_path, capsys):
    options = "--model gsa --width 16 --lr 0.001 --seq-len 16 --num-pairs 4 --vocab-size 32 "
    options += "--train-rows 16 --test-rows 4 --batch-size 8 --epochs 1 --device cpu"
    assert run_command(*options.split(), "--out", tmp_path) == 0
    shown = capsys.readouterr().out
    assert "state (bytes a row)" in shown
    assert f"{2 * 2 * 64 * 16 * 4:,}" in shown
    assert json.loads((tmp_path / "mqar.json").read_text())["training"]["epochs"] == 1


def test_the_command_answers_a_wrong_value_in_one_line(tmp_path, capsys):
    assert run_command("--num-pairs", 200, "--out", tmp_path) == 2
    assert "error: num_pairs must be at most seq_len / 4" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MIXERS)
def test_a_step_replayed_as_a_graph_is_the_step(name, precision, monkeypatch):
    monkeypatch.setattr(models, "DROPOUT", 0.0)
    cuda = torch.device("cuda")
    training = replace(TINY, task=MQARConfig(256, 128, 16), train_rows=64, precision=precision)
    train, _ = draw_rows(training, cuda)
    losses = {}
    for graph in (False, True):
        torch.manual_seed(0)
        model = build_model(name, 64, vocab_size=256, seq_len=128, num_layers=2).to(cuda)
        step = TrainStep(model, train, replace(training, graph=graph))
        step.begin_epoch(1e-3)
        losses[graph] = []
        for start in (*range(0, 64, 8), *range(0, 64, 8)):
            if start == 32:
                step.begin_epoch(5e-4)
            step(torch.arange(start, start + 8, device=cuda))
            losses[graph].append(step.take_mean_loss())
    assert losses[True][-1] < losses[True][0]
    assert losses[True] == pytest.approx(losses[False], rel=1e-4 if precision == "fp32" else 1e-2)


@pytest.mark.gpu
def test_a_compiled_run_learns_as_an_eager_one(monkeypatch):
    monkeypatch.setattr(models, "DROPOUT", 0.0)
    training = replace(TINY, task=MQARConfig(256, 128, 16), train_rows=64, precision="fp32")
    data = draw_rows(training, torch.device("cuda"))
    eager = train_run("gsa", 64, 1e-3, training, *data)
    compiled = train_run("gsa", 64, 1e-3, replace(training, compile=True), *data)
    found, wanted = ([epoch.train_loss for epoch in run.curve] for run in (compiled, eager))
    assert found == pytest.approx(wanted, rel=1e-4)
