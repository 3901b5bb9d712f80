"""LongBench: its scores are its own, and a model's answers get them."""

import hashlib
import json
from functools import partial

import pytest
import torch
from mezzo_core.data.tokenizers import ByteTokenizer
from mezzo_core.errors import UserError
from mezzo_core.eval.longbench import TASKS, measure_longbench, read_questions
from mezzo_core.eval.longbench.measure import Question
from mezzo_core.eval.longbench.scores import SCORES
from mezzo_core.nn import AttentionConfig, LMConfig, generate
from mezzo_core.nn.checkpoint import save_model

CONFIG = LMConfig(vocab_size=257, d_model=16, mixers=(AttentionConfig(head_dim=8),), init_std=0.5)
CLASSES = ["Location", "Other", "location", "Other location", "City", "other", "number"]
LONG = "the cat sat. on a mat the cat. and a dog"


@pytest.mark.parametrize(
    ("score", "written", "answer", "expected"),
    [
        ("f1", "The cat, a mat!", "mat cat dog", 4 / 5),
        ("f1", "the", "a", 0),
        # Values of the package `rouge` 1.0.1, which LongBench uses.
        ("rouge_l", LONG, "a cat sat on the mat. a dog and cat.", 0.749999995),
        ("rouge_l", "one two  three", "three two one", 0.3333333283333334),
        ("rouge_l", "a a a b", "a b b", 0.999999995),
        ("rouge_l", "...", "a", 0),
        # LongBench leaves out "Other", a part of the answer, but overlooks "location" behind it.
        ("classes", "Other location, City", "Other location", 1 / 3),
        ("classes", "location, number", "location", 1 / 2),
        ("classes", "it is: other number", "number", 1 / 2),
        ("classes", "another number", "another", 0),
        ("numbers", "Paragraph 3, or 4 or 3", "Paragraph 3", 2 / 3),
        ("numbers", "none", "Paragraph 3", 0),
        ("code", "\n```python\n# say\nreturn x + 1\nmore", "return x + 2", 0.92),
        ("code", "", "return", 0),
    ],
)
def test_a_score_is_that_of_longbench(score, written, answer, expected):
    assert SCORES[score](written, answer, CLASSES) == pytest.approx(expected, abs=1e-12)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return CONFIG.build()


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def record(dataset, context="Some facts. " * 9, **more):
    return {"dataset": dataset, "input": "Who?", "context": context, "answers": ["x", "é"], **more}


def test_prompts_are_those_of_longbench():
    """By the checksum of the English ones in its config/dataset2prompt.json."""
    prompts = "\0".join(TASKS[name].prompt for name in sorted(TASKS))
    expected = "3805174f4c000eecdb38738394a6ff60f187f2fb80022b24e7a2a9babb82c021"
    assert hashlib.sha256(prompts.encode()).hexdigest() == expected


def test_an_answer_is_greedy_after_the_first_and_the_last_half(model, tmp_path):
    (question,) = read_questions(written(tmp_path / "a.jsonl", record("hotpotqa", "é" * 300)))
    prompt = list(TASKS["hotpotqa"].prompt.format(input="Who?", context="é" * 300).encode())
    length = 101 + 32
    (new,) = generate(model, [prompt[:50] + prompt[-50:]], max_new_tokens=32, stop_tokens=[256])
    right = question._replace(answers=["x", ByteTokenizer().decode(new)])
    found = measure_longbench(model, ByteTokenizer(), [right, question], length=length)
    other = SCORES["f1"](ByteTokenizer().decode(new), "é", ())
    assert found == (pytest.approx(50 + 50 * other), length, 2, 2)
    with pytest.raises(UserError, match="of 34 or more is needed by hotpotqa"):
        measure_longbench(model, ByteTokenizer(), [question], length=33)


def test_a_prompt_with_the_first_token_of_a_document_fits(model, monkeypatch):
    told, tokenizer = [], ByteTokenizer()
    monkeypatch.setattr(
        "mezzo_core.eval.longbench.measure.generate",
        lambda _, prompts, **options: (told.append((prompts, options)), [[]])[1],
    )
    tokenizer.begin_tokens = (256,)
    options = {"segment_tokens": 64, "repetition_penalty": 1.2, "length": 134}
    measure_longbench(model, tokenizer, [Question("hotpotqa", "x", "y" * 300, ["z"])], **options)
    (((prompt,), asked),) = told
    assert (prompt[0], len(prompt)) == (256, 101)
    assert (asked["prefill_tokens"], asked["repetition_penalty"]) == (64, 1.2)


@pytest.mark.parametrize(
    ("written", "ends"), [(b"", 0), (b"\n", 0), (b"a b", 0), (b"\n\na", 0), (b"\na\n", 1)]
)
def test_a_summary_of_a_chat_ends_with_its_first_line_that_is_not_empty(
    model, monkeypatch, written, ends
):
    told = {}

    def generated(_, prompts, **options):
        told.update(options)
        return [[*b"x"] for _ in prompts]

    monkeypatch.setattr("mezzo_core.eval.longbench.measure.generate", generated)
    question = Question("samsum", "x", "y", ["answer"], None)
    measure_longbench(model, ByteTokenizer(), [question], length=2000)
    assert told["stop"]([*written]) == bool(ends)


def test_a_command_measures_each_task_of_a_file(model, tmp_path, run_command):
    save_model(model, CONFIG, tmp_path / "model", {"tokenizer": "byte"})
    many = [record(name, all_classes=CLASSES) for name in ("trec", "lcc", "trec", "samsum")]
    file = written(tmp_path / "many.jsonl", *many)

    command = partial(run_command, "eval", tmp_path, "--longbench", file, "--seq-len")
    code, out, err = command(65)
    assert (code, out) == (2, "")
    assert "of 130 or more is needed by trec, lcc, samsum" in err
    code, out, err = command(300)
    assert code == 0, err
    assert err.splitlines() == ["asking trec", "asking lcc", "asking samsum"]
    results = json.loads(out)["results"]
    asked = {name: found["questions"] for name, found in results.items()}
    assert asked == {"longbench_trec": 2, "longbench_lcc": 1, "longbench_samsum": 1}
    assert all(0 <= found["score"] <= 100 for found in results.values())
    results = json.loads(command(300, "--limit", 1)[1])["results"]
    assert [found["questions"] for found in results.values()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        (json.dumps(record("hotpot")), "there is no task 'hotpot'; did you mean hotpotqa"),
        (json.dumps(record("lcc", None)), '"context" must be texts'),
        (json.dumps(record("lcc", answers=[])), '"answers" must be a list of texts'),
        (json.dumps(record("trec", all_classes=[1])), '"all_classes" too or null'),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, line, told):
    (tmp_path / "a.jsonl").write_text(json.dumps(record("lcc")) + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: ") as error:
        read_questions(tmp_path / "a.jsonl")
    assert told in str(error.value)
    assert str(error.value).count("a.jsonl") == 1
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(UserError, match="there is no question"):
        read_questions(tmp_path / "a.jsonl")
