"""MQAR: the models, one training, and sweeps that go on where they were left."""

import json
import math
import re
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
import typer
from mezzo_core.bench import Result, origin, training
from mezzo_core.bench import sweep as core_sweep
from mezzo_core.cli import run as run_app
from mezzo_core.config_json import from_json, to_json
from mezzo_core.errors import UserError
from mezzo_core.nn import generate
from mezzo_core.papers.measurement import How, read_result
from mezzo_core.testing.laws import check_segments, check_state_bytes
from mezzo_core.train.loop import train
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.mqar import command
from mezzo_gsa.mqar.command import mqar
from mezzo_gsa.mqar.protocols import DROPOUT, NAMES, PROTOCOLS, SweepConfig
from mezzo_gsa.mqar.sweep import Choice, add_best, sweep
from mezzo_gsa.mqar.task import MQARConfig

TASK = MQARConfig(vocab_size=32, seq_len=16, num_pairs=4, train_rows=20, test_rows=8)
TINY = SweepConfig(
    task=TASK,
    models=("attention", "gsa"),
    widths=(16,),
    learning_rates=(1e-3,),
    batch_size=8,
    epochs=2,
)

AUTHORS = {
    field: getattr(PROTOCOLS["authors"], field)
    for field in ("protocol", "num_layers", "num_slots", "damping", "scale", "identity_mlp")
}


def silent(line):
    assert isinstance(line, str)


def tiny_model(name, **changes):
    torch.manual_seed(0)
    return replace(TINY, **changes).run(name, 16, 1e-3).model.build().eval()


@pytest.mark.parametrize("conv_width", [0, 3])
@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize(
    "changes", [{}, {"conv_width": 3}, AUTHORS], ids=["plain", "conv", "authors"]
)
@pytest.mark.parametrize("name", NAMES)
def test_the_models_keep_the_contract(name, changes):
    model = tiny_model(name, **changes)
    check_segments(model.stack, num_tokens=13, splits=(4, 0, 9))
    check_state_bytes(model.stack, 13)
    (new,) = generate(model, [[1, 2, 3]], max_new_tokens=4)
    logits = model(torch.tensor([[1, 2, 3, *new]])).logits[0, 2:-1]
    assert logits.argmax(-1).tolist() == new


def test_attention_alone_learns_positions_and_the_head_is_the_embedding():
    task = replace(TASK, vocab_size=1009)
    for name in NAMES:
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
    assert set(numbers) == set(NAMES)
    for name, count in numbers.items():
        with torch.device("meta"):
            model = SweepConfig().run(name, width, 1e-3).model.build()
        counters = 2 * 8 if name == "retnet" else 0
        assert model.state_bytes(512) == 2 * 4 * count + counters, name


@pytest.mark.parametrize("width", SweepConfig().widths)
def test_the_models_of_the_authors_have_their_states_and_sizes(width):
    shapes = {  # numbers of a layer's state, and of its matrices in squares of the width
        "attention": (512 * 2 * width, 4),
        "gsa": (2 * (width // 4) * width, 5),
        "gsa_one_head": (2 * (width // 4) * width, 4.25),
        "gla": (width * width // 2, 5),
        "hgrn2": (width * width // 2, 4),
        "retnet": (width * width, 8),
    }
    assert set(shapes) == set(NAMES)
    for name, (numbers, squares) in shapes.items():
        with torch.device("meta"):
            model = PROTOCOLS["authors"].run(name, width, 1e-3).model.build()
        counters = 4 * 8 if name == "retnet" else 0
        assert model.state_bytes(512) == 4 * 4 * numbers + counters, name
        layer = model.stack.blocks[-1]
        weights = sum(w.numel() for w in layer.parameters() if w.ndim == 2)
        low_rank = 2 * 16 * width if name == "gla" else 0  # of its gate
        assert weights - low_rank == squares * width**2, name
        assert layer.mlp_norm is not None


def test_gsa_is_that_of_the_authors():
    layers = PROTOCOLS["authors"].run("gsa", 128, 1e-3).model.stack.blocks
    expected = GSAConfig(num_heads=4, num_slots=32, damping=16.0, scale=None)
    assert [layer.mixer for layer in layers] == [expected] * 4
    bounds = [layer.mixer.lower_bound for layer in hgrn2_layers("authors")]
    assert bounds == [0] * 4


def hgrn2_layers(protocol):
    config = replace(PROTOCOLS[protocol], num_layers=4)
    return config.run("hgrn2", 128, 1e-3).model.stack.blocks


def test_more_layers_are_more_of_the_same():
    for name in NAMES:
        two, three = (tiny_model(name, num_layers=count).stack.blocks for count in (2, 3))
        assert len(three) == len(two) + 1
        assert str(three[-1]) == str(two[-1])
    assert [layer.mixer.lower_bound for layer in hgrn2_layers("zoology")] == [0, 0.25, 0.5, 0.75]
    blocks = tiny_model("gsa", num_layers=3, conv_width=3).stack.blocks
    assert [type(block.mixer).__name__ for block in blocks] == ["ShortConv", "GSA", "GSA"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_slots": 20}, {"num_slots": 20}),
        ({"num_slots": 0.25}, {"num_slots": 4}),
        ({"damping": 3.0}, {"damping": 3.0}),
        ({"scale": "head_width"}, {"scale": None}),
    ],
)
def test_slots_damping_and_scale_are_those_of_gsa_alone(change, expected):
    def mixers(name, **changes):
        blocks = replace(TINY, **changes).run(name, 16, 1e-3).model.stack.blocks
        return [block.mixer for block in blocks if hasattr(block, "mixer")]

    for name in NAMES:
        plain, changed = mixers(name), mixers(name, **change)
        is_gsa = name.startswith("gsa")
        assert changed == ([replace(each, **expected) for each in plain] if is_gsa else plain)


@pytest.mark.parametrize(("share", "slots"), [(0.07, 7), (0.29, 29)])
def test_a_share_of_the_width_that_is_rounded_is_a_whole_number(share, slots):
    blocks = replace(TINY, num_slots=share).run("gsa", 100, 1e-3).model.stack.blocks
    assert [block.mixer.num_slots for block in blocks] == [slots, slots]


def test_an_identity_can_take_the_mlps_place():
    for block in tiny_model("gla", identity_mlp=True).stack.blocks:
        assert block.mlp_norm is not None
    for block in tiny_model("gla").stack.blocks:
        assert block.mlp_norm is None


def test_the_first_layer_may_be_a_convolution_and_drops_embeddings_out():
    plain, conv = (tiny_model("gla", conv_width=width).stack.blocks for width in (0, 3))
    assert len(plain) == len(conv) == 2
    assert conv[0].state_bytes(16) == 2 * 16 * 4
    assert conv[1].state_bytes(16) == plain[1].state_bytes(16)
    for blocks in (plain, conv, tiny_model("attention").stack.blocks[1:]):
        assert [block.dropout.p for block in blocks] == [DROPOUT, 0]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"conv_width": 3}, "conv"),
        ({"init": "fan_in"}, "fan_in"),
        ({"conv_width": 3, "init": "fan_in"}, "conv_fan_in"),
        ({"num_layers": 1}, "1_layers"),
        ({"num_slots": 0.5, "damping": 16.0}, "0.5_slots_damping_16"),
        ({"scale": "head_width"}, "scale_head_width"),
        ({"identity_mlp": True}, "identity"),
    ],
)
def test_a_sweep_of_other_models_has_a_file_of_its_own(tmp_path, change, name):
    config = replace(TINY, models=("gla",))
    plain, other = (
        sweep(each, tmp_path, silent, device="cpu") for each in (config, replace(config, **change))
    )
    assert (plain.path.name, other.path.name) == ("mqar.json", f"mqar_{name}.json")
    for field, value in change.items():
        assert f"{field} {value}, not" in other.header.setting
        assert f"{field} {value}" not in plain.header.setting


def test_results_of_the_authors_models_are_compared_with_their_protocol(tmp_path):
    tiny = {field: getattr(TINY, field) for field in ("task", "widths", "batch_size", "epochs")}
    config = replace(
        PROTOCOLS["authors"], **tiny, models=("gla",), num_layers=2, identity_mlp=False
    )
    config = replace(config, learning_rates=(1e-3,))
    result = sweep(config, tmp_path, silent, device="cpu")
    assert result.path.name == "mqar_authors_2_layers_no_identity.json"
    assert "num_layers 2, not 4; identity_mlp False, not True" in result.header.setting
    assert "damping" not in result.header.setting.split("Here: ")[1]
    assert result.header.title.endswith("the authors' setting")


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
    (first,), (again,) = (
        sweep(config, tmp_path / name, silent, device="cpu").entries for name in "ab"
    )
    assert first["steps"] == again["steps"]
    assert (first["model"], first["column"], first["seed"]) == ("GLA", "C=16", 123)
    assert first["lr"] == 1e-3
    assert first["parameters"] == sum(w.numel() for w in tiny_model("gla").parameters())
    assert first["state_bytes"] == tiny_model("gla").state_bytes(16)
    log = (tmp_path / "a/mqar/gla_c16_seed123_lr0.001/log.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["val_accuracy"] == first["value"]
    assert [step for step, _ in first["steps"]["val"]] == [2, 4]


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
    folder = tmp_path / "mqar/attention_c16_seed123_lr0.001"
    with pytest.raises(StoppedError):
        train(run, folder, quiet=True, device="cpu", on_step=stop)
    train(run, tmp_path / "whole", quiet=True, device="cpu")
    sweep(replace(TINY, models=("attention",)), tmp_path, silent, device="cpu")
    assert rows(folder) == rows(tmp_path / "whole")


def test_a_loss_that_is_no_number_ends_a_run(tmp_path):
    lines = []
    config = replace(TINY, models=("attention",), learning_rates=(1e38, 1e-3))
    (entry,) = sweep(config, tmp_path / "both", lines.append, device="cpu").entries
    assert lines[0] == "attention C=16 seed 123 lr 1e+38: diverged"
    assert (entry["lr"], [run["accuracy"] for run in entry["others"]]) == (1e-3, ["diverged"])
    only = replace(config, learning_rates=(1e38,))
    (entry,) = sweep(only, tmp_path / "one", silent, device="cpu").entries
    assert entry["value"] == "diverged"


@pytest.mark.slow
def test_attention_learns_to_recall(tmp_path):
    task = replace(TASK, train_rows=12_000, test_rows=200)
    config = replace(TINY, task=task, models=("attention",), widths=(64,), batch_size=64, epochs=6)
    (entry,) = sweep(config, tmp_path, silent, device="cpu").entries
    assert entry["value"] > 0.99
    assert entry["steps"]["val"][-1][0] < 6 * 187


def test_what_is_chosen_twice_is_trained_once(tmp_path):
    config, cpu = replace(TINY, models=("gsa",)), torch.device("cpu")
    result = Result(tmp_path / "mqar.json", config.header(), origin(cpu), silent)
    lines = []
    add_best(result, [Choice(config, "gsa", 16)] * 2, lines.append, runs=tmp_path, device=cpu)
    assert (len(result.entries), len(lines)) == (1, 1)


def test_a_sweep_leaves_a_result_that_reports_read(tmp_path):
    lines = []
    result = sweep(TINY, tmp_path / "here", lines.append, device="cpu")
    assert any(re.match(r"gsa C=16 seed 123 lr 0.001: 0\.\d+$", line) for line in lines)
    read = read_result(result.path)
    assert (read.kind, read.how, read.columns) == ("recall", How.SCALED_DOWN, ("C=16",))
    assert [model for _, model in read.rows] == ["Xfmr++", "GSA"]
    assert {entry.seed for entry in read.entries} == {TASK.seed}


def test_finished_runs_are_not_run_again(tmp_path, monkeypatch):
    stepped = []

    def watched(config, *arguments, on_step, **options):
        def watch(row):
            if config.optim.lr == dies:
                raise KeyboardInterrupt
            stepped.append((config.optim.lr, row["step"]))
            on_step(row)

        return train(config, *arguments, on_step=watch, **options)

    monkeypatch.setattr(training, "train", watched)
    config = replace(TINY, models=("attention",), learning_rates=(1e-3, 1e-2))
    dies = 1e-2
    with pytest.raises(KeyboardInterrupt):
        sweep(config, tmp_path, silent, device="cpu")
    assert stepped == [(1e-3, step) for step in (1, 2, 3, 4)]
    assert not (tmp_path / "mqar.json").exists()
    dies = None
    whole = sweep(config, tmp_path, silent, device="cpu")
    assert stepped[4:] == [(1e-2, step) for step in (1, 2, 3, 4)]
    before = whole.path.read_text()
    assert sweep(config, tmp_path, silent, device="cpu").path.read_text() == before
    assert len(stepped) == 8


def test_a_result_keeps_one_way_of_training(tmp_path):
    config = replace(TINY, models=("attention",))
    sweep(config, tmp_path, silent, device="cpu")
    for other in (
        replace(config, epochs=3),
        replace(config, task=replace(TASK, seed=5)),
        replace(config, learning_rates=(1e-3, 1e-2)),
    ):
        with pytest.raises(UserError, match="another setting"):
            sweep(other, tmp_path, silent, device="cpu")


def test_the_best_learning_rate_of_each_is_reported(tmp_path, monkeypatch):
    accuracies = {1e-4: 0.5, 1e-3: 0.995, 1e-2: 0.7}

    def trained(config, folder, device, *, resume):
        return {"accuracy": accuracies[config.optim.lr], "perplexity": 1.0}

    monkeypatch.setattr(core_sweep, "measure_run", trained)
    config = replace(TINY, models=("gsa",), learning_rates=tuple(accuracies))
    (entry,) = sweep(config, tmp_path, silent, device="cpu").entries
    assert (entry["value"], entry["lr"]) == (0.995, 1e-3)
    assert [run["lr"] for run in entry["others"]] == [1e-2, 1e-4]
    config = replace(config, skip_solved=True)
    (entry,) = sweep(config, tmp_path / "skipping", silent, device="cpu").entries
    assert [run["lr"] for run in entry["others"]] == [1e-4]


@pytest.mark.parametrize("whole", PROTOCOLS.values(), ids=PROTOCOLS)
def test_the_whole_protocol_alone_is_the_papers_setting(whole):
    assert whole.header().how == "the paper's setting"
    same = {"models": (*whole.models, "gsa_one_head"), "compile": True, "cuda_graph": True}
    assert replace(whole, **same).header().how == "the paper's setting"
    for change in (
        {"models": ("gsa",)},
        {"widths": (64,)},
        {"num_layers": 3},
        {"num_slots": 32},
        {"damping": 12.0},
        {"task": replace(whole.task, random_non_queries=True)},
        {"skip_solved": True},
        {"task": replace(whole.task, train_pairs=(16, 64))},
    ):
        assert replace(whole, **change).header().how == "scaled down"
    assert "Here: train_pairs (16, 64), not ()" in replace(whole, **change).header().setting


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ("gas",)}, "no model is named 'gas'; did you mean gsa"),
        ({"task": MQARConfig(train_rows=100)}, "batch_size must be from 1 to train_rows = 100"),
        ({"precision": "fp16"}, "precision must be one of .* got 'fp16'"),
        ({"init": "fan"}, "init must be one of .*, got 'fan'"),
        ({"protocol": "author"}, "protocol must be one of .*, got 'author'"),
        ({"learning_rates": ()}, r"learning_rates must be at least one, got \(\)"),
        ({"learning_rates": (1e-3, 0.0)}, "learning_rates must be positive and finite, got .*, 0"),
        ({"learning_rates": (math.nan,)}, "learning_rates must be positive and finite, got .nan"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"conv_width": -1}, "conv_width must be at least 0, got -1"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_layers": 1, "conv_width": 3}, "num_layers must be at least 2, got 1"),
        ({"num_slots": 0}, "num_slots must be a whole number or below 1, got 0"),
        ({"num_slots": 2.5}, "num_slots must be a whole number or below 1, got 2.5"),
        ({"num_slots": math.inf}, "num_slots must be a whole number or below 1, got inf"),
        ({"damping": 0.0}, r"damping must be positive and finite, got 0\.0"),
        ({"damping": math.inf}, "damping must be positive and finite, got inf"),
        ({"scale": "head"}, "scale must be one of .*, got 'head'"),
        ({"identity_mlp": 1}, "identity_mlp must be bool"),
    ],
)
def test_a_sweep_that_cannot_be_is_named(options, message):
    with pytest.raises(UserError, match=message):
        SweepConfig(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ("gsa", "hgrn2"), "widths": (200,)}, "hgrn2 .* 200: head_dim must divide"),
        ({"widths": (0,)}, "d_model must be"),
        ({"num_slots": 0.3}, "num_slots 0.3 of width 16 is 4.8, no whole number"),
        (
            {"models": ("hgrn2",), "protocol": "authors", "widths": (1,)},
            "hgrn2 cannot have width 1",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is_trained(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        sweep(replace(TINY, **change), tmp_path, silent)
    assert not list(tmp_path.iterdir())


def run_command(*arguments):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(mqar)
    with pytest.raises(SystemExit) as exit:
        run_app(app, [str(argument) for argument in arguments])
    return exit.value.code


def test_the_command_sweeps_and_shows_states_beside_accuracies(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    out = tmp_path / "q[/b]"
    options = "--model gsa --width 16 --lr 0.001 --seq-len 16 --num-pairs 4 --vocab-size 32 "
    options += "--train-rows 16 --test-rows 4 --batch-size 8 --epochs 1 --seed 7 --device cpu"
    assert run_command(*options.split(), "--out=~/q[/b]") == 0
    shown = capsys.readouterr().out
    assert "state (bytes a row)" in shown
    assert f"{out / 'mqar.json'} has every run" in shown
    assert f"{2 * 2 * 64 * 16 * 4:,}" in shown
    setting = read_result(out / "mqar.json").setting
    assert "seed 7, not 123" in setting
    assert "epochs 1, not 64" in setting


SWEPT = {
    "--model gla --model gsa": {"models": ("gla", "gsa")},
    "--width 32 --width 8": {"widths": (32, 8)},
    "--lr 0.1": {"learning_rates": (0.1,)},
    "--skip-solved": {"skip_solved": True},
    "--batch-size 5": {"batch_size": 5},
    "--epochs 3": {"epochs": 3},
    "--num-layers 3": {"num_layers": 3},
    "--conv-width 2": {"conv_width": 2},
    "--num-slots 0.5": {"num_slots": 0.5},
    "--damping 2": {"damping": 2.0},
    "--init fan_in": {"init": "fan_in"},
    "--precision bf16": {"precision": "bf16"},
    "--compile": {"compile": True},
    "--cuda-graph": {"cuda_graph": True},
}
ASKED = {
    "--seq-len 400": {"seq_len": 400},
    "--num-pairs 9": {"num_pairs": 9},
    "--vocab-size 999": {"vocab_size": 999},
    "--random-non-queries": {"random_non_queries": True},
    "--train-pairs 4 --train-pairs 8": {"train_pairs": (4, 8)},
    "--train-rows 200": {"train_rows": 200},
    "--test-rows 7": {"test_rows": 7},
    "--seed 0": {"seed": 0},
}
UNLIKE = {  # of the options that differ between the protocols, what is neither's default
    "zoology": {
        "--scale head_width": {"scale": "head_width"},
        "--identity-mlp": {"identity_mlp": True},
    },
    "authors": {"--scale one": {"scale": "one"}, "--no-identity-mlp": {"identity_mlp": False}},
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_option_of_the_command_replaces_its_part_of_the_protocol(protocol, monkeypatch):
    swept = []

    def record(config, *arguments, **options):
        swept.append(config)
        return SimpleNamespace(entries=[], path="")

    monkeypatch.setattr(command, "sweep", record)
    whole = PROTOCOLS[protocol]
    expected = {words: replace(whole, **change) for words, change in SWEPT.items()}
    expected |= {words: replace(whole, **change) for words, change in UNLIKE[protocol].items()}
    expected |= {
        words: replace(whole, task=replace(whole.task, **change)) for words, change in ASKED.items()
    }
    for words, config in {"": whole, **expected}.items():
        assert run_command("--protocol", protocol, *words.split()) == 0
        assert swept.pop() == config, words
    changed = {field for change in (SWEPT | UNLIKE[protocol]).values() for field in change}
    assert changed == {field.name for field in fields(SweepConfig)} - {"task", "protocol"}
    asked = {field for change in ASKED.values() for field in change}
    assert asked == {field.name for field in fields(MQARConfig)} - {"power"}


def test_the_help_shows_what_the_protocols_have(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run_command("--help") == 0
    shown = capsys.readouterr().out
    assert "2; authors: 4" in shown
    assert "64 128 256 512)" in shown


def test_the_command_answers_a_wrong_value_in_one_line(tmp_path, capsys):
    assert run_command("--num-pairs", 200, "--out", tmp_path) == 2
    assert "error: num_pairs must be from 1 to seq_len / 4" in capsys.readouterr().err
    assert run_command("--protocol", "author", "--out", tmp_path) == 2
    assert "no protocol is named 'author'; did you mean authors" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
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
