"""Supervised fine-tuning: what is learned of prompts with answers, and of chats."""

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from mezzo_core.data import NO_TARGET, AnswersConfig, DataConfig
from mezzo_core.data.continuations import Continuations
from mezzo_core.data.examples import Part, encode_chat, encode_example, parse_example
from mezzo_core.data.tokenizer_files import load_tokenizer
from mezzo_core.data.tokenizers import ByteTokenizer
from mezzo_core.errors import UserError
from mezzo_core.nn import AttentionConfig, LMConfig
from mezzo_core.testing.damage import damages, json_damages

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Ciao"},
]


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(str(path), validation_fraction=0.2)


@pytest.fixture
def text(tmp_path):
    examples = [{"prompt": f"{i} + 1 = ", "answer": str(i + 1), "id": i} for i in range(40)]
    return written(tmp_path / "sums.jsonl", *examples)


def examples_of(batch):
    """Return the examples of a batch, each as its text and what of it is a target."""
    found = []
    borders = batch.cu_seqlens.unique().tolist()
    for first, last in pairwise(borders):
        tokens, targets = batch.tokens[0, first:last], batch.targets[0, first:last]
        asked = targets[targets != NO_TARGET].tolist()
        if asked:
            assert asked[:-1] == tokens[1:][targets[:-1] != NO_TARGET].tolist()[: len(asked) - 1]
            found.append((bytes(t for t in tokens.tolist() if t < 256).decode(), asked))
    return found


def test_the_targets_are_the_answers_and_their_ends(text):
    rows = AnswersConfig(text).build(11, None)  # which the longest example fills
    found = [one for batch in rows.validation_batches(2) for one in examples_of(batch)]
    assert len(found) == 8
    for its, asked in found:
        prompt, _, answer = its.rpartition(" ")
        assert asked == [*answer.encode(), 256]
        assert int(answer) == int(prompt.split(" ", 1)[0]) + 1


def test_of_a_chat_the_assistant_is_learned():
    parts = parse_example(json.dumps({"messages": CHAT}), "line 1")
    tokens, learned = encode_example(parts, Continuations(ByteTokenizer()))
    text = "".join("|" if t == 256 else chr(t) for t in tokens)
    assert text == (
        "system:\nBe short.\nuser:\nHi\nassistant:\nHello|user:\nBye\nassistant:\nCiao|"
    )
    asked = "".join(c for c, is_learned in zip(text, learned, strict=True) if is_learned)
    assert asked == "Hello|Ciao|"


@pytest.mark.parametrize("kind", ["byte", "gpt2", "llama", "sentencepiece"])
def test_prompts_are_read_as_in_training(names, kind):
    tokenizer = load_tokenizer(names[kind])
    chat = [*CHAT[:3], {"role": "user", "content": "A code:\n"}, CHAT[-1]]
    for example, first in (
        ({"messages": chat}, "system:\nBe short.\nuser:\nHi\nassistant:\n"),
        ({"prompt": "It is ", "answer": "a man"}, "It is "),
    ):
        parts = parse_example(json.dumps(example), "line 1")
        tokens, learned = encode_example(parts, Continuations(tokenizer))
        prompt = tokenizer.encode(first)
        assert tokens[: len(prompt)] == prompt
        assert learned[: len(prompt) + 1] == [False] * len(prompt) + [True]
        asked = [t for t, is_learned in zip(tokens, learned, strict=True) if is_learned]
        answers = ["Hello", "Ciao"] if "messages" in example else ["a man"]
        assert asked.count(tokenizer.eos_token) == len(answers)
        if "messages" not in example:
            assert tokenizer.decode(tokens) == "It is a man"
    parts = parse_example(json.dumps({"messages": chat}), "line 1")
    tokens, _ = encode_example(parts, Continuations(tokenizer))
    last = [*Continuations(tokenizer).encode("Ciao"), tokenizer.eos_token]
    assert [*encode_chat(chat[:-1], tokenizer), *last] == tokens


def test_every_example_is_read_once_an_epoch_and_none_is_both_trained_on_and_held_out(text):
    rows = AnswersConfig(text).build(48, None)
    epoch = rows.num_train_tokens // 48
    trained = [one for step in range(epoch) for one in examples_of(rows.train_batch(step, 1))]
    held_out = [one for batch in rows.validation_batches(3) for one in examples_of(batch)]
    assert sorted(its for its, _ in trained + held_out) == sorted(
        f"{i} + 1 = {i + 1}" for i in range(40)
    )
    again = [
        one for step in range(epoch, 2 * epoch) for one in examples_of(rows.train_batch(step, 1))
    ]
    assert sorted(again) == sorted(trained)
    assert again != trained


def test_a_batch_is_a_function_of_the_seed_and_the_step(text):
    first, second = (AnswersConfig(text).build(48, None) for _ in range(2))
    other = AnswersConfig(replace(text, seed=1)).build(48, None)
    assert first.fingerprint == second.fingerprint != other.fingerprint
    for step in (0, 5, 2):
        assert torch.equal(first.train_batch(step, 3).tokens, second.train_batch(step, 3).tokens)
    assert not torch.equal(first.train_batch(0, 3).tokens, other.train_batch(0, 3).tokens)


def test_parts_of_a_batch_are_those_of_its_processes(text):
    batch = AnswersConfig(text).build(48, None).train_batch(0, 4)
    parts = [batch.part(i, 2) for i in range(2)]
    assert [one for part in parts for one in examples_of(part)] == examples_of(batch)


@torch.no_grad()
def test_an_example_in_a_row_has_the_loss_that_it_has_alone(text):
    torch.manual_seed(0)
    model = LMConfig(vocab_size=257, d_model=16, mixers=(AttentionConfig(head_dim=8),)).build()
    batch = AnswersConfig(text).build(48, None).train_batch(0, 2)
    packed = model.loss(*batch, reduction="sum")
    alone = 0.0
    for its, asked in examples_of(batch):
        tokens = torch.tensor([[*its.encode(), 256]])
        targets = tokens[:, 1:].clone()
        targets[:, : -len(asked)] = NO_TARGET
        alone += model.loss(tokens[:, :-1], targets, reduction="sum")
    torch.testing.assert_close(packed, alone)


def test_held_out_examples_can_be_in_a_file_of_their_own(text, tmp_path):
    written(tmp_path / "other.jsonl", {"prompt": "a", "completion": "b"})
    config = AnswersConfig(replace(text, validation_source=str(tmp_path / "other.jsonl")))
    data = config.build(48, None)
    (batch,) = data.validation_batches(1)
    assert examples_of(batch) == [("ab", [ord("b"), 256])]
    other = AnswersConfig(replace(config.text, seed=1)).build(48, None)
    assert not torch.equal(data.train_batch(0, 3).tokens, other.train_batch(0, 3).tokens)
    written(tmp_path / "other.jsonl", {"prompt": "a", "completion": "c"})
    assert data.fingerprint == other.fingerprint != config.build(48, None).fingerprint


BAD = {
    "no field": ({"text": "x"}, 'line 2: an example needs "prompt" and "answer"'),
    "two answers": ({"prompt": "x", "answer": "y", "completion": "z"}, "line 2: an example needs"),
    "a number": ({"prompt": "x", "answer": 3}, 'line 2: "answer" must be a text that is not empty'),
    "empty": ({"prompt": "", "answer": "y"}, 'line 2: "prompt" must be .*, got an empty one'),
    "a list": ([1], "line 2: a JSON object is needed, got list"),
    "no message": ({"messages": []}, 'line 2: "messages" must be a list with at least one'),
    "a role": (
        {"messages": [{"role": "me", "content": "x"}]},
        "line 2: messages\\[0\\] must have a",
    ),
    "no answer": ({"messages": CHAT[:2]}, 'line 2: no message is the "assistant"\'s'),
    "no content": ({"messages": [{"role": "user"}]}, 'line 2: "content" of messages\\[0\\] must'),
    "half a pair": ({"prompt": "\ud800", "answer": "y"}, 'line 2: "prompt" is not Unicode'),
    "too long": ({"prompt": "x" * 60, "answer": "y"}, "line 2: an example of 62 tokens does not"),
}


@pytest.mark.parametrize(("record", "words"), BAD.values(), ids=BAD)
def test_a_bad_line_is_one_clear_error_or_is_left_out(tmp_path, caplog, record, words):
    good = {"prompt": "x", "answer": "y"}
    text = written(tmp_path / "bad.jsonl", good, record, good)
    with pytest.raises(UserError, match=words) as error:
        AnswersConfig(text).build(48, None)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("skip_bad (--skip-bad) leaves such lines out")
    AnswersConfig(replace(text, skip_bad=True)).build(48, None)
    assert "left out 1 examples, the first" in caplog.text


def test_what_is_no_json_names_its_line(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "x", "answer": "y"}\n\n{"prompt": "x", \n')
    with pytest.raises(UserError, match="line 3: not JSON"):
        AnswersConfig(DataConfig(str(path))).build(48, None)


def test_too_few_examples_and_other_files_are_refused(tmp_path):
    text = written(tmp_path / "one.jsonl", {"prompt": "x", "answer": "y"})
    with pytest.raises(UserError, match="a part to train on and one to validate on"):
        AnswersConfig(text).build(48, None)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="there is no example"):
        AnswersConfig(DataConfig(str(tmp_path / "empty.jsonl"))).build(48, None)
    (tmp_path / "words.txt").write_text("words")
    with pytest.raises(UserError, match=r"must be in \.jsonl files"):
        AnswersConfig(DataConfig(str(tmp_path / "words.txt"))).build(48, None)


@pytest.mark.parametrize("record", [{"prompt": "x", "answer": "y"}, {"messages": CHAT[1:3]}])
def test_a_damaged_line_is_one_line_of_error_or_another_example(record):
    content = json.dumps(record).encode()
    for what, damaged in (*damages(content, random.Random(0)), *json_damages(content)):
        parts, told = [Part("x", True)], "line 1: "
        try:
            parts = parse_example(damaged.decode("utf-8", errors="replace"), "line 1")
        except UserError as error:
            told = str(error)
        assert told.startswith("line 1: "), what
        assert "\n" not in told, what
        assert all(part.text for part in parts), what
        assert any(part.is_answer for part in parts), what
