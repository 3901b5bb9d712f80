import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.checkpoint import load_model, save_model
from safetensors import safe_open


@pytest.fixture
def allow(mixer_config):
    """The package of this folder's own mixer, which no one else may name."""
    return (type(mixer_config).__module__.partition(".")[0],)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "model"


@pytest.fixture
def saved(model, config, folder):
    save_model(model, config, folder)
    return folder


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_same_weights(loaded, model):
    expected = model.state_dict()
    assert list(loaded.state_dict()) == list(expected)
    for name, weight in loaded.state_dict().items():
        assert weight.dtype == expected[name].dtype, name
        assert torch.equal(weight, expected[name]), name


# --- there and back ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tie", [True, False])
def test_a_loaded_model_is_bit_equal(config, folder, allow, tie, dtype):
    config = replace(config, tie_embeddings=tie)
    model = config.build().to(dtype)
    save_model(model, config, folder, {"step": 3, "tokenizer": "byte"})
    loaded, loaded_config, extra = load_model(folder, allow_packages=allow)
    assert_same_weights(loaded, model)
    assert loaded_config == config
    assert extra == {"step": 3, "tokenizer": "byte"}
    assert not loaded.training
    assert all(weight.requires_grad for weight in loaded.parameters())
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_a_model_of_mezzo_mixers_loads_without_leave(config, folder):
    window = AttentionConfig(head_dim=8, window_size=4)
    config = replace(config, mixers=(AttentionConfig(head_dim=8), window))
    model = config.build()
    save_model(model, config, folder)
    loaded, loaded_config, extra = load_model(folder)
    assert_same_weights(loaded, model)
    assert (loaded_config, extra) == (config, {})


def test_a_tied_weight_is_stored_once_and_shared_again(saved, allow, model):
    with safe_open(saved / "model.safetensors", framework="pt") as file:
        stored = set(file.keys())
    assert "embed.weight" in stored
    assert "head.weight" not in stored
    loaded, _, _ = load_model(saved, allow_packages=allow)
    assert loaded.head.weight is loaded.embed.weight
    with torch.no_grad():
        loaded.embed.weight[0, 0] = 5.0
    assert loaded.head.weight[0, 0] == 5.0
    assert loaded.num_parameters() == model.num_parameters()


def test_a_loaded_model_trains(saved, allow):
    loaded, _, _ = load_model(saved, allow_packages=allow)
    tokens = torch.arange(12).view(2, 6)
    loaded.loss(tokens, tokens).backward()
    assert all(weight.grad is not None for weight in loaded.parameters())


def test_the_weights_of_a_sharded_model_are_given_apart(model, config, folder, allow):
    weights = {name: torch.full_like(w, 0.5) for name, w in model.state_dict().items()}
    save_model(model, config, folder, weights=weights)
    loaded, _, _ = load_model(folder, allow_packages=allow)
    assert all((weight == 0.5).all() for weight in loaded.parameters())


def test_loading_draws_no_random_number(saved, allow):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    load_model(saved, allow_packages=allow)
    assert torch.equal(torch.get_rng_state(), before)


# --- nothing is lost --------------------------------------------------------------------------


def test_only_the_two_files_are_written(saved):
    assert names_in(saved) == ["config.json", "model.safetensors"]
    assert names_in(saved.parent) == ["model"]


def test_saving_again_replaces_the_model(saved, model, config, allow):
    with torch.no_grad():
        model.embed.weight.zero_()
    save_model(model, config, saved, {"step": 2})
    loaded, _, extra = load_model(saved, allow_packages=allow)
    assert_same_weights(loaded, model)
    assert extra == {"step": 2}
    assert names_in(saved.parent) == ["model"]


def test_a_save_that_fails_leaves_the_old_model_and_no_litter(
    saved, model, config, allow, monkeypatch
):
    def fill_the_disk(weights, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    expected, _, _ = load_model(saved, allow_packages=allow)
    monkeypatch.setattr(safetensors.torch, "save_file", fill_the_disk)
    with torch.no_grad():
        model.embed.weight.zero_()
    with pytest.raises(UserError, match="No space left"):
        save_model(model, config, saved)
    loaded, _, _ = load_model(saved, allow_packages=allow)
    assert_same_weights(loaded, expected)
    assert names_in(saved.parent) == ["model"]


def test_a_kill_at_any_rename_leaves_a_whole_model(saved, model, config, allow, monkeypatch):
    class KilledError(BaseException):
        pass

    path_type = type(saved)
    rename = path_type.rename
    for survived in (0, 1):
        renames = []

        def dying_rename(self, target, survived=survived, renames=renames):
            if len(renames) == survived:
                raise KilledError
            renames.append(target)
            return rename(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(path_type, "rename", dying_rename)
            with pytest.raises(KilledError):
                save_model(model, config, saved, {"step": 9})
        loaded, _, extra = load_model(saved, allow_packages=allow)
        assert_same_weights(loaded, model)
        assert extra == {}
    # The next save puts everything right.
    save_model(model, config, saved, {"step": 10})
    assert load_model(saved, allow_packages=allow)[2] == {"step": 10}
    assert names_in(saved.parent) == ["model"]


def test_a_folder_of_other_things_is_never_replaced(tmp_path, model, config):
    (tmp_path / "thesis.tex").write_text("ten years")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        save_model(model, config, tmp_path)
    with pytest.raises(UserError, match="is a file"):
        save_model(model, config, tmp_path / "thesis.tex")
    with pytest.raises(UserError, match="cannot save"):
        save_model(model, config, tmp_path / "thesis.tex" / "model")
    assert (tmp_path / "thesis.tex").read_text() == "ten years"
    assert names_in(tmp_path) == ["thesis.tex"]


def test_a_model_of_another_program_is_never_replaced(tmp_path, model, config, allow):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_text("long trained")
    with pytest.raises(UserError, match="it holds a model of another kind"):
        save_model(model, config, tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "long trained"
    (tmp_path / "config.json").write_text("half of ours {")
    save_model(model, config, tmp_path)
    load_model(tmp_path, allow_packages=allow)


# --- what cannot be loaded says why -----------------------------------------------------------


def change_config(folder, change):
    path = folder / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def change_weights(folder, change):
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    change(weights)
    safetensors.torch.save_file(weights, path)


def assert_refused(folder, allow, *words):
    with pytest.raises(UserError) as caught:
        load_model(folder, allow_packages=allow)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_missing_file_is_named(saved, allow):
    assert_refused(saved.parent / "other", allow, "other", "config.json is missing")
    (saved / "model.safetensors").unlink()
    assert_refused(saved, allow, "model.safetensors is missing")
    (saved / "config.json").unlink()
    assert_refused(saved, allow, "config.json is missing")


def test_a_damaged_file_is_named(saved, allow):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_refused(saved, allow, "model.safetensors", "cannot be read")
    (saved / "config.json").write_text('{"config": ')
    assert_refused(saved, allow, "config.json", "JSON")
    (saved / "config.json").write_text("[]")
    assert_refused(saved, allow, "config.json", 'no "config"')


def test_a_pickle_under_the_name_of_the_weights_is_refused(saved, allow, model):
    torch.save(model.state_dict(), saved / "model.safetensors")
    assert_refused(saved, allow, "model.safetensors", "cannot be read")


def test_a_mixer_of_another_package_needs_leave(saved, allow):
    assert_refused(saved, (), "RunningMeanConfig", "not from an allowed package")


def test_a_configuration_that_is_no_language_model_is_refused(saved, allow):
    def change(data):
        data["config"] = data["config"]["mlp"]

    change_config(saved, change)
    assert_refused(saved, allow, "LMConfig", "MLPConfig")


def test_a_misspelt_field_is_named_with_the_nearest(saved, allow):
    change_config(saved, lambda data: data["config"].update(tie_embedding=True))
    assert_refused(saved, allow, "tie_embedding", "did you mean tie_embeddings")


def test_a_configuration_that_cannot_be_built_is_refused(config, folder, allow):
    config = replace(config, mixers=(AttentionConfig(head_dim=8),))
    save_model(config.build(), config, folder)
    change_config(folder, lambda data: data["config"]["mixers"][0].update(head_dim=7))
    assert_refused(folder, (), "config.json", "head_dim")


def test_a_weight_of_another_shape_is_named(saved, allow):
    change_config(saved, lambda data: data["config"].update(vocab_size=40))
    assert_refused(saved, allow, "embed.weight", "(37, 16)", "(40, 16)")


def test_missing_and_unexpected_weights_are_named(saved, allow):
    def rename(weights):
        weights["final_norm.weight"] = weights.pop("norm.weight")

    change_weights(saved, rename)
    assert_refused(saved, allow, "missing", " norm.weight", "unexpected", "final_norm.weight")


# --- on a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_model_loads_onto_a_gpu(saved, allow, model):
    loaded, _, _ = load_model(saved, device="cuda", allow_packages=allow)
    assert all(weight.is_cuda for weight in loaded.parameters())
    assert loaded.head.weight is loaded.embed.weight
    assert_same_weights(loaded.cpu(), model)
