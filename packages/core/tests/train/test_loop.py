"""What the loop computes, writes and refuses."""

import json
import logging
import math
from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.data import Batch, DataConfig
from mezzo_core.data.tokenizers import ByteTokenizer
from mezzo_core.errors import UserError
from mezzo_core.eval.evaluate import evaluate
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.train.config import OptimConfig
from mezzo_core.train.loop import DivergenceError, _read, train


def test_training_learns(tiny, tmp_path):
    first = []
    config = tiny(steps=40, eval_every=40, checkpoint_every=40, eval_batches=None)
    result = train(config, tmp_path, quiet=True, on_step=lambda row: first.append(row["loss"]))
    assert first[0] == pytest.approx(math.log(257), rel=0.05)
    assert result.final_loss < 0.7 * first[0]
    assert result.val_loss < 0.7 * first[0]
    assert result.val_perplexity == pytest.approx(math.exp(result.val_loss))
    assert result.tokens_per_second > 0
    assert result.steps == 40


def test_the_same_seed_gives_the_same_bits_and_another_does_not(tiny, tmp_path, losses_of):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny(seed=seed), tmp_path / name, quiet=True)
    a, b, c = (losses_of(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_accumulation_is_one_big_batch(tiny, tmp_path, rows_of, micro_batch_size):
    train(tiny(), tmp_path / "whole", quiet=True)
    train(tiny(micro_batch_size=micro_batch_size), tmp_path / "parts", quiet=True)
    pairs = zip(rows_of(tmp_path / "whole"), rows_of(tmp_path / "parts"), strict=True)
    for whole, parts in pairs:
        assert parts["loss"] == pytest.approx(whole["loss"], rel=2e-6)
        assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)


def test_accumulation_weighs_targets_not_micro_batches(tiny, tmp_path, losses_of):
    """With masked documents the micro batches have unequal numbers of targets."""
    corpus = tmp_path / "documents.jsonl"
    texts = ["x" * (5 + 37 * (i % 3)) for i in range(300)]
    corpus.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    data = replace(tiny().data, source=str(corpus), mask_documents=True)
    train(tiny(data=data), tmp_path / "whole", quiet=True)
    train(tiny(data=data, micro_batch_size=1), tmp_path / "parts", quiet=True)
    assert losses_of(tmp_path / "parts") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-5)


def test_targets_of_rows_that_processes_share_count_once():
    """Two processes read the same rows of a stream, and each has a part of every row."""
    batch = Batch(*torch.zeros(2, 3, 4, dtype=torch.int64))
    world = SimpleNamespace(sum=lambda count: 2 * count, context=2, device=torch.device("cpu"))
    run = SimpleNamespace(
        world=world,
        data=SimpleNamespace(reads_shard=True, train_batch=lambda *_: batch),
        parts=lambda batch: [batch],
        config=SimpleNamespace(cuda_graph=False, batch_size=3),
    )
    assert _read(run, 0)[1] == 12


def test_the_log_tells_every_step_and_evaluation(tiny, tmp_path, rows_of):
    seen = []
    result = train(tiny(), tmp_path, quiet=True, on_step=seen.append)
    rows = rows_of(tmp_path)
    assert rows == seen
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(
        set(row) == {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "time"}
        for row in rows
    )
    assert [row["tokens"] for row in rows] == [128 * n for n in range(1, 7)]
    assert rows[-1]["lr"] == pytest.approx(1e-6)
    evaluations = rows_of(tmp_path, "val_loss")
    assert [row["step"] for row in evaluations] == [3, 6]
    assert evaluations[-1]["val_loss"] == result.val_loss
    assert evaluations[-1]["val_tokens"] == 2 * 4 * 32
    assert evaluations[-1]["val_bits_per_byte"] is None  # a part of the text has no byte count


def test_all_of_the_validation_part_gives_bits_per_byte(tiny, tmp_path, rows_of):
    train(tiny(steps=1, eval_batches=None), tmp_path, quiet=True)
    (row,) = rows_of(tmp_path, "val_loss")
    bits_per_token = row["val_loss"] / math.log(2)
    assert row["val_bits_per_byte"] == pytest.approx(bits_per_token, rel=1e-2)  # a byte a token


def test_a_run_that_is_accurate_enough_ends_and_stays_ended(tiny, tmp_path, rows_of):
    config = tiny(stop_at_accuracy=0.0, eval_every=2, checkpoint_every=4)
    for _ in range(2):
        result = train(config, tmp_path, quiet=True)
        assert result.steps == 2
        assert result.val_accuracy == rows_of(tmp_path, "val_loss")[-1]["val_accuracy"] > 0
        assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]
        assert json.loads((tmp_path / "model/config.json").read_text())["extra"]["step"] == 2
    longer = train(replace(config, stop_at_accuracy=result.val_accuracy), tmp_path, quiet=True)
    assert longer.steps > 2
    longest = train(replace(config, stop_at_accuracy=1.0), tmp_path, quiet=True)
    assert longest.steps == config.steps


def test_a_run_that_is_cut_short_has_no_validation_loss_of_an_earlier_step(
    tiny, tmp_path, train_until
):
    train_until(tiny(), tmp_path, 5)
    result = train(tiny(steps=4), tmp_path, quiet=True)
    assert (result.steps, result.val_loss) == (4, None)


@pytest.mark.usefixtures("losses_drawn")
def test_the_folder_holds_what_others_need(tiny, tmp_path):
    config = tiny()
    result = train(config, tmp_path, quiet=True)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "config.json").read_text())["name"] == "tiny"
    _, model_config, extra = load_model(tmp_path / "model")
    assert model_config == config.model
    assert (extra["name"], extra["step"], extra["seq_len"]) == ("tiny", 6, 32)
    assert extra["tokenizer"] == "byte"
    assert extra["data"]["source"] == config.data.source
    assert result.out == tmp_path
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == ["step-4", "step-6"]


def test_a_second_run_finds_the_tokens_of_the_first(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("MEZZO_TOKENS", str(tmp_path / "tokens"))
    train(tiny(steps=1), tmp_path / "first", quiet=True)
    monkeypatch.setattr(ByteTokenizer, "encode_batch", None)  # nobody calls it
    train(tiny(steps=1), tmp_path / "second", quiet=True)


def test_the_model_is_there_while_the_run_goes_on(tiny, tmp_path):
    steps = []

    def look(row):
        if row["step"] == 3:
            steps.append(load_model(tmp_path / "model")[2]["step"])

    train(tiny(), tmp_path, quiet=True, on_step=look)
    assert steps == [2]


def test_an_exploding_loss_stops_the_run_and_says_where(tiny, tmp_path, rows_of):
    config = tiny(optim=OptimConfig(lr=30.0, clip=math.inf, warmup_fraction=0.0), steps=50)
    with pytest.raises(DivergenceError) as error:
        train(config, tmp_path, quiet=True)
    message = str(error.value)
    step = int(message.split("at step ")[1].split()[0])
    first = 4 * (step - 1)
    assert f"windows {first} to {first + 3} of the order of training, in epoch 1" in message
    assert "checkpoint" in message
    assert "\n" not in message
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, step))


def test_an_exploded_validation_loss_stops_the_run_before_it_is_saved(tiny, tmp_path, rows_of):
    """Its perplexity overflows: infinity is not JSON, and the log could not be read again."""
    optim = OptimConfig(lr=1000.0, warmup_fraction=0.0)
    config = tiny(optim=optim, steps=50, eval_every=1, checkpoint_every=1)
    with pytest.raises(DivergenceError, match=r"validation loss after step 1 is .*no checkpoint"):
        train(config, tmp_path, quiet=True)
    assert [row["step"] for row in rows_of(tmp_path)] == [1]
    assert rows_of(tmp_path, "val_loss") == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda loss: loss * math.nan, "loss nan"),
        (lambda loss: loss + (loss - loss.detach()).sqrt(), "gradient norm (nan|inf)"),
        (lambda loss: loss * 3.5, "loss 1"),
    ],
    ids=["NaN", "gradient", "above three guesses"],
)
def test_nan_stops_the_run_and_names_the_last_checkpoint(tiny, tmp_path, monkeypatch, spoil, words):
    from mezzo_core.nn.lm import LM

    (tmp_path / "short.txt").write_text("half of the notes " * 20)
    config = tiny(data=DataConfig(str(tmp_path / "short.txt"), validation_fraction=0.2))

    honest = LM.loss
    calls = 0

    def loss(self, *arguments, **options):
        nonlocal calls
        calls += torch.is_grad_enabled()
        value = honest(self, *arguments, **options)
        return spoil(value) if calls == 4 and torch.is_grad_enabled() else value

    monkeypatch.setattr(LM, "loss", loss)
    with pytest.raises(DivergenceError, match=rf"at step 4 .*in epoch 2\).*{words}.*step-2;"):
        train(config, tmp_path / "run", quiet=True)
    monkeypatch.undo()
    assert train(config, tmp_path / "run", quiet=True).steps == 6


def test_a_text_that_is_held_out_as_a_whole_trains_nothing(tiny, tmp_path):
    config = tiny(data=replace(tiny().data, validation_fraction=1))
    with pytest.raises(UserError, match="nothing to train on"):
        train(config, tmp_path / "run", quiet=True)
    assert not list(tmp_path.glob("run/*.json"))


def test_bf16_is_close_to_float32(tiny, tmp_path):
    full = train(tiny(precision="fp32"), tmp_path / "fp32", quiet=True, device="cpu")
    half = train(tiny(precision="bf16"), tmp_path / "bf16", quiet=True, device="cpu")
    assert half.val_loss != full.val_loss
    assert half.val_loss == pytest.approx(full.val_loss, rel=2e-2)
    model, *_ = load_model(tmp_path / "bf16" / "model")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    batches = islice(tiny().data.build(32, None).validation_batches(4), 2)
    assert half.val_loss == pytest.approx(evaluate(model, batches, precision="bf16").loss, rel=1e-6)


def test_the_loss_compiles_as_one_graph(tiny, tmp_path, losses_of, monkeypatch):
    """Without code generation, which takes a minute on a CPU; test_gpu.py has the rest."""
    whole = partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", whole)
    config = tiny(steps=2, model=replace(tiny().model, mixers=tiny().model.mixers[:1]))
    train(config, tmp_path / "eager", quiet=True)
    train(replace(config, compile=True), tmp_path / "compiled", quiet=True)
    eager, compiled = losses_of(tmp_path / "eager"), losses_of(tmp_path / "compiled")
    assert compiled == pytest.approx(eager, rel=1e-5)
    assert load_model(tmp_path / "compiled" / "model")[2]["step"] == 2


def test_without_a_terminal_there_are_lines_and_quiet_has_none(tiny, tmp_path, capsys, caplog):
    train(tiny(), tmp_path / "lines")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "tiny: step 6/6: loss" in shown.err
    assert "validation loss" in shown.err
    with caplog.at_level(logging.INFO, logger="mezzo_core"):
        train(tiny(), tmp_path / "quiet", quiet=True)
    assert capsys.readouterr().err == ""
    assert "tiny: step 6/6: loss" in caplog.text
