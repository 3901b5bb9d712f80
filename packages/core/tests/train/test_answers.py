"""`train --sft`: a run learns answers, goes on to the bit, and is measured by its answers."""

import json
from functools import partial

import pytest
from mezzo_core.data import AnswersConfig, DataConfig
from mezzo_core.data.texts import change_texts, texts_of
from mezzo_core.errors import UserError
from mezzo_core.nn import AttentionConfig, LMConfig
from mezzo_core.train.config import OptimConfig
from mezzo_core.train.loop import train


@pytest.fixture
def answers(tmp_path):
    path = tmp_path / "answers.jsonl"
    lines = [{"prompt": f"The word {word} is: ", "answer": word} for word in ("red", "blue") * 40]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def command(tiny, run_command):
    """Run a command of a package with a recipe; return its exit code, its stdout and its stderr."""
    recipe = lambda: tiny(steps=60, eval_every=60, checkpoint_every=60, optim=OptimConfig(lr=1e-2))  # noqa: E731
    return partial(run_command, recipes=lambda: {"tiny": recipe})


def test_a_command_learns_answers_alone(command, answers, tmp_path):
    out = tmp_path / "run"
    code, _, err = command("train", "tiny", "--sft", answers, "--out", out, "--quiet")
    assert code == 0, err
    code, found, err = command("eval", out)
    assert code == 0, err
    found = json.loads(found)
    assert found["data"] == str(answers)
    assert found["accuracy"] == 1
    code, of_all, err = command("eval", out, "--all")
    assert code == 0, err
    assert json.loads(of_all)["accuracy"] == 1
    assert json.loads(of_all)["tokens"] > found["tokens"]
    words = ("--prompt", "The word blue is: ", "--temperature", "0", "--max-new-tokens", "9")
    code, text, err = command("generate", out, *words)
    assert (code, text.strip()) == (0, "The word blue is: blue"), err
    (tmp_path / "text.txt").write_text("Some other text. " * 9)
    code, text, err = command("eval", out, "--data", tmp_path / "text.txt", "--all")
    assert code == 0, err
    assert json.loads(text)["accuracy"] < 0.5, "of the prompts nothing was learned"
    with answers.open("a") as file:
        file.write('{"prompt": "x", "answer": "y"}\n')
    code, _, err = command("eval", out)
    assert code == 2
    assert "is not the text that the model was trained on" in err
    answers.rename(tmp_path / "there.jsonl")
    assert f"--sft can tell where '{answers}' is now" in command("eval", out)[2]
    for options in (
        ("eval", out, "--data", "a", "--data=b"),
        ("train", "tiny", *["--sft", "a"] * 2),
    ):
        code, _, err = command(*options)
        assert code == 2
        assert "is given more than once, and can name one place only" in err


def test_examples_are_a_text_as_others_are(tiny, answers, tmp_path):
    config = AnswersConfig(DataConfig(str(answers)))
    changed = change_texts(config, seed=3)
    assert changed == AnswersConfig(DataConfig(str(answers), seed=3))
    assert texts_of(changed) == (changed.text,)
    with pytest.raises(UserError, match="the tokenizer 'byte' has 257 tokens, more than"):
        train(tiny(data=config, model=LMConfig(9, 8, (AttentionConfig(8),))), tmp_path / "run")


def test_answers_and_a_text_are_not_both_trained_on(command, answers):
    code, _, err = command("train", "tiny", "--sft", answers, "--data", answers)
    assert (code, err.strip()) == (2, "error: --sft takes the place of --data: give one of them")


def test_examples_are_no_stream(command, answers):
    code, _, err = command("train", "tiny", "--sft", answers, "--streaming")
    assert code == 2
    assert err == "error: streaming (--streaming) must be False: examples are read at once\n"


def test_examples_have_no_text_column(command, answers):
    code, _, err = command("train", "tiny", "--sft", answers, "--text-column", "body")
    told = "error: text_column (--text-column) is for texts, and examples name their fields, got"
    assert (code, err.strip()) == (2, f"{told} 'body'")


def test_a_run_on_answers_goes_on_to_the_bit(tiny, answers, assert_goes_on):
    assert_goes_on(tiny(data=AnswersConfig(DataConfig(str(answers)))))
