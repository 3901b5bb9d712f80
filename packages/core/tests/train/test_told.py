"""A trained model knows its text and its tokenizer again, wherever they are."""

import json
import shutil
from dataclasses import replace

import pytest
from mezzo_core.data import AnswersConfig, DataConfig, MixtureConfig
from mezzo_core.errors import UserError
from mezzo_core.inputs import open_told_data, start_from, told_tokenizer
from mezzo_core.nn.checkpoint import describe_model
from mezzo_core.train.loop import train


@pytest.fixture
def trained(tiny, corpus, tmp_path):
    """A model of a text of its own: the model's folder, and that of the text."""
    texts = tmp_path / "texts"
    texts.mkdir()
    shutil.copy(corpus, texts / "b.txt")
    train(tiny(steps=1, data=DataConfig(source=str(texts))), tmp_path / "run", quiet=True)
    return tmp_path / "run" / "model", texts


def opened(folder, **options):
    _, extra = describe_model(folder)
    return open_told_data(extra, folder, 257, **options)[1]


def test_a_text_that_has_changed_is_no_held_out_text(trained):
    folder, texts = trained
    held_out = opened(folder).num_validation_bytes
    assert opened(folder, seq_len=7).num_validation_bytes == held_out
    (texts / "a.txt").write_text("what was not there")
    with pytest.raises(UserError, match="is not the text that the model was trained on"):
        opened(folder)
    for other in ({"source": str(texts)}, {"whole": True}):
        opened(folder, **other)
    (texts / "a.txt").unlink()
    assert opened(folder).num_validation_bytes == held_out


def test_a_model_cannot_make_its_reader_take_files_of_the_current_folder_for_the_hub(
    trained, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text('{"text": "words"}')
    folder, _ = trained
    _, extra = describe_model(folder)
    for value in ("hub:pandas", "hub:json", "hub:../texts"):
        crafted = {**extra, "data": {**extra["data"], "source": value}}
        with pytest.raises(UserError, match="source must have the form hub:OWNER/NAME"):
            open_told_data(crafted, folder, 257)
        crafted = {**extra, "tokenizer": value.replace("hub:", "hub:./")}
        with pytest.raises(UserError, match="tokenizer must have the form hub:OWNER/NAME"):
            told_tokenizer(crafted, folder, 257)


def test_a_text_that_has_moved_is_told_by_its_new_place(trained):
    folder, texts = trained
    held_out = opened(folder).num_validation_bytes
    there = str(texts.rename(texts.with_name("there")))
    with pytest.raises(UserError, match=f"no file or folder '{texts}', which its training read: "):
        opened(folder)
    assert opened(folder, source=there).num_validation_bytes == held_out


def a_tokenizer(folder, first):
    """Write a tokenizer of 256 bytes and an end token that begins with this byte."""
    library = pytest.importorskip("tokenizers")
    letters = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    words = [letters[first], *(c for c in letters if c != letters[first]), "<|endoftext|>"]
    ids = {word: i for i, word in enumerate(words)}
    made = library.Tokenizer(library.models.BPE(ids, []))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_another_tokenizer_in_its_place_is_refused_and_a_moved_one_is_taken(tiny, corpus, tmp_path):
    path = a_tokenizer(tmp_path, 0)
    data = DataConfig(source=str(corpus), tokenizer=path)
    folder = train(tiny(steps=1, data=data), tmp_path / "run", quiet=True).out / "model"
    _, extra = describe_model(folder)
    moved = str(shutil.copy(path, tmp_path / "moved.json"))
    a_tokenizer(tmp_path, 1)
    for use in (
        lambda: told_tokenizer(extra, folder, 257),
        lambda: opened(folder),
        lambda: start_from(tiny(), folder),
        lambda: told_tokenizer(extra, folder, 257, "byte"),
        lambda: start_from(tiny(), folder, "byte"),
    ):
        with pytest.raises(UserError, match="is not the one that the model was trained with"):
            use()
    assert told_tokenizer(extra, folder, 257, moved).encode("notes")
    assert opened(folder, tokenizer=moved).num_validation_bytes > 0
    mixed = replace(tiny(), data=MixtureConfig((tiny().data,) * 2, (1, 1)))
    started = start_from(mixed, folder, moved).data
    assert [text.tokenizer for text in started.texts] == [moved] * 2


def test_a_model_of_before_knows_neither(trained):
    folder, texts = trained
    _, extra = describe_model(folder)
    (texts / "a.txt").write_text("what was not there")
    older = {k: v for k, v in extra.items() if k not in ("fingerprint", "tokenizer_identity")}
    open_told_data(older, folder, 257)
    assert told_tokenizer(older, folder, 257).vocab_size == 257


READ = {
    "a text": lambda text: text,
    "a stream": lambda text: replace(text, streaming=True),
    "a mixture": lambda text: MixtureConfig((text, text), (1, 2)),
    "answers": AnswersConfig,
}


@pytest.mark.parametrize("kind", READ)
def test_a_run_goes_on_with_texts_and_a_tokenizer_that_have_moved(tiny, tmp_path, rows_of, kind):
    here, run = tmp_path / "here", tmp_path / "run"
    here.mkdir()
    a_tokenizer(here, 0)
    told = {"text": "half of the notes", "prompt": "half of", "answer": " the notes"}
    names = ("text",) if kind != "answers" else ("prompt", "answer")
    line = json.dumps({name: told[name] for name in names}) + "\n"
    (here / "lines.jsonl").write_text(line * 200)
    (here / "held_out.jsonl").write_text(line * 9)

    def config(folder, steps):
        paths = (f"{folder}/{name}" for name in ("lines.jsonl", "", "held_out.jsonl"))
        fields = ("source", "tokenizer", "validation_source")
        data = READ[kind](DataConfig(**dict(zip(fields, paths, strict=True))))
        return tiny(data=data, steps=steps)

    train(config(here, 2), run, quiet=True)
    there = here.rename(tmp_path / "there")
    assert train(config(there, 4), run, quiet=True).steps == 4
    with (there / "held_out.jsonl").open("a") as file:
        file.write(line)
    here.mkdir()
    for path in there.iterdir():
        shutil.copy(path, here)
    with pytest.raises(UserError, match="are not those that the run") as error:
        train(config(here, 6), run, quiet=True)
    assert "here/lines.jsonl' or '" in str(error.value)
    assert "here/held_out.jsonl'" in str(error.value)
    assert "source is '" in str(error.value)
    assert "or train into another folder" in str(error.value)
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3, 4]
