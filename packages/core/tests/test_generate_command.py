"""`generate` on the command line: each argument of the function that is a number has a flag."""

import inspect
from dataclasses import asdict
from functools import partial
from typing import get_args, get_type_hints

import pytest
import torch
from mezzo_core.data.stop_texts import stop_texts
from mezzo_core.data.stream_decoder import StreamDecoder
from mezzo_core.data.tokenizers import ByteTokenizer
from mezzo_core.generate_options import GenerateOptions
from mezzo_core.nn import AttentionConfig, LMConfig, beam_search, generate
from mezzo_core.nn.checkpoint import save_model

BYTES = ByteTokenizer()
CONFIG = LMConfig(vocab_size=257, d_model=16, mixers=(AttentionConfig(head_dim=8),), init_std=0.5)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return CONFIG.build()


@pytest.fixture
def command(model, tmp_path, run_command):
    """Run `generate` on the model; return its exit code, its stdout and its stderr."""
    save_model(model, CONFIG, tmp_path / "model", {"tokenizer": "byte"})
    return partial(run_command, "generate", tmp_path)


def written(prompts, rows):
    """Return what the command writes for continuations of several prompts."""
    return "".join(
        f"{prompt}{BYTES.decode(row)}\n\n" for prompt, row in zip(prompts, rows, strict=True)
    )


def test_prompts_begin_as_documents_do(command, model, monkeypatch):
    before, begin = [], StreamDecoder.__init__
    monkeypatch.setattr(ByteTokenizer, "begin_tokens", (65,))
    monkeypatch.setattr(
        StreamDecoder, "__init__", lambda *args: (before.append(args[2]), begin(*args))[1]
    )
    code, out, _ = command("--prompt", "xy", "--temperature", 0, "--max-new-tokens", 9)
    assert code == 0
    assert out.rstrip("\n") == "xy" + BYTES.decode(
        generate(model, [[*b"Axy"]], max_new_tokens=9)[0]
    )
    assert before == [[*b"Axy"]]


def test_there_is_a_flag_for_each_number_that_the_function_takes():
    """With the function's default, but for the sampling that a text wants."""
    taken, options = inspect.signature(generate).parameters, asdict(GenerateOptions())
    numbers = {
        name
        for name, kind in get_type_hints(generate).items()
        if {int, float} & {kind, *get_args(kind)} and name in taken and name != "stop_tokens"
    }
    assert set(options) == numbers
    others = {name for name, value in options.items() if taken[name].default != value}
    assert others == {"max_new_tokens", "temperature", "seed"}


WAYS = {
    "samples": (
        ("--num-samples", 2, "--top-k", 9), {"num_samples": 2, "top_k": 9, "temperature": 0.8}
    ),
    "rules": (
        ("--repetition-penalty", 1.5, "--logit-bias", "101=2", "--logit-bias", "9=-inf"),
        {"repetition_penalty": 1.5, "logit_bias": {101: 2, 9: float("-inf")}, "temperature": 0.8},
    ),
    "turns": (("--num-rows", 1, "--temperature", 0), {"num_rows": 1}),
    "stop": (
        ("--stop", "e", "--stop", "zz"),
        {"stop": stop_texts(BYTES, ["e", "zz"]), "temperature": 0.8},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("words", "options"), WAYS.values(), ids=WAYS)
def test_flags_do_what_the_arguments_do(command, model, words, options):
    prompts = ["It is", "A truth"]
    code, out, err = command(
        "--prompt", prompts[0], "--prompt", prompts[1], "--max-new-tokens", 8, *words
    )
    assert code == 0, err
    given = {"seed": 0, "stop_tokens": [256], "max_new_tokens": 8, **options}
    rows = generate(model, [list(text.encode()) for text in prompts], **given)
    assert out == written([text for text in prompts for _ in range(len(rows) // 2)], rows)


def test_an_assistant_changes_nothing(command, model, tmp_path):
    words = ("--prompt", "It is", "--max-new-tokens", 9)
    assert command(*words, "--assistant", tmp_path, "--num-drafted", 2) == command(*words)
    code, _, err = command(*words, "--num-drafted", 2)
    assert (code, err) == (2, "error: --num-drafted goes with --assistant\n")
    save_model(model, CONFIG, tmp_path / "other", {"tokenizer_identity": "other"})
    code, _, err = command(*words, "--assistant", tmp_path / "other")
    assert (code, err.count("'byte' is not the one that the model was trained with")) == (2, 1)


def test_beams_write_the_likeliest_text(command, model):
    code, out, err = command("--prompt", "It", "--num-beams", 4, "--max-new-tokens", 5)
    assert code == 0, err
    ((best, *_),) = beam_search(
        model, [list(b"It")], num_beams=4, max_new_tokens=5, stop_tokens=[256]
    )
    assert out == f"It{BYTES.decode(best.tokens)}\n"
    code, _, err = command("--prompt", "It", "--num-beams", 4, "--top-k", 3, "--seed", 1)
    assert (code, err) == (2, "error: --num-beams searches without --seed, --top-k\n")


def test_a_file_has_a_prompt_on_each_line(command, tmp_path):
    (tmp_path / "prompts.txt").write_text("It is\r\n\nA truth\n")
    words = ("--max-new-tokens", 4)
    wanted = command("--prompt", "It is", "--prompt", "A truth", *words)
    assert command("--prompt-file", tmp_path / "prompts.txt", *words) == wanted
    (tmp_path / "prompts.txt").write_text("\n")
    code, _, err = command("--prompt-file", tmp_path / "prompts.txt", *words)
    assert code == 2
    assert "there is no prompt" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--stop", ""), "a text to stop at must have at least one character"),
        (("--logit-bias", "a=1"), "--logit-bias must be TOKEN=NUMBER, such as 17=-inf, got 'a=1'"),
        (("--logit-bias", "5=-inf", "--logit-bias", "5=3"), "--logit-bias names token 5 twice"),
        (("--logit-bias", "300=1"), "logit_bias must hold token ids in [0, 257), got 300"),
        (("--num-samples", 0), "num_samples must be from 1"),
        (("--num-beams", 0), "num_beams must be from 1"),
        (("--num-beams", 10**8), "num_beams 100000000 takes 100000000 rows of 202 tokens, which"),
        (("--num-samples", 10**8), "num_samples 100000000 takes 100000000 rows of 202 tokens"),
        (("--num-samples", 10**8, "--num-rows", 10**7), "takes 10000000 rows of 202 tokens"),
        (("--repetition-penalty", 0), "repetition_penalty must be above 0"),
    ],
)
def test_a_bad_value_is_one_line(command, words, told):
    code, out, err = command("--prompt", "It", *words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert told in err
