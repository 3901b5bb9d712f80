"""From a Transformer on disk to a fine-tuned RNN that writes, by commands."""

import json
import re
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import typer
from mezzo_core.cli import run
from mezzo_core.data import DataConfig
from mezzo_core.data.tokenizers import ByteTokenizer
from mezzo_core.errors import UserError
from mezzo_core.inputs import open_told_data, told_tokenizer
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.nn.generate import generate
from mezzo_core.nn.lm import LMConfig
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.loop import train
from mezzo_gsa.convert import TARGETS, convert, load_llama
from mezzo_gsa.convert.source import download, read_transformer
from mezzo_gsa.convert_command import NAMES, convert_command

TRAIN = TrainConfig(
    name="tiny",
    model=LMConfig(257, 32, (AttentionConfig(8, num_kv_heads=2),) * 2),
    seq_len=32,
    batch_size=2,
    steps=2,
    eval_every=2,
    eval_batches=1,
)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("half of the notes stand between a rest and a song " * 200)
    return path


@pytest.fixture
def command(capsys):
    """Run `convert` with some words; return its exit code, its output and its error."""
    app = typer.Typer()
    app.command()(convert_command)

    def call(*words):
        with pytest.raises(SystemExit) as ended:
            run(app, [str(word) for word in words])
        return (ended.value.code or 0, *capsys.readouterr())

    return call


def test_the_help_names_the_targets_that_there_are():
    assert tuple(TARGETS) == NAMES


@pytest.mark.parametrize("target", TARGETS)
def test_a_run_of_ours_is_converted_fine_tuned_and_writes(command, corpus, tmp_path, target):
    data = DataConfig(source=str(corpus))
    source = train(
        TrainConfig(**{**vars(TRAIN), "data": data}), tmp_path / "source", quiet=True
    ).out
    code, out, _ = command(source, "--to", target, "--out", tmp_path / "converted")
    assert code == 0
    transformer, _, extra = load_model(source / "model")
    model, config, new_extra = load_model(tmp_path / "converted")
    assert f"{transformer.num_parameters():,} weights" in out
    assert f"{model.num_parameters() - transformer.num_parameters():,} new" in out
    assert torch.equal(model.embed.weight, transformer.embed.weight)
    assert model.head.weight is model.embed.weight
    assert new_extra == {**extra, "step": 0, "converted_from": str(source)}
    tuned = train(
        TrainConfig(
            **{
                **vars(TRAIN),
                "data": data,
                "model": config,
                "init_from": str(tmp_path / "converted"),
            }
        ),
        tmp_path / "tuned",
        quiet=True,
    )
    tuned_model, tuned_config, _ = load_model(tuned.out / "model")
    assert tuned_config == config
    assert not torch.equal(tuned_model.embed.weight, model.embed.weight)
    assert len(generate(tuned_model, [[104, 97]], max_new_tokens=5, temperature=0)[0]) == 5


@pytest.mark.parametrize("target", TARGETS)
def test_a_llama_is_converted_to_the_same_weights_as_in_python(
    command, llama, checkpoint, tmp_path, target
):
    folder, _ = checkpoint(llama(vocab_size=257), num_files=2)
    words = ("--to", target, "--out", tmp_path / "out", "--tokenizer", "byte", "--seed", "3")
    assert command(folder, *words)[0] == 0
    model, config, extra = load_model(tmp_path / "out")
    expected_config, expected = convert(*load_llama(folder), TARGETS[target], seed=3)
    assert config == expected_config
    state = model.state_dict()
    assert all(torch.equal(state[name], w) for name, w in expected.items())
    assert extra["tokenizer"] == extra["data"]["tokenizer"] == "byte"
    assert extra["seq_len"] == 2048


def test_a_run_whose_tokenizer_is_replaced_knows_the_new_one(corpus, tmp_path):
    config = replace(TRAIN, data=DataConfig(source=str(corpus)))
    source = train(config, tmp_path / "source", quiet=True).out
    path = source / "model" / "config.json"
    content = json.loads(path.read_text())
    content["extra"]["tokenizer_identity"] = "another"
    path.write_text(json.dumps(content))
    kept, new = (read_transformer(str(source), tokenizer).extra for tokenizer in (None, "byte"))
    with pytest.raises(UserError, match="is not the one that the model was trained with"):
        told_tokenizer(kept, source, 257)
    told_tokenizer(new, source, 257)
    open_told_data(new, source, 257)


def test_a_converted_llama_is_prompted_measured_and_tuned_with_its_first_token(
    llama, checkpoint, tmp_path
):
    library = pytest.importorskip("tokenizers")
    letters = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: i for i, word in enumerate(["<s>", "</s>", *letters])}
    made = library.Tokenizer(library.models.BPE(vocab, []))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<pad>"])  # the last one above the vocabulary
    made.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    folder, _ = checkpoint(llama(vocab_size=258))
    made.save(str(folder / "tokenizer.json"))
    extra = read_transformer(str(folder)).extra
    assert told_tokenizer(extra, folder, 258).begin_tokens == (0,)
    (tmp_path / "a.jsonl").write_text('{"text": "half"}\n{"text": "rest"}\n')
    _, rows = open_told_data(extra, folder, 258, str(tmp_path / "a.jsonl"), whole=True, seq_len=12)
    (batch,) = rows.validation_batches(1)
    assert batch.tokens[0, [0, 1, 6, 7]].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model"])
def test_a_checkpoints_own_tokenizer_is_found(llama, checkpoint, file, monkeypatch):
    folder, _ = checkpoint(llama(vocab_size=257))
    with pytest.raises(UserError, match=r"no tokenizer.json or tokenizer.model.*--tokenizer"):
        read_transformer(str(folder))
    (folder / file).write_text("{}")
    with pytest.raises(UserError, match=r"is no (tokenizer|SentencePiece model)"):
        read_transformer(str(folder))
    for module in ("mezzo_core.inputs", "mezzo_gsa.convert.source"):
        monkeypatch.setattr(f"{module}.load_tokenizer", lambda name, **_: ByteTokenizer())
    expected = folder if file == "tokenizer.json" else folder / file
    assert read_transformer(str(folder)).extra["tokenizer"] == str(expected.resolve())
    assert read_transformer(str(folder), "byte").extra["tokenizer"] == "byte"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nowhere", "--to", "gsa"], "nowhere holds no trained model"),
        (["SOURCE", "--to", "gs"], "--to takes gsa, gsa_spread, gla, retnet, supra, got 'gs'$"),
        (["SOURCE", "--to", "gsa"], "--tokenizer"),
    ],
)
def test_what_cannot_be_converted_is_one_line(command, llama, checkpoint, tmp_path, words, named):
    folder, _ = checkpoint(llama())
    words = [str(folder) if word == "SOURCE" else word for word in words]
    code, _, error = command(*words, "--out", tmp_path / "out")
    assert code == 2
    (line,) = error.splitlines()
    assert re.search(named, line)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(command, llama, checkpoint, tmp_path):
    folder, _ = checkpoint(llama(vocab_size=200))
    words = ("--to", "gsa", "--tokenizer", "byte", "--out", tmp_path / "out")
    code, _, error = command(folder, *words)
    assert code == 2
    assert "'byte' has 257 tokens, more than the model's vocabulary of 200" in error
    assert not (tmp_path / "out").exists()


def test_no_model_is_overwritten(command, llama, checkpoint, tmp_path):
    folder, _ = checkpoint(llama(vocab_size=257))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other, _ = checkpoint(llama(), name="other")
    for there in (folder, other):
        code, _, error = command(folder, "--to", "gsa", "--tokenizer", "byte", "--out", there)
        assert code == 2
        assert f"{there} has a model already: convert into another folder" in error
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(("target", "code"), [("gsa", 0), ("gla", 0), ("retnet", 2)])
def test_only_what_rotates_needs_a_rotation_that_is_known(
    command, llama, checkpoint, tmp_path, target, code
):
    folder, _ = checkpoint(llama(vocab_size=257, rope_scaling={"rope_type": "yarn", "factor": 8.0}))
    words = ("--to", target, "--tokenizer", "byte", "--out", tmp_path / "out")
    assert command(folder, *words)[0] == code


def test_a_folder_with_something_else_is_left_alone(command, llama, checkpoint, tmp_path):
    folder, _ = checkpoint(llama(vocab_size=257))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("all of it")
    words = ("--to", "gsa", "--out", tmp_path / "out", "--tokenizer", "byte")
    code, _, error = command(folder, *words)
    assert code == 2
    assert "thesis.txt" in error
    assert (tmp_path / "out/thesis.txt").read_text() == "all of it"


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for huggingface_hub: what `answer` gives, or raises, and what was asked."""
    module = ModuleType("huggingface_hub")
    module.asked = []

    def snapshot_download(name, *, allow_patterns):
        module.asked.append((name, allow_patterns))
        if isinstance(module.answer, Exception):
            raise module.answer
        return module.answer

    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return module


def test_the_hub_is_asked_by_name_for_nothing_pickled(hub, llama, checkpoint):
    folder, _ = checkpoint(llama())
    hub.answer = str(folder)
    found = read_transformer("hub:someone/tiny-llama")
    assert hub.asked == [("someone/tiny-llama", ["*.json", "*.safetensors", "tokenizer.model"])]
    assert found.extra["tokenizer"] == "hub:someone/tiny-llama"
    assert torch.equal(found.weights["embed.weight"], load_llama(folder)[1]["embed.weight"])
    assert json.dumps(found.extra)


def test_a_hub_that_fails_is_one_line(hub, monkeypatch):
    hub.answer = OSError("no such model\nand a page of advice")
    with pytest.raises(UserError, match=r"cannot get 'hub:a/b' from the hub: no such model$"):
        download("hub:a/b")
    with pytest.raises(UserError, match="source must have the form hub:OWNER/NAME"):
        download("hub:../a")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"huggingface_hub.*mezzo-core\[hub\]"):
        download("hub:a/b")
