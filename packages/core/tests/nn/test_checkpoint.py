import json
import os
import shutil
import stat
import sys
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from mezzo_core.errors import UserError
from mezzo_core.nn import checkpoint
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.checkpoint import copy_weights, find_model, load_model, save_model
from mezzo_core.nn.state_file import save_state
from safetensors import safe_open


@pytest.fixture
def allow(mixer_config):
    """The package of the toy mixer, which a file may not name without leave."""
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
        assert find_model(saved.parent) == find_model(saved) == saved  # commands find it too
    # The next save puts everything right.
    save_model(model, config, saved, {"step": 10})
    assert load_model(saved, allow_packages=allow)[2] == {"step": 10}
    assert names_in(saved.parent) == ["model"]


def test_what_killed_saves_have_left_goes_with_the_next_and_nothing_else_does(
    saved, model, config, tmp_path
):
    beside, precious = saved.parent, tmp_path / "precious"
    for name in (".model." + "0" * 16, ".model." + "a" * 16, ".model." + "b" * 16, ".model.mine"):
        (beside / name).mkdir()
        (beside / name / "model.safetensors").write_text("half")
        (beside / name / ".tmpAb12Cd").write_text("half")
    (beside / (".model." + "b" * 16) / "notes.txt").write_text("mine")
    precious.mkdir()
    (precious / "config.json").write_text("{}")
    (beside / (".model." + "c" * 16)).symlink_to(precious)
    (beside / (".model." + "d" * 16)).write_text("a file")
    save_model(model, config, saved)
    kept = [".model." + letter * 16 for letter in "bcd"]
    assert names_in(beside) == sorted([*kept, ".model.mine", "model"])
    assert names_in(beside / kept[0]) == ["notes.txt"]
    assert names_in(beside / ".model.mine") == [".tmpAb12Cd", "model.safetensors"]
    assert names_in(precious) == ["config.json"]


def test_a_link_in_the_old_models_waiting_place_is_not_followed(saved, model, config, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/config.json").write_text("{}")
    (saved.parent / ".model.previous").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot save the model"):
        save_model(model, config, saved)
    assert names_in(tmp_path / "precious") == ["config.json"]
    assert names_in(saved) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_get_the_users_mode(model, config, folder, umask, mode):
    before = os.umask(umask)
    try:
        save_model(model, config, folder)
        save_state(model, model.init_state(1), folder / "state")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {mode}


def test_saving_without_the_library_says_what_brings_it(model, config, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UserError, match=r"'safetensors': pip install 'mezzo-core\[train\]'"):
        save_model(model, config, folder)
    assert not folder.parent.exists()


@pytest.mark.parametrize("moment", ["check_weights", "_checksum"])
def test_a_model_that_is_saved_anew_while_it_is_loaded_is_loaded_anew(
    saved, model, config, allow, monkeypatch, moment
):
    """A training may save at any moment: that gives no error, nor new weights with an old step."""
    newer, todo = config.build(), [1]
    original = getattr(checkpoint, moment)

    def save_between(*arguments):
        found = original(*arguments)
        if todo:
            todo.clear()
            save_model(newer, config, saved, {"step": 2})
        return found

    monkeypatch.setattr(checkpoint, moment, save_between)
    loaded, _, extra = load_model(saved, allow_packages=allow)
    assert_same_weights(loaded, newer)
    assert extra == {"step": 2}


@pytest.mark.parametrize("tie", [True, False])
def test_a_model_that_would_not_load_is_refused_and_the_old_one_stays(saved, model, config, tie):
    """The configuration and the model disagree on the vocabulary, the depth or the tied head."""
    other = replace(config, tie_embeddings=tie, mixers=config.mixers[:1])
    before = {name: (saved / name).read_bytes() for name in names_in(saved)}
    for wrong in (other.build(), replace(config, vocab_size=config.vocab_size + 1).build()):
        with pytest.raises(UserError, match=r"cannot save the model in .*weight"):
            save_model(wrong, config, saved)
    with pytest.raises(UserError, match=r"missing weights head\.weight"):
        save_model(model, replace(config, tie_embeddings=False), saved)
    assert {name: (saved / name).read_bytes() for name in names_in(saved)} == before


def test_what_torch_compile_returns_is_saved_as_the_model(model, config, folder, allow):
    save_model(torch.compile(model), config, folder)
    assert_same_weights(load_model(folder, allow_packages=allow)[0], model)


def test_what_json_has_not_is_refused_before_anything_is_written(model, config, folder):
    for extra in ({"loss": float("nan")}, {"loss": float("inf")}, {"path": folder}):
        with pytest.raises((TypeError, ValueError)):
            save_model(model, config, folder, extra)
    assert not folder.parent.exists()


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
    (saved / "config.json").write_text('{"model_type": "mezzo"}')
    assert_refused(saved, allow, "make it a run first, by import")
    (saved / "config.json").unlink()
    assert_refused(saved, allow, "config.json is missing")


def test_a_damaged_file_is_named(saved, allow):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_refused(saved, allow, "model.safetensors", "cannot be read")
    (saved / "config.json").write_text('{"config": ')
    assert_refused(saved, allow, "config.json", "JSON")
    (saved / "config.json").write_text("[]")
    assert_refused(saved, allow, "config.json", "JSON object")
    (saved / "config.json").write_text("{}")
    assert_refused(saved, allow, "config.json", 'no "config"')
    shutil.copytree(saved, saved / "model")
    assert_refused(saved, allow, f"give {saved / 'model'}")


def test_a_flipped_bit_in_the_weights_is_named(saved, allow, model):
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    for place in (-1, -len(whole) // 3, 60):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert_refused(saved, allow, str(path))
        with pytest.raises(UserError, match=r"model\.safetensors"):
            copy_weights(saved, model)
    path.write_bytes(whole)
    load_model(saved, allow_packages=allow)


def test_a_model_of_before_checksums_loads(saved, allow, model):
    change_config(saved, lambda data: data.pop("weights_crc32"))
    assert_same_weights(load_model(saved, allow_packages=allow)[0], model)
    copy_weights(saved, model)


def test_a_pipe_or_a_folder_is_no_file_of_a_model(saved, allow):
    for name in ("model.safetensors", "config.json"):
        (saved / name).unlink()
        os.mkfifo(saved / name)
        assert_refused(saved, allow, name)
        with pytest.raises(UserError, match="holds no trained model"):
            find_model(saved)
        (saved / name).unlink()
        (saved / name).mkdir()
        assert_refused(saved, allow, name)


@pytest.mark.parametrize("device", ["cuda:99", "mps", "nosuch"])
def test_a_device_that_is_not_there_is_named(config, folder, device):
    config = replace(config, mixers=(AttentionConfig(head_dim=8),))
    save_model(config.build(), config, folder)
    with pytest.raises(UserError, match=f"device '{device}' cannot be used here") as caught:
        load_model(folder, device=device)
    assert "\n" not in str(caught.value)


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


MLP = "mezzo_core.nn.mlp:MLPConfig"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_model": "16"}, ("config.json", "config.d_model", "int", "'16'")),
        ({"d_model": True}, ("config.d_model", "int", "True")),
        ({"d_model": 1.5}, ("config.d_model", "int", "1.5")),
        ({"d_model": 10**12}, ("d_model", "2^31")),
        ({"norm_eps": 10**400}, ("config.norm_eps",)),
        ({"norm_eps": [1]}, ("config.norm_eps",)),
        ({"vocab_size": 2**31 - 1}, ("embed.weight", "(37, 16)", "(2147483647, 16)")),
        ({"mlp": {"type": MLP, "hidden": 10**12}}, ("mlp", "(1000000000000, 16)")),
        ({"mlp": {"type": MLP, "hidden": 10**30}}, ("config.json", "hidden must be below 2^63")),
        ({"mlp": {"type": MLP, "kind": ["gelu"]}}, ("config.mlp.kind", "gelu")),
        ({"mlp": 3}, ("config.mlp", "MLPConfig")),
        ({"mixers": []}, ("mixers",)),
        ({"mixers": {}}, ("config.mixers", "type")),
        ({"mixers": [3]}, ("config.mixers[0]", "MixerConfig")),
        ({"mixers": [{"type": MLP}]}, ("MLPConfig builds no mixer",)),
        ({"mixers": [{"type": "mezzo_core.train.config:OptimConfig"}]}, ("config.mixers[0]",)),
        ({"mixers": [{"type": "mezzo_core.data.config:DataConfig"}]}, ("cannot be built",)),
        ({"type": "mezzo_core.cli:Paper"}, ("Paper",)),
        ({"type": "mezzo_core.cli:TrainConfig"}, ("no frozen dataclass",)),
        ({"type": "mezzo_core.nn\ud800:LMConfig"}, ("module:ClassName",)),
        ({"type": "mezzo_core\0:LMConfig"}, ("module:ClassName",)),
    ],
)
def test_a_configuration_with_wrong_values_is_refused_in_one_line(saved, allow, changes, words):
    change_config(saved, lambda data: data["config"].update(changes))
    assert_refused(saved, allow, *words)


@pytest.mark.parametrize(
    ("name", "value"), [("extra", [1]), ("extra", "byte"), ("weights_crc32", "0"), ("config", [])]
)
def test_a_description_with_wrong_types_is_refused(saved, allow, name, value):
    change_config(saved, lambda data: data.update({name: value}))
    assert_refused(saved, allow, "config.json", name)


def test_a_deeply_nested_configuration_is_refused(saved, allow):
    text = '{"type": "mezzo_core.nn.lm:LMConfig", "mixers": ['
    for depth in (10, 200, 300, 400, 100_000):
        (saved / "config.json").write_text('{"config": ' + text * depth + "]}" * depth + "}")
        assert_refused(saved, allow, "config.json")


def test_weights_of_whole_numbers_are_refused(saved, allow):
    change_weights(saved, lambda weights: weights.update({"norm.weight": torch.ones(16).long()}))
    assert_refused(saved, allow, "model.safetensors", "norm.weight", "F32", "I64")


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
