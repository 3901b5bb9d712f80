"""A run that starts from the weights of a model on disk."""

import json
import shutil
from dataclasses import replace

import pytest
import tokenizers
import torch
from mezzo_core.config_json import to_json
from mezzo_core.data import DataConfig
from mezzo_core.errors import UserError
from mezzo_core.inputs import open_told_data, start_from, told_tokenizer
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.checkpoint import copy_weights, describe_model, load_model, save_model
from mezzo_core.nn.lm import LMConfig
from mezzo_core.train.loop import train
from mezzo_core.train.run_recipe import configure
from toys.running_mean import RunningMeanConfig


@pytest.fixture
def start(tiny, tmp_path):
    """A folder with a model of `tiny`'s kind, whose weights no seed of a run draws."""
    torch.manual_seed(1234)
    config = tiny().model
    save_model(config.build(), config, tmp_path / "start", {"tokenizer": "byte"})
    return tmp_path / "start"


def test_the_first_loss_is_that_of_the_weights_on_disk(tiny, tmp_path, start, rows_of):
    config = tiny(steps=2)
    train(config, tmp_path / "drawn", quiet=True)
    train(replace(config, init_from=str(start)), tmp_path / "read", quiet=True)
    drawn, read = (rows_of(tmp_path / name)[0]["loss"] for name in ("drawn", "read"))
    batch = config.data.build(32, None).train_batch(0, 4)
    model, _, _ = load_model(start)
    assert read == pytest.approx(model.loss(batch.tokens, batch.targets).item(), rel=1e-6)
    assert read != drawn


def test_a_run_goes_on_bit_for_bit_when_its_start_is_gone(tiny, tmp_path, start, losses_of):
    config = tiny(init_from=str(start))
    train(config, tmp_path / "whole", quiet=True)

    def stop(row):
        if row["step"] == 5:
            raise InterruptedError

    with pytest.raises(UserError, match="step-4"):  # the loop says where it can go on
        train(config, tmp_path / "stopped", quiet=True, on_step=stop)
    shutil.rmtree(start)
    train(config, tmp_path / "stopped", quiet=True)
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_start_from_the_same_weights(
    tiny, tmp_path, start, losses_of, train_in_processes
):
    config = tiny(steps=2, init_from=str(start))
    train(config, tmp_path / "one", quiet=True)
    ended = train_in_processes(config, tmp_path / "two", size=2)
    assert [code for code, _ in ended] == [0, 0], ended
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=2e-6)


def test_another_start_is_another_run(tiny, tmp_path, start):
    train(tiny(steps=2), tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match="init_from is None there") as error:
        train(tiny(steps=2, init_from=str(start)), tmp_path / "run", quiet=True)
    assert "\n" not in str(error.value)


def test_a_run_goes_on_when_its_start_has_moved(tiny, tmp_path, start, rows_of):
    def configured(folder, steps):
        flags = {"tokenizer": None, "steps": steps}
        out = tmp_path / "run"
        return configure(tiny(), flags, (), (), None, None, folder, out)

    train(configured(start, 2), tmp_path / "run", quiet=True)
    copy, other = shutil.copytree(start, tmp_path / "copy"), tmp_path / "other"
    shutil.rmtree(start)
    save_model(tiny().model.build(), tiny().model, other)
    with pytest.raises(UserError, match=r"init_from is '.* there"):  # it is no copy
        train(configured(other, 3), tmp_path / "run", quiet=True)
    train(configured(copy, 3), tmp_path / "run", quiet=True)
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3]
    shutil.rmtree(copy)
    train(configured(copy, 4), tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match=r"init_from is '.* there"):
        train(configured(other, 5), tmp_path / "run", quiet=True)


def test_weights_of_another_model_are_refused_in_one_line(tiny, tmp_path, start):
    wider = replace(tiny().model, d_model=48)
    with pytest.raises(UserError, match=r"embed.weight is \(257, 32\).*\(257, 48\)") as error:
        train(tiny(model=wider, init_from=str(start)), tmp_path / "run", quiet=True)
    assert "\n" not in str(error.value)
    untied = replace(tiny().model, tie_embeddings=False)
    with pytest.raises(UserError, match=r"missing weights head\.weight"):
        train(tiny(model=untied, init_from=str(start)), tmp_path / "other", quiet=True)


def test_a_start_that_is_not_there_is_refused_in_one_line(tiny, tmp_path):
    with pytest.raises(UserError, match=r"no model in .*nowhere"):
        train(tiny(init_from=str(tmp_path / "nowhere")), tmp_path / "run", quiet=True)


def test_refused_weights_leave_the_model_alone(tiny, start):
    model = replace(tiny().model, d_model=48).build()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(UserError):
        copy_weights(start, model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("tie", [True, False])
def test_copied_weights_take_the_models_dtype_and_stay_tied(tmp_path, tie):
    config = LMConfig(257, 32, (AttentionConfig(head_dim=16),), tie_embeddings=tie)
    saved, model = config.build().to(torch.bfloat16), config.build()
    save_model(saved, config, tmp_path / "model")
    copy_weights(tmp_path / "model", model)
    assert (model.head.weight is model.embed.weight) == tie
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, saved.state_dict()[name].float()), name


def test_a_command_takes_model_and_tokenizer_from_the_folder(tiny, tmp_path):
    config = tiny(model=replace(tiny().model, vocab_size=300), data=DataConfig(tokenizer="else"))
    run = train(tiny(steps=1), tmp_path / "run", quiet=True).out
    for folder in (run, run / "model"):
        ours = start_from(config, folder)
        assert ours.model == tiny().model == describe_model(run / "model")[0]
        assert ours.init_from == str(run / "model")
        assert ours.data == DataConfig(tokenizer="byte")
        assert replace(ours, model=config.model, data=config.data, init_from=None) == config
    with pytest.raises(UserError, match="holds no trained model"):
        start_from(config, tmp_path / "nowhere")
    extra = {"tokenizer": "gone", "data": to_json(DataConfig(add_bos=True))}
    save_model(config.model.build(), config.model, tmp_path / "bos/model", extra)
    with pytest.raises(UserError, match="add_bos: the tokenizer 'byte' has no token"):
        start_from(config, tmp_path / "bos", "byte")


def test_a_command_goes_on_when_its_start_is_gone(tiny, tmp_path, start):
    config = replace(tiny(), name="other", model=replace(tiny().model, d_model=64))

    def configured(out):
        return configure(config, {"tokenizer": None}, (), (), None, None, start, out)

    began = configured(tmp_path / "run")
    assert (began.model, began.init_from) == (tiny().model, str(start))
    train(began, tmp_path / "run", quiet=True)
    shutil.rmtree(start)
    assert configured(tmp_path / "run") == began
    begun = replace(began, data=replace(began.data, add_bos=True))
    (tmp_path / "run/config.json").write_text(json.dumps(to_json(begun)))
    assert configured(tmp_path / "run") == begun
    for elsewhere in (tmp_path / "nothing", None):
        with pytest.raises(UserError, match=r"(no model|holds no)"):
            configured(elsewhere)


def test_layers_of_another_package_go_on_when_their_start_is_gone(tiny, tmp_path):
    model = replace(tiny().model, mixers=(RunningMeanConfig(),))
    start, out = tmp_path / "start", tmp_path / "run"
    save_model(model.build(), model, start, {"tokenizer": "byte"})

    def configured():
        given = (tiny(), {"tokenizer": None}, (), (), None, None, start, out)
        return configure(*given, allow_packages=("toys",))

    began = configured()
    assert began.model == model
    train(began, out, quiet=True)
    shutil.rmtree(start)
    assert configured() == began


def test_a_command_changes_no_shape_of_the_folders_model(tiny, start):
    def configured(*settings):
        flags = {"tokenizer": None}
        return configure(tiny(), flags, settings, (), None, None, start, None).model

    assert configured("model.norm_eps=0.001") == replace(tiny().model, norm_eps=0.001)
    with pytest.raises(UserError, match="the model of --init-from keeps its shape"):
        configured("model.vocab_size=300")


def test_a_model_is_read_from_any_folder(tiny, corpus, tmp_path, monkeypatch):
    words = dict.fromkeys(corpus.read_text(encoding="utf-8").split())
    numbers = {word: i for i, word in enumerate(["</s>", *sorted(words)])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "words.json"))
    monkeypatch.chdir(tmp_path)
    config = tiny(steps=1, data=DataConfig(str(corpus), tokenizer="words.json"))
    folder = train(config, tmp_path / "run", quiet=True).out / "model"
    monkeypatch.chdir("/")
    model, _, extra = load_model(folder)
    assert told_tokenizer(extra, folder, model.vocab_size).encode("the song") == [
        numbers["the"],
        numbers["song"],
    ]
    assert start_from(tiny(), folder).data.tokenizer == str(tmp_path / "words.json")
    (tmp_path / "words.json").rename(tmp_path / "moved.json")
    moved = start_from(tiny(), folder, str(tmp_path / "moved.json"))
    assert moved.data.tokenizer == str(tmp_path / "moved.json")
    (tmp_path / "moved.json").rename(tmp_path / "words.json")
    backend.add_tokens(["else"])
    backend.save(str(tmp_path / "other.json"))
    with pytest.raises(UserError, match=r"'.*other\.json' is not the one that the model was"):
        start_from(tiny(), folder, str(tmp_path / "other.json"))
    open_told_data(extra, folder, model.vocab_size)


def test_a_start_is_not_removed_to_start_over_in_its_folder(tiny, tmp_path):
    folder = train(tiny(steps=1), tmp_path / "run", quiet=True).out / "model"

    def stop(row):
        raise InterruptedError

    again = tiny(steps=1, init_from=str(folder))
    with pytest.raises(UserError, match="another folder"):
        train(again, tmp_path / "run", resume=False, quiet=True, on_step=stop)
    load_model(folder)


def test_a_start_that_cannot_be_built_is_refused_in_one_line(tiny, start):
    path = start / "config.json"
    content = json.loads(path.read_text())
    content["config"]["mixers"][0]["head_dim"] = 7
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"config\.json: this model cannot be built") as error:
        start_from(tiny(), start)
    assert "\n" not in str(error.value)


def test_a_run_of_before_goes_on(tiny, tmp_path):
    """Its config.json knows no init_from."""
    train(tiny(steps=2), tmp_path, quiet=True)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["init_from"]
    path.write_text(json.dumps(content))
    assert train(tiny(steps=3), tmp_path, quiet=True).steps == 3
