"""The synthetic sweep: its trainings, results that go on where they were left, the command."""

import json
import math
from dataclasses import replace

import pytest
import torch
from mezzo_core.config_json import from_json, to_json
from mezzo_core.errors import UserError
from mezzo_core.reproduction.measurement import How, read_result
from mezzo_core.testing.arguments import check_fields
from mezzo_core.train.loop import train
from mezzo_recurrent_transformer import RecurrentBlock, TransformerBlock
from mezzo_recurrent_transformer.__main__ import main
from mezzo_recurrent_transformer.reproduction.synthetic import LAYERS, NAMES, SweepConfig, sweep
from mezzo_recurrent_transformer.reproduction.synthetic_command import synthetic
from mezzo_recurrent_transformer.synthetic.autoencoder import AutoEncoder
from mezzo_recurrent_transformer.synthetic.tasks import TASKS

MEMORY = replace(TASKS["memorization"], vocab_size=12, seq_len=8, train_rows=20, test_rows=8)
COMPRESSION = replace(TASKS["compression"], seq_len=8, train_rows=20, test_rows=8)
TINY = SweepConfig(
    tasks=(MEMORY, COMPRESSION),
    learning_rates=(1e-3,),
    weight_decays=(0.0,),
    seeds=(0,),
    d_model=16,
    batch_size=8,
    epochs=2,
)


def rows(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("model", LAYERS)
def test_models_are_one_layer_of_the_papers_sizes(model, name):
    task = TASKS[name]
    run = SweepConfig().run(model, task, 1e-3, 0.1, seed=4)
    assert from_json(to_json(run)) == run
    with torch.device("meta"):
        built = run.model.build()
    kind = {"transformer": TransformerBlock, "recurrent": RecurrentBlock}[model]
    is_compression = name == "compression"
    assert isinstance(built.stack, AutoEncoder) == is_compression
    layer = built.stack.encoder if is_compression else built.stack.blocks[0]
    assert type(layer) is kind
    assert (layer.d_model, layer.config.head_dim, layer.config.alibi) == (128, 8, "olmo")
    assert (layer.config.residual_scale, layer.config.init_layer) == (1, 0)
    norms = 5 * 128
    weights = 4 * 128**2 + 2 * 128 * 512 + norms + 2 * 128 * task.vocab_size
    assert built.num_parameters() == weights + is_compression * 2 * (128**2 + 128)
    assert (run.seed, run.data.seed, run.optim.betas) == (4, 4, (0.9, 0.98))
    assert run.steps == (400 if name == "memorization" else 20_000)
    assert replace(SweepConfig(), max_steps=500).run(model, task, 1e-3, 0.1, 0).steps in (400, 500)


def test_a_run_trains_as_the_protocol_says(tmp_path):
    run = TINY.run("transformer", MEMORY, 1e-3, 0.1, 0)
    train(run, tmp_path, quiet=True, device="cpu")
    found = rows(tmp_path)
    falling = [
        1e-6 + (1e-3 - 1e-6) * (1 + math.cos(math.pi * step / 4)) / 2 for step in (1, 2, 3, 4)
    ]
    assert [row["lr"] for row in found if "lr" in row] == pytest.approx(falling)
    tests = [row for row in found if "val_accuracy" in row]
    assert {row["val_tokens"] for row in tests} == {8 * 4}
    assert [8 * row["val_exact_match"] % 1 for row in tests] == [0] * 4


@pytest.mark.parametrize("model", LAYERS)
def test_a_layer_learns_a_map_by_heart_and_then_stops(model, tmp_path):
    task = replace(TASKS["memorization"], vocab_size=16, seq_len=8, test_rows=64)
    config = replace(
        TINY, tasks=(task,), models=(model,), d_model=32, batch_size=32, epochs=50,
        learning_rates=(1e-2,),
    )  # fmt: skip
    result = sweep(config, tmp_path, device="cpu")
    assert [entry.value for entry in result.entries] == [1.0, 1.0]
    assert result.entries[0].details["steps"]["val"][-1][0] < 400


def test_compression_is_learned_through_the_last_token(tmp_path):
    task = replace(COMPRESSION, vocab_size=3, seq_len=3, train_rows=32)
    run = replace(TINY, tasks=(task,), epochs=60, d_model=32).run("recurrent", task, 5e-3, 0.0, 0)
    result = train(run, tmp_path, quiet=True, device="cpu")
    assert result.val_accuracy > 0.9  # chance is 2/3: the bar is known


def test_a_sweep_leaves_a_result_that_reports_read(tmp_path):
    result = sweep(TINY, tmp_path / "here", device="cpu")
    read = read_result(result.path)
    assert result.path.name == "synthetic.json"
    assert (read.kind, read.how) == ("recall", How.SCALED_DOWN)
    assert read.columns == ("memorization", "compression")
    assert read.groups == ["exact match", "token accuracy"]
    assert {model for _, model in read.rows} == set(NAMES.values())
    assert len(read.entries) == 2 * 2 * 2
    assert "memorization: vocab_size 12, not 256" in read.setting
    folder = tmp_path / "here/synthetic/memorization_recurrent_seed0_lr0.001_weight_decay0"
    last = rows(folder)[-1]
    for group, name in (("exact match", "val_exact_match"), ("token accuracy", "val_accuracy")):
        (entry,) = read.cell("Recurrent Transformer", "memorization", group)
        assert entry.value == pytest.approx(last[name], rel=1e-4)


def test_the_whole_protocol_alone_is_the_papers_setting():
    whole = SweepConfig()
    assert whole.header().how == "the paper's setting"
    for same in ({"compile": True}, {"cuda_graph": True}, {"models": ("recurrent",)}):
        assert replace(whole, **same).header() == whole.header()
    for change in (
        {"tasks": (TASKS["copying"],)},
        {"max_steps": 100},
        {"tasks": (replace(TASKS["copying"], test_rows=64), *list(TASKS.values())[:-1])},
    ):
        assert replace(whole, **change).header().how == "scaled down"
    assert "Here: copying: test_rows 64, not 1280" in replace(whole, **change).header().setting


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ("recurent",)}, "no model is named 'recurent'; did you mean recurrent"),
        ({"models": ()}, r"models must be one or more, got \(\)"),
        ({"tasks": (MEMORY,)}, "batch_size must be from 1 to train_rows = 20, got 128"),
        ({"max_steps": 0}, r"max_steps must be at least 1 \(or None\), got 0"),
        ({"precision": "fp16"}, "precision must be one of .* got 'fp16'"),
        ({"learning_rates": (0.0,)}, "learning_rates must be one or more from 1e-06 on"),
        ({"weight_decays": (-1.0,)}, "weight_decays must be one or more from 0 on"),
        ({"d_model": 20}, "d_model must be a multiple of 8, got 20"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
    ],
)
def test_a_sweep_that_cannot_be_is_named(options, message):
    with pytest.raises(UserError, match=message):
        SweepConfig(**options)


def test_each_field_replaced_is_named_or_gives_a_run():
    def use(config):
        runs = [
            config.run(model, task, lr, decay, seed)
            for model in config.models
            for task in config.tasks
            for lr in config.learning_rates
            for decay in config.weight_decays
            for seed in config.seeds
        ]
        for run in runs:
            with torch.device("meta"):
                run.model.build()
        return torch.tensor([run.steps for run in runs])

    check_fields(TINY, use)


def run_command(*arguments):
    with pytest.raises(SystemExit) as exit:
        main(["synthetic", *map(str, arguments)])
    return exit.value.code


def test_the_command_without_options_is_the_whole_sweep(monkeypatch):
    def record(config, *arguments, **options):
        raise UserError("recorded" if config == SweepConfig() else f"another: {config}")

    monkeypatch.setattr("mezzo_recurrent_transformer.reproduction.synthetic.sweep", record)
    with pytest.raises(UserError, match=r"^recorded$"):
        synthetic()


def test_the_command_sweeps_one_model_alone_and_draws_the_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    options = "--task memorization --model recurrent --lr 0.001 --decay 0 --seed 7 --width 8 "
    options += "--train-rows 2 --test-rows 2 --batch-size 2 --max-steps 1 --device cpu"
    out = tmp_path / "q[/b]"
    assert run_command(*options.split(), "--out=~/q[/b]") == 0
    shown = capsys.readouterr().out
    assert f"{out / 'synthetic.json'} has every run" in shown
    rows = [line.split() for line in shown.splitlines() if "│ mem" in line]
    assert ["│", "memorization", "│", "Transformer", "│", "-", "│", "-", "│"] in rows
    read = read_result(out / "synthetic.json")
    assert (read.seeds, read.columns) == ([7], ("memorization",))
    assert "max_steps 1, not None" in read.setting
    assert (out / "synthetic.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_answers_a_wrong_value_in_one_line(tmp_path, capsys):
    assert run_command("--task", "compresion", "--out", tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: no task is named 'compresion'; did you mean compression" in line
