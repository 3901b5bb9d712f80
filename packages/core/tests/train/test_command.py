"""The train command: what it says, and the code with which it leaves."""

import errno
import io
import json
import os
import re
import signal
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from mezzo_core.nn import LMConfig, save_model
from mezzo_core.testing.laws import LAWS
from mezzo_core.train.log import RunLog
from mezzo_core.train.run_recipe import run_recipe
from mezzo_core.train.stopping import StoppedError
from toys.running_mean import RunningMeanConfig


@pytest.fixture
def command(tiny, monkeypatch, run_command):
    """Run a package's train command; return its exit code, its stdout and its stderr."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    run = partial(run_command, recipes=lambda: {"tiny": tiny})
    train = partial(run, "train", "tiny")
    train.eval = partial(run, "eval")
    return train


def one_line(result):
    code, _, err = result
    assert code == 2, err
    assert len(err.splitlines()) == 1, err
    return err


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_stopped_command_says_where_and_leaves_with_its_code(
    command, tmp_path, monkeypatch, name, code
):
    honest = RunLog.step

    def step(self, row):
        honest(self, row)
        if row["step"] == 1:
            os.kill(os.getpid(), signal.Signals[name])

    monkeypatch.setattr(RunLog, "step", step)
    found, out, err = command("--out", tmp_path / "run", "--quiet")
    assert found == code
    assert out == ""
    assert len(err.splitlines()) == 1
    assert str(tmp_path / "run" / "checkpoints" / "step-1") in err
    monkeypatch.undo()
    assert command("--out", tmp_path / "run", "--quiet")[0] == 0


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_a_closed_terminal_can_be_told_nothing_and_the_code_is_still_its(
    command, tmp_path, monkeypatch, quiet
):
    class Terminal(io.StringIO):
        is_closed = False

        def isatty(self):
            return True

        def write(self, text):
            if self.is_closed:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().write(text)

    def step(self, row):
        Terminal.is_closed = True
        os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr(RunLog, "step", step)
    monkeypatch.setattr("sys.stderr", Terminal())
    assert command("--out", tmp_path / "run", *quiet)[0] == 129


def test_a_package_s_own_command_says_where_its_training_was_stopped(run_command):
    def sweep():
        raise StoppedError(signal.SIGINT, "after step 3 of 9")

    code, _, err = run_command("sweep", commands={"sweep": sweep})
    assert (code, err) == (130, "stopped by Ctrl-C after step 3 of 9\n")


@pytest.mark.parametrize(
    "fail",
    [
        pytest.param(lambda: torch.empty(1 << 55, dtype=torch.uint8), id="torch"),
        pytest.param(lambda: bytearray(1 << 55), id="python"),
    ],
)
def test_full_memory_is_one_line_that_says_what_helps(command, tmp_path, monkeypatch, fail):
    monkeypatch.setattr("mezzo_core.train.run_recipe.train", lambda *_, **__: fail())
    line = one_line(command("--out", tmp_path / "run"))
    assert "memory is full" in line
    assert "--batch-size" in line
    assert "--max-new-tokens" in line  # of generate, whose other options do not help


def test_a_defect_keeps_its_traceback(command, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("a defect")

    monkeypatch.setattr("mezzo_core.train.run_recipe.train", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        command("--out", tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--seed", 2**64), "seed (--seed) must be below 2^63"),
        (("--seed", -1), "seed (--seed) must be"),
        (("--data-seed", -1), "seed (--data-seed) must be"),
        (("--batch-size", 0), "batch_size (--batch-size) must be"),
        (("--batch-size", 2**63), "batch_size (--batch-size) must be"),
        (("--steps", 10**30), "steps (--steps) must be"),
        (("--lr", 0), "lr (--lr) must be above 0, got 0.0"),
        (("--min-lr", 1), "min_lr (--min-lr) must be from 0 to lr (--lr) = 0.003, got 1.0"),
        (("--lrr", 1), "--lrr"),
        (("--micro-batch-size", "few"), "'few' is neither a whole number nor none"),
        (("--no-shard", "--precision", "fp8"), "precision (--precision) must be one of"),
        (("--set", "model.mixers.head_dim=x"), "head_dim must be int, got 'x'"),
        (("--set", "model.mixers.head=1"), "did you mean model.mixers.head_dim"),
        (("--set", "model.mixers.head_dim=7"), "head_dim must divide d_model"),
        (("--set", "model"), "--set takes SETTING=VALUE, got 'model'"),
        (("--lr", "0.1", "--set", "optim.lr=1"), "--lr and --set optim.lr name one setting"),
        (("--out", "~no such user/run"), "begins with a user that is not known here"),
    ],
)
def test_an_impossible_option_is_one_line(command, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert named in one_line(command(*arguments))
    assert list(tmp_path.iterdir()) == []


def test_a_home_is_found(command, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command("--out", "~/run", "--steps", 1, "--quiet")[0] == 0
    assert (tmp_path / "run" / "config.json").is_file()


def test_the_last_line_says_on_how_many_tokens_if_not_on_all_that_are_held_out(command, tmp_path):
    told = ("--out", tmp_path / "run", "--steps", 1, "--quiet")
    code, out, _ = command(*told)
    assert re.search(r"validation perplexity [\d.]+ on 256 tokens after 1 steps;", out), code
    code, out, _ = command(*told, "--eval-batches", "none", "--fresh")
    assert re.search(r"validation perplexity [\d.]+ after 1 steps;", out), code


def test_brackets_in_a_folder_are_shown(command, tmp_path):
    _, out, _ = command("--out", tmp_path / "[red]run", "--steps", 1, "--quiet")
    assert str(tmp_path / "[red]run" / "model") in out


def test_a_text_under_another_name_with_bad_records_is_trained_on_when_told(command, tmp_path):
    corpus, out = tmp_path / "a.jsonl", tmp_path / "run"
    corpus.write_text('{"body": "half of the notes"}\n' * 99 + '{"body": null}\n')
    told = ["--data", corpus, "--out", out, "--quiet", "--steps", 1]
    assert "there is 'body', which text_column (--text-column) can name" in one_line(command(*told))
    told += ["--text-column", "body"]
    assert "line 100: 'body' must be text, got NoneType; skip_bad (--skip-bad)" in one_line(
        command(*told)
    )
    told += ["--skip-bad", "--validation-data", tmp_path / "b.txt"]
    assert "b.txt" in one_line(command(*told))
    (tmp_path / "b.txt").write_text("of the notes")
    assert command(*told)[0] == 0
    code, shown, _ = command.eval(out)
    assert code == 0
    assert json.loads(shown)["tokens"] == 13
    assert json.loads(shown)["data"] == str(tmp_path / "b.txt")
    assert "no text in" in one_line(command.eval(out, "--text-column", "x"))
    assert command.eval(out, "--data", corpus, "--all")[0] == 0
    (tmp_path / "b.txt").write_text("of the songs")
    both = f"'{corpus}' or '{tmp_path / 'b.txt'}'"
    assert f"{both} is not the text that" in one_line(command.eval(out))
    assert f"the tokens of {both} are not those" in one_line(command(*told))


def test_the_name_of_a_field_is_refused_where_no_text_has_fields(command, tmp_path):
    words, out = tmp_path / "words.txt", tmp_path / "run"
    words.write_text("half of the notes " * 50)
    told = ("--data", words, "--out", out, "--quiet", "--steps", 1)
    refused = "--text-column names a field, and "
    assert refused in one_line(command(*told, "--text-column", "body"))
    assert not out.exists()
    assert command(*told, "--text-column", "text")[0] == 0
    assert command.eval(out, "--text-column", "text")[0] == 0
    for where in ((), ("--data", words), ("--data", "embedded")):
        assert refused in one_line(command.eval(out, *where, "--text-column", "body"))
    fields = tmp_path / "fields.csv"
    fields.write_text("body\n" + "half of the notes\n" * 50)
    mixed = ("--data", f"1:{words}", "--data", f"1:{fields}", "--text-column", "body")
    assert command(*mixed, "--out", tmp_path / "mixed", "--steps", 1)[0] == 0


def test_texts_are_mixed_by_weights_and_measured_together(command, tmp_path):
    corpus, other, out = (tmp_path / name for name in ("words.txt", "other.txt", "run"))
    corpus.write_text("half of the notes " * 50)
    other.write_text("what else was there " * 30)
    mixed = ["--data", f"3:{corpus}", "--data", f"0.5:{other}"]
    told = [*mixed, "--out", out, "--quiet", "--steps"]
    assert command(*told, 1)[0] == 0
    assert command(*told, 2)[0] == 0  # goes on
    assert "data.weights[1] is 0.5 there, 1.0 here" in one_line(
        command(*mixed[:3], f"1:{other}", "--out", out, "--steps", 2)
    )
    found = {}
    for asked in ((), ("--all",), ("--data", other), ("--data", corpus)):
        code, shown, err = command.eval(out, *asked)
        assert code == 0, err
        found[asked] = json.loads(shown)
    assert found[()]["data"] == found["--all",]["data"] == f"{corpus} + {other}"
    assert found[()]["tokens"] == sum(found["--data", text]["tokens"] for text in (corpus, other))
    texts = sum(len(text.read_text()) + 1 for text in (corpus, other))
    assert found["--all",]["tokens"] == texts
    other.write_text("it has changed " * 30)
    assert "is not the text that the model was trained on" in one_line(command.eval(out))
    assert f"the tokens of '{corpus} + {other}' are not those" in one_line(command(*told, 3))
    other.unlink()
    assert "put it back, or measure one text alone by --data" in one_line(command.eval(out))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--data", "a.txt", "--data", "1:b.txt"), "must be WEIGHT:TEXT each, such as 0.7:words"),
        (("--data", "1:a.txt", "--data", "hub:b/c"), "got 'hub:b/c'"),
        (
            ("--data", "1:a.txt", "--data", "0:b.txt"),
            "weights[1] (--data WEIGHT:TEXT) must be above 0 and below 2^63, got 0",
        ),
        (("--data", "1:a.txt", "--data", "1:"), "must be WEIGHT:TEXT each"),
        (("--data", "1:a.txt"), "a single text has no weight; give its name alone"),
        (
            ("--data", "1:a.txt", "--data", "1:b.txt", "--validation-data", "c.txt"),
            "--validation-data goes with one --data, got 2",
        ),
        (
            ("--data", "a.txt", "--validation-data", "c.txt", "--validation-fraction", 0.1),
            "--validation-fraction goes without --validation-data",
        ),
        (
            ("--data", "1:a.txt", "--data", "1:b.txt", "--streaming"),
            "texts[0].streaming (--streaming) must be False: a stream cannot be mixed",
        ),
        (
            ("--data", "embedded", "--streaming"),
            "embedded corpus is not streamed: set streaming=False (--no-streaming)",
        ),
        (
            ("--data", "a.txt", "--streaming", "--validation-fraction", 0.1),
            "a stream holds out its first documents: leave out --validation-fraction",
        ),
    ],
)
def test_texts_that_cannot_be_mixed_are_one_line(command, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert named in one_line(command(*arguments))


def test_a_large_tokenizer_names_the_option_that_makes_room(command, tmp_path):
    line = one_line(command("--vocab-size", 100, "--out", tmp_path / "run"))
    assert "257 tokens, more than the model's vocab_size = 100: --vocab-size 257 fits" in line


def test_new_text_is_trained_on_when_told(command, tmp_path):
    corpus, out = tmp_path / "words.txt", tmp_path / "run"
    arguments = ("--data", corpus, "--out", out, "--quiet", "--steps")
    corpus.write_text("half of the notes " * 200)
    assert command(*arguments, 1)[0] == 0
    corpus.write_text("half of the songs " * 200)
    assert "--new-data" in one_line(command(*arguments, 2))
    assert command(*arguments, 2, "--new-data")[0] == 0


def test_the_smallest_package_trains_and_generates(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "smallest/src")
    main = import_module("mezzo_smallest.__main__").main
    LAWS["segments"](import_module("mezzo_smallest").LookBackConfig().build(8))
    for words in (
        ("train", "tiny", "--out", tmp_path / "run", "--steps", 1, "--quiet"),
        ("generate", tmp_path / "run", "--prompt", "It", "--max-new-tokens", 2),
    ):
        with pytest.raises(SystemExit) as end:
            main(list(map(str, words)))
        assert end.value.code == 0, capsys.readouterr().err
    assert capsys.readouterr().out.splitlines()[-1].startswith("It")
    with pytest.raises(SystemExit) as end:
        main(["bench"])
    assert end.value.code == 2
    assert "No such command" in capsys.readouterr().err


def test_layers_of_another_package_are_trained_further_if_that_is_allowed(command, tmp_path):
    config = LMConfig(257, 16, mixers=(RunningMeanConfig(),))
    save_model(config.build(), config, tmp_path / "start", {"tokenizer": "byte"})
    given = ("--init-from", tmp_path / "start", "--out", tmp_path / "run", "--steps", 1, "--quiet")
    assert "--allow-package toys" in one_line(command(*given))
    assert command(*given, "--allow-package", "toys")[0] == 0


def test_a_fresh_run_takes_the_place_of_another(tiny, tmp_path):
    run_recipe(tiny(steps=1), tmp_path, fresh=False, new_data=False, quiet=True)
    run_recipe(tiny(steps=1, seed=1), tmp_path, fresh=True, new_data=False, quiet=True)
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 1
