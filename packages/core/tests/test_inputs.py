"""The text that a model's folder tells, or another in its place, opened for an evaluation."""

import json
from dataclasses import replace

import pytest
from mezzo_core.config_json import to_json
from mezzo_core.data import AnswersConfig, DataConfig, MixtureConfig
from mezzo_core.errors import UserError
from mezzo_core.eval.evaluate import evaluate
from mezzo_core.inputs import open_told_data, told_tokenizer
from mezzo_core.nn import AttentionConfig, LMConfig, save_model


def opened(config, folder, **options):
    extra = {"data": to_json(config), "seq_len": 5, "tokenizer": config.tokenizer}
    return open_told_data(extra, folder, 257, **options)


@pytest.mark.parametrize("held_out", [None, "embedded"])
def test_all_of_another_text_is_read_or_its_validation_part(tmp_path, held_out):
    text = "0123456789" * 10
    (tmp_path / "other.txt").write_text(text)
    config, source = DataConfig(validation_source=held_out), str(tmp_path / "other.txt")
    read = {}
    for whole in (False, True):
        name, rows = opened(config, tmp_path, source=source, whole=whole)
        assert name == source
        targets = [batch.targets for batch in rows.validation_batches(3)]
        read[whole] = bytes(int(i) for part in targets for i in part.flatten() if 0 <= i < 256)
    assert rows.num_validation_bytes == len(text)
    assert read == {False: text[-4:].encode(), True: text.encode()}


def test_all_of_the_text_is_read_where_another_was_held_out(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 99)
    config = DataConfig(str(tmp_path / "a.txt"), validation_source=str(tmp_path / "b.txt"))
    extra = {"data": to_json(config), "fingerprint": config.build(5, None).fingerprint}
    name, rows = open_told_data(extra, tmp_path, 257, seq_len=5, whole=True)
    assert (name, rows.num_validation_bytes) == (config.source, 99)


def test_a_text_shorter_than_a_row_can_be_read_as_a_whole(tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    source = str(tmp_path / "short.txt")
    _, rows = opened(DataConfig(), tmp_path, source=source, whole=True)
    (batch,) = rows.validation_batches(1)
    assert batch.targets.tolist() == [[*b"abc", 256, -100]]
    _, rows = opened(DataConfig(), tmp_path, source=source)
    with pytest.raises(UserError, match="fewer than one window"):
        rows.check_training(1)
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(UserError, match=r"what is held out has no target: .*\(--all\)"):
        opened(DataConfig(mask_documents=True), tmp_path, source=source)


def test_the_texts_of_a_mixture_tell_that_documents_have_a_first_token(tmp_path):
    mixture = to_json(MixtureConfig((DataConfig(add_bos=True),) * 2, (1, 1)))
    with pytest.raises(UserError, match="add_bos: the tokenizer 'byte' has no token"):
        told_tokenizer({"data": mixture, "tokenizer": "byte"}, tmp_path, 257)
    for texts in ([], [3], [[]], "add_bos"):
        told_tokenizer({"data": {"texts": texts}, "tokenizer": "byte"}, tmp_path, 257)


def test_one_text_of_a_mixture_is_read_as_there(tmp_path):
    texts = []
    for name, fraction in (("a", 0.5), ("b", 0.2)):
        (tmp_path / f"{name}.txt").write_text(name * 99)
        texts.append(DataConfig(str(tmp_path / f"{name}.txt"), validation_fraction=fraction))
    mixture = MixtureConfig(tuple(texts), (1, 1))
    extra = {"data": to_json(mixture), "seq_len": 5}
    for text in texts:
        name, rows = open_told_data(extra, tmp_path, 257, text.source)
        assert (name, rows.num_validation_bytes) == (
            text.source,
            text.build(5, None).num_validation_bytes,
        )


def test_a_stream_has_no_whole_and_another_text_has(tmp_path):
    streamed = replace(DataConfig(), streaming=True)
    with pytest.raises(UserError, match="is a stream"):
        opened(streamed, tmp_path, whole=True)
    (tmp_path / "other.txt").write_text("0123456789")
    _, rows = opened(streamed, tmp_path, source=str(tmp_path / "other.txt"), whole=True)
    assert rows.num_validation_bytes == 10


def test_a_model_that_tells_no_tokenizer_takes_one_with_the_text(tmp_path):
    (tmp_path / "other.txt").write_text("abc")
    source = str(tmp_path / "other.txt")
    with pytest.raises(UserError, match=r"config\.json tells no tokenizer: give --tokenizer$"):
        open_told_data({"seq_len": 5}, tmp_path, 257, source, whole=True)
    with pytest.raises(UserError, match=r"config\.json tells no seq_len: give --seq-len$"):
        open_told_data({}, tmp_path, 257, source, "byte", whole=True)
    name, rows = open_told_data({}, tmp_path, 257, source, "byte", 5, whole=True)
    assert (name, rows.num_validation_bytes) == (source, 3)


TRAINED_ON = {
    "a text": DataConfig(text_column="body"),
    "a stream": DataConfig("a.txt", streaming=True),
    "a mixture": MixtureConfig((DataConfig(), DataConfig("a.txt")), (1, 1)),
    "examples": AnswersConfig(DataConfig("a.jsonl")),
}


@pytest.mark.parametrize("name", TRAINED_ON)
def test_a_model_of_any_text_is_measured_by_the_answers_to_other_prompts(
    tmp_path, run_command, name
):
    file = tmp_path / "sft.jsonl"
    file.write_text('{"prompt": "a", "answer": "bc"}\n{"prompt": "def", "answer": "g"}\n')
    extra = {"data": to_json(TRAINED_ON[name]), "seq_len": 5, "tokenizer": "byte"}
    _, rows = open_told_data(extra, tmp_path, 257, str(file), answers=True, whole=True)
    (batch,) = rows.validation_batches(2)
    assert batch.targets[batch.targets != -100].tolist() == [*b"bc", 256, *b"g", 256]
    config = LMConfig(vocab_size=257, d_model=8, mixers=(AttentionConfig(head_dim=8),))
    save_model(config.build(), config, tmp_path / "model", extra)
    _, out, _ = run_command("eval", tmp_path, "--sft", file, "--all", "--device", "cpu")
    told = json.loads(out)
    assert (told["data"], told["tokens"]) == (str(file), 5)


def test_the_command_reads_as_many_rows_and_tokens_at_a_time_as_told(
    tmp_path, run_command, monkeypatch
):
    config = LMConfig(vocab_size=257, d_model=8, mixers=(AttentionConfig(head_dim=8),))
    save_model(config.build(), config, tmp_path / "model", {"tokenizer": "byte"})
    (tmp_path / "other.txt").write_text("0123456789" * 20)
    told = []
    monkeypatch.setattr(
        "mezzo_core.eval.evaluate.evaluate",
        lambda model, batches, **how: (
            told.append((next(batches).tokens.shape, how["segment_tokens"])),
            evaluate(model, batches, **how),
        )[1],
    )
    sizes = ("--seq-len", 9, "--batch-size", 3, "--segment-tokens", 4)
    given = ("--data", tmp_path / "other.txt", "--all", "--device", "cpu")
    assert run_command("eval", tmp_path, *given, *sizes)[0] == 0
    assert told == [((3, 9), 4)]
