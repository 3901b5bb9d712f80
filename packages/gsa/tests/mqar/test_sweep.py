"""MQAR: the models, one training, sweeps, and the command."""

import json
import math
from dataclasses import fields, replace
from inspect import signature

import pytest
import torch
from mezzo_core.config_json import from_json, to_json
from mezzo_core.errors import UserError
from mezzo_core.reproduction.measurement import read_result
from mezzo_core.train.loop import train
from mezzo_gsa.__main__ import main
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.mqar.task import MQARConfig
from mezzo_gsa.reproduction.mqar import DROPOUT, NAMES, PROTOCOLS, SweepConfig, sweep
from mezzo_gsa.reproduction.mqar_command import NAMES as TOLD_NAMES
from mezzo_gsa.reproduction.mqar_command import RATES, mqar

TASK = MQARConfig(vocab_size=32, seq_len=16, num_pairs=4, train_rows=20, test_rows=8)
TINY = SweepConfig(
    task=TASK,
    models=("attention", "gsa"),
    widths=(16,),
    learning_rates=(1e-3,),
    batch_size=8,
    epochs=2,
)


def tiny_model(name, **changes):
    torch.manual_seed(0)
    return replace(TINY, **changes).run(name, 16, 1e-3).model.build().eval()


def test_attention_alone_learns_positions_the_head_is_the_embedding_and_drops_out():
    task = replace(TASK, vocab_size=1009)
    for name in NAMES:
        model = tiny_model(name, task=task)
        layers = model.stack.blocks[-2:]
        assert [layer.dropout.p for layer in layers] == [DROPOUT, 0]
        names = dict(model.named_parameters())
        assert ("stack.blocks.0.embed.weight" in names) == (name == "attention")
        assert [key for key, weight in names.items() if 1009 in weight.shape] == ["embed.weight"]


def built(protocol, name, width):
    with torch.device("meta"):
        return PROTOCOLS[protocol].run(name, width, 1e-3).model.build()


@pytest.mark.parametrize("width", SweepConfig().widths)
def test_states_have_the_sizes_of_the_protocols(width):
    numbers = {  # of a layer, in Zoology's two and in the authors' four
        "attention": (512 * 2 * width, 512 * 2 * width),
        "gsa": (2 * 64 * width, 2 * (width // 4) * width),
        "gsa_one_head": (2 * 64 * width, 2 * (width // 4) * width),
        "gla": (width * width // 2, width * width // 2),
        "hgrn2": (min(width, 128) * width, width * width // 2),
        "retnet": (2 * width * width, width * width),
    }
    assert set(numbers) == set(NAMES)
    for name, sizes in numbers.items():
        for protocol, layers, count in zip(PROTOCOLS, (2, 4), sizes, strict=True):
            counters = layers * 8 if name == "retnet" else 0
            model = built(protocol, name, width)
            assert model.state_bytes(512) == layers * 4 * count + counters, (protocol, name)


def test_the_layers_of_the_authors_have_their_weights_in_squares_of_the_width():
    squares = dict(zip(NAMES, (4, 5, 4.25, 5, 4, 8), strict=True))
    for name, expected in squares.items():
        layer = built("authors", name, 128).stack.blocks[-1]
        weights = sum(w.numel() for w in layer.parameters() if w.ndim == 2)
        low_rank = 2 * 16 * 128 if name == "gla" else 0  # of its gate
        assert weights - low_rank == expected * 128**2, name
        assert layer.mlp_norm is not None


def test_gsa_is_that_of_the_authors():
    layers = PROTOCOLS["authors"].run("gsa", 128, 1e-3).model.stack.blocks
    expected = GSAConfig(num_heads=4, num_slots=32, damping=16.0, scale=None)
    assert [layer.mixer for layer in layers] == [expected] * 4
    layers = PROTOCOLS["authors"].run("hgrn2", 128, 1e-3).model.stack.blocks
    assert [layer.mixer.lower_bound for layer in layers] == [0] * 4


def test_a_sweep_of_other_models_says_so_and_does_not_go_on_in_the_same_file(tmp_path):
    config = replace(TINY, models=("gla",))
    plain = sweep(config, tmp_path, device="cpu")
    assert "Here: " in plain.header.setting
    shown = r"another setting \(.*epochs 2.*, not .*epochs 1.*remove it"
    with pytest.raises(UserError, match=shown):
        sweep(replace(config, epochs=1), tmp_path, device="cpu")
    theirs = sweep(replace(config, protocol="authors"), tmp_path, device="cpu")
    assert theirs.path.name == "mqar_authors.json"


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
    (first,), (again,) = (sweep(config, tmp_path / name, device="cpu").entries for name in "ab")
    assert first == again
    assert (first.model, first.column, first.seed) == ("GLA", "C=16", 123)
    assert first.details["lr"] == 1e-3
    assert first.details["parameters"] == sum(w.numel() for w in tiny_model("gla").parameters())
    assert first.details["state_bytes"] == tiny_model("gla").state_bytes(16)
    log = (tmp_path / "a/mqar/gla_c16_seed123_lr0.001/log.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["val_accuracy"] == first.value
    assert [step for step, _ in first.details["steps"]["val"]] == [2, 4]


@pytest.mark.parametrize("whole", PROTOCOLS.values(), ids=PROTOCOLS)
def test_the_whole_protocol_alone_is_the_papers_setting(whole):
    assert whole.header().how == "the paper's setting"
    same = {"models": (*whole.models, "gsa_one_head"), "compile": True, "cuda_graph": True}
    assert replace(whole, **same).header().how == "the paper's setting"
    for change in (
        {"models": ("gsa",)},
        {"widths": (64,)},
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
        ({"protocol": "author"}, "protocol must be one of .*, got 'author'"),
        ({"learning_rates": ()}, r"learning_rates must be at least one, got \(\)"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
    ],
)
def test_a_sweep_that_cannot_be_is_named(options, message):
    with pytest.raises(UserError, match=message):
        SweepConfig(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ("gsa", "hgrn2"), "widths": (200,)}, "hgrn2 .* 200 .*: head_dim must divide"),
        ({"widths": (0,)}, "d_model must be"),
        ({"learning_rates": (math.nan,)}, "lr must be above 0"),
        (
            {"models": ("hgrn2",), "protocol": "authors", "widths": (1,)},
            "hgrn2 of width 1 cannot be trained",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is_trained(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        sweep(replace(TINY, **change), tmp_path)
    assert not list(tmp_path.iterdir())


def run_command(*arguments):
    with pytest.raises(SystemExit) as exit:
        main(["mqar", *map(str, arguments)])
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


def test_the_command_without_options_is_the_whole_protocol_and_has_an_option_for_each_part(
    monkeypatch,
):
    def record(config, *arguments, **options):
        raise UserError("recorded" if config == PROTOCOLS[protocol] else f"another: {config}")

    monkeypatch.setattr("mezzo_gsa.reproduction.mqar.sweep", record)
    for protocol in PROTOCOLS:
        with pytest.raises(UserError, match=r"^recorded$"):
            mqar(protocol=protocol)
    parts = {field.name for kind in (SweepConfig, MQARConfig) for field in fields(kind)}
    assert parts - {"task", "power", "random_non_queries"} <= set(signature(mqar).parameters)


def test_the_help_tells_the_models_and_the_rates_of_the_protocols():
    assert tuple(NAMES) == TOLD_NAMES
    first, second = (" ".join(map(str, c.learning_rates)) for c in PROTOCOLS.values())
    assert f"{first}; authors: {second}" == RATES


def test_the_command_answers_a_wrong_value_in_one_line(tmp_path, capsys):
    assert run_command("--num-pairs", 200, "--out", tmp_path) == 2
    assert "error: num_pairs must be from 1 to seq_len / 4" in capsys.readouterr().err
    assert run_command("--protocol", "author", "--out", tmp_path) == 2
    assert "no protocol is named 'author'; did you mean authors" in capsys.readouterr().err
