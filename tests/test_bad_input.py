"""Bad input gets one clear line, exit code 2 and no traceback, and nothing is lost."""

import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from mezzo_core.config_json import MARKER
from mezzo_gsa.__main__ import main as gsa_main
from mezzo_rat.__main__ import main
from safetensors.torch import load_file, save_file


def command(capsys, *arguments: str, main=main) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert not (stop.value.code and out), "a refused command prints no result"
    return stop.value.code, err


def rejected(capsys, *arguments: str, main=main) -> str:
    """Run a command that must fail; return its one line."""
    code, err = command(capsys, *arguments, main=main)
    assert code == 2, err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err
    return err


TINY = ("train", "tiny_rat_l16", "--quiet", "--steps", 2, "--batch-size", 2, "--seq-len", 64)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "tiny"
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in (*TINY, "--out", out)])
    assert stop.value.code == 0
    return out


def test_a_missing_corpus_is_named(capsys, tmp_path):
    line = rejected(capsys, *TINY, "--data", tmp_path / "no.txt", "--out", tmp_path / "out")
    assert "no.txt" in line


def test_an_empty_file_is_named(capsys, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    line = rejected(capsys, *TINY, "--data", tmp_path / "empty.txt", "--out", tmp_path / "out")
    assert "empty.txt" in line


def test_a_line_that_is_not_json_is_named_with_its_number(capsys, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": bad}\n')
    line = rejected(capsys, *TINY, "--data", tmp_path / "a.jsonl", "--out", tmp_path / "out")
    assert "a.jsonl" in line
    assert "2" in line


def test_a_record_without_text_is_named_with_its_number(capsys, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"body": "x"}\n')
    line = rejected(capsys, *TINY, "--data", tmp_path / "a.jsonl", "--out", tmp_path / "out")
    assert "a.jsonl" in line
    assert "text" in line


def test_a_corpus_shorter_than_the_context_says_both_lengths(capsys, tmp_path):
    (tmp_path / "short.txt").write_text("Too short.")
    line = rejected(capsys, *TINY, "--data", tmp_path / "short.txt", "--out", tmp_path / "out")
    assert "10 tokens" in line
    assert "65" in line  # a window and the token that follows it


def test_a_tokenizer_larger_than_the_vocabulary_says_both_sizes(capsys, tmp_path):
    out = ("--vocab-size", 200, "--out", tmp_path / "out")
    line = rejected(capsys, *TINY, *out)
    assert "257" in line
    assert "200" in line


def test_a_misspelt_recipe_shows_the_nearest_names(capsys, tmp_path):
    line = rejected(capsys, "train", "tiny_rat_l61", "--out", tmp_path / "out")
    assert "tiny_rat_l16" in line


def test_a_misspelt_table_shows_the_nearest_names(capsys, tmp_path):
    line = rejected(capsys, "reproduce", "rat.table99", "--out", tmp_path)
    assert "rat.table9" in line


def test_an_unknown_scale_shows_the_scales(capsys, tmp_path):
    assert "smoke" in rejected(capsys, "reproduce", "--scale", "huge", "--out", tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="no /dev/null folder")
def test_an_unwritable_output_folder_is_named(capsys):
    line = rejected(capsys, *TINY, "--out", "/dev/null/run")
    assert "/dev/null/run" in line


def test_a_checkpoint_of_another_shape_is_refused_and_kept(capsys, run):
    before = sorted(path for path in run.rglob("*") if path.is_file())
    arguments = [value if value != "tiny_rat_l16" else "tiny_attention" for value in TINY]
    line = rejected(capsys, *arguments, "--out", run)
    assert str(run) in line
    assert sorted(path for path in run.rglob("*") if path.is_file()) == before


def test_weights_of_another_shape_are_named(capsys, run, tmp_path):
    config = json.loads((run / "model/config.json").read_text())
    text = json.dumps(config).replace('"vocab_size": 257', '"vocab_size": 300')
    (tmp_path / "config.json").write_text(text)
    weights = (run / "model/model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    line = rejected(capsys, "generate", tmp_path, "--prompt", "It")
    assert "257" in line
    assert "300" in line


def test_a_folder_without_a_model_is_named(capsys, tmp_path):
    assert str(tmp_path) in rejected(capsys, "generate", tmp_path, "--prompt", "It")


def test_weights_that_are_no_safetensors_are_refused(capsys, run, tmp_path):
    (tmp_path / "config.json").write_bytes((run / "model/config.json").read_bytes())
    torch.save({}, tmp_path / "model.safetensors")
    assert "model.safetensors" in rejected(capsys, "generate", tmp_path, "--prompt", "It")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--temperature", "-1"), ("--top-k", "0"), ("--top-p", "1.5"), ("--max-new-tokens", "-3")],
)
def test_a_bad_sampling_value_names_the_option(capsys, run, option, value):
    line = rejected(capsys, "generate", run, "--prompt", "It", option, value)
    assert option[2:].replace("-", "_") in line.replace("-", "_")


BAD_OPTIONS = [
    ("generate", "--temperature", "nan"),
    ("generate", "--temperature", "hot"),
    ("generate", "--max-new-tokens", "0"),
    ("generate", "--max-new-tokens", "10000000000000"),
    ("generate", "--top-p", "nan"),
    ("generate", "--seed", str(2**64)),
    ("generate", "--seed", "-1"),
    ("generate", "--device", "mps"),
    ("generate", "--device", "cuda:99"),
    ("generate", "--device", "cpu:1"),
    ("generate", "--device", "mkldnn"),
    ("generate", "--nosuch", "1"),
    ("eval", "--batch-size", "0"),
    ("eval", "--batch-size", "1e3"),
    ("eval", "--device", "cuda:99"),
    ("bench", "--device", "meta"),
    ("bench", "--out", "FILE/results"),
    ("reproduce", "--out", "FILE"),
    ("reproduce", "--out", "~no such user/x"),
    ("reproduce", "--out", ""),
    ("bench", "--out", "~no such user/x"),
    ("reproduce", "--out", "FILE/report"),
    ("convert", "--seed", str(2**64)),
    ("convert", "--out", "FILE/model"),
]


@pytest.mark.parametrize(("name", "option", "value"), BAD_OPTIONS)
def test_a_bad_value_of_an_option_is_one_line(capsys, run, name, option, value):
    arguments = {
        "generate": [run, "--prompt", "It"],
        "eval": [run],
        "bench": ["--quick"],
        "reproduce": ["--scale", "smoke"],
        "convert": [run, "--to", "gsa", "--out", run / "new"],
    }[name]
    value = value.replace("FILE", str(run / "config.json"))
    before = sorted(run.rglob("*"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # each would be a further line
        line = rejected(capsys, name, *arguments, option, value, main=gsa_main)
    named = value if option == "--out" else option[2:].replace("-", "_")
    assert named in (line if option == "--out" else line.replace("-", "_"))
    assert sorted(run.rglob("*")) == before


def test_an_empty_prompt_is_refused(capsys, run):
    assert "prompt" in rejected(capsys, "generate", run, "--prompt", "")


@pytest.mark.parametrize(
    ("option", "value"), [("--steps", 0), ("--batch-size", -1), ("--seq-len", 0)]
)
def test_a_bad_training_value_names_what_is_allowed(capsys, tmp_path, option, value):
    line = rejected(capsys, "train", "tiny_rnn", option, value, "--out", tmp_path / "out")
    assert option[2:].replace("-", "_") in line.replace("-", "_")


@pytest.fixture
def copied(run, tmp_path):
    """The run's model alone, which a test may damage."""
    shutil.copytree(run / "model", tmp_path / "copied")
    return tmp_path / "copied"


def describe(folder: Path, **changes) -> None:
    """Change the description of a model; None takes a key away."""
    path = folder / "config.json"
    found = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def test_a_model_of_no_numbers_is_told_by_both_commands(capsys, copied, tmp_path):
    (tmp_path / "short.txt").write_text("A few words. " * 300)
    weights = load_file(copied / "model.safetensors")
    name = next(name for name in weights if "mlp" in name)
    weights[name][0, 0] = float("nan")
    save_file(weights, copied / "model.safetensors")
    describe(copied, weights_crc32=None)  # a training that diverged would have saved it so
    line = rejected(capsys, "generate", copied, "--prompt", "It")
    assert "outputs are no numbers" in line
    line = rejected(capsys, "eval", copied, "--data", tmp_path / "short.txt")
    assert "outputs are no numbers" in line


def test_a_flipped_bit_in_the_weights_names_the_file(capsys, copied):
    path = copied / "model.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    for words in (("generate", copied, "--prompt", "It"), ("eval", copied)):
        assert f"{path} is damaged" in rejected(capsys, *words)


@pytest.mark.parametrize(
    "stack",
    [
        {"type": "mezzo_gsa.hgrn2_stack:HGRN2StackConfig", "num_layers": 10**9},
        {"type": "mezzo_drt.stack:DRTConfig", "num_layers": 10**9},
        {"type": "mezzo_drt.stack:DRTConfig", "num_encoder_layers": 10**9},
        {"type": "mezzo_drt.baselines.landmark.stack:LandmarkConfig", "num_layers": 10**9},
        {"type": "mezzo_recurrent_transformer.stack:RecurrentStackConfig", "num_layers": 10**9},
    ],
    ids=lambda stack: f"{stack['type'].partition(':')[2]} {list(stack)[1]}",
)
def test_layers_that_a_file_made_up_are_not_all_built(capsys, copied, stack):
    config = json.loads((copied / "config.json").read_text())["config"]
    described = {key: config[key] for key in ("type", "vocab_size")} | {"d_model": 128}
    describe(copied, config={**described, "stack": stack})
    for words in (
        ("generate", copied, "--prompt", "It"),
        ("train", "tiny_rnn", "--init-from", copied, "--out", copied / "new"),
    ):
        assert "far more layers than its file" in rejected(capsys, *words)


EXTRAS = [
    ("tokenizer", None),
    ("tokenizer", 3),
    ("tokenizer", ["byte"]),
    ("data", None),
    ("data", "embedded"),
    ("data", {"type": "mezzo_core.nn.mlp:MLPConfig"}),
    ("data", {"type": "mezzo_core.data.config:DataConfig", "tokenizer": 3}),
    ("data", {"type": "mezzo_core.data.config:DataConfig", "seed": -1}),
    ("seq_len", None),
    ("seq_len", "64"),
    ("seq_len", True),
    ("seq_len", 0),
    ("seq_len", 10**15),
]


@pytest.mark.parametrize(("name", "value"), EXTRAS)
def test_what_stands_beside_a_model_is_checked(capsys, copied, name, value):
    extra = json.loads((copied / "config.json").read_text())["extra"]
    describe(copied, extra={**extra, name: value})
    words = ("generate", copied, "--prompt", "It") if name == "tokenizer" else ("eval", copied)
    line = rejected(capsys, *words)
    assert name in line
    assert value in (0, 10**15) or "config.json" in line
    if name == "tokenizer" and value is not None:
        assert name in rejected(capsys, "train", "tiny_rat_l16", "--init-from", copied)


def test_a_tokenizer_larger_than_a_saved_model_says_both_sizes(capsys, copied, tmp_path):
    names = {f"t{i}": i for i in range(300)} | {"</s>": 300}
    model = {"type": "WordLevel", "vocab": names, "unk_token": "t0"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    extra = json.loads((copied / "config.json").read_text())["extra"]
    extra["data"]["tokenizer"] = extra["tokenizer"] = str(tmp_path / "tokenizer.json")
    describe(copied, extra=extra)
    for words in (("generate", copied, "--prompt", "It"), ("eval", copied)):
        line = rejected(capsys, *words)
        assert "301" in line
        assert "257" in line


def test_a_prompt_that_is_no_text_is_refused(capsys, run, monkeypatch):
    assert "not UTF-8" in rejected(capsys, "generate", run, "--prompt", os.fsdecode(b"\xff\x1b"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"It \xff"), encoding="utf-8"))
    assert "not UTF-8" in rejected(capsys, "generate", run)
    monkeypatch.setattr("sys.stdin", None)
    assert "prompt is empty" in rejected(capsys, "generate", run)


def test_a_prompt_on_standard_input_has_no_bom(capsys, run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffIt\n"))
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["generate", str(run), "--max-new-tokens", "1"])
    assert capsys.readouterr().out.startswith("It")


def test_a_closed_standard_output_is_no_error(run, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["generate", str(run), "--prompt", "It", "--max-new-tokens", "1"])


def test_memory_that_is_not_there_is_one_line(capsys, run, tmp_path):
    size = str(2**31 - 1)  # 1 TB of weights
    line = rejected(capsys, "train", "tiny_rnn", "--vocab-size", size, "--out", tmp_path / "out")
    assert "memory is full" in line
    assert "memory is full" in rejected(capsys, "eval", run, "--batch-size", 10**15)


def test_what_comes_from_outside_moves_no_cursor(capsys, run, monkeypatch):
    assert "no\\x1b[2Jwhere" in rejected(capsys, "eval", "no\x1b[2Jwhere")
    assert ":smile: [red]" in rejected(capsys, "eval", ":smile: [red]")
    words = ("generate", run, "--prompt", "It\x1b[2J\x9b1m\n", "--max-new-tokens", 1)
    for is_terminal, shown in ((False, "It\x1b[2J\x9b1m\n"), (True, "It\\x1b[2J\\x9b1m\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda answer=is_terminal: answer)
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        assert stop.value.code == 0
        assert capsys.readouterr().out.startswith(shown)


EVIL = "open('ran', 'w').close()\n"
RUN_THEM = """
import sys
from mezzo_rat.__main__ import main
for folder in sys.argv[1:]:
    try:
        main(["generate", folder, "--prompt", "It"])
    except SystemExit as stop:
        print(stop.code)
"""


def test_a_model_cannot_have_the_current_folder_imported(copied, tmp_path):
    here = tmp_path / "here"
    for name in ("mezzo_evil", "mezzo_gsa", "mine"):
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text(EVIL)
        (here / name / MARKER).touch()
        shutil.copytree(copied, here / f"of_{name}")
        config = json.loads((copied / "config.json").read_text())["config"]
        config["mixers"][0]["type"] = f"{name}:GSAConfig"
        describe(here / f"of_{name}", config=config)
    done = subprocess.run(
        [sys.executable, "-c", RUN_THEM, "of_mezzo_evil", "of_mezzo_gsa", "of_mine"],
        cwd=here,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["2", "2", "2"], done.stderr
    first, second, third = done.stderr.splitlines()
    assert "mezzo_evil, and the one in the current folder is not imported" in first
    assert "mezzo_gsa, and the one in the current folder is not imported" in second
    assert "'mine:GSAConfig' is not from an allowed package" in third
    assert not (here / "ran").exists()


def test_a_package_that_the_user_names_is_imported(capsys, copied, tmp_path, monkeypatch):
    (tmp_path / "mezzo_layers.py").write_text(
        "from dataclasses import dataclass\nfrom mezzo_rat import RATConfig\n"
        "@dataclass(frozen=True)\nclass Mine:\n"
        "    def build(self, d_model):\n        return RATConfig(16, 32).build(d_model)\n"
    )
    config = json.loads((copied / "config.json").read_text())["config"]
    config["mixers"] = [{"type": "mezzo_layers:Mine"}] * len(config["mixers"])
    describe(copied, config=config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    words = ("generate", copied, "--prompt", "It", "--max-new-tokens", 1)
    assert "'mezzo_layers:Mine' needs mezzo_layers, and the one in the" in rejected(capsys, *words)
    assert "mezzo_layers" not in sys.modules
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in (*words, "--allow-package", "mezzo_layers")])
    assert stop.value.code == 0
    del sys.modules["mezzo_layers"]


def test_an_unknown_device_is_refused(capsys, run):
    assert "--device" in rejected(capsys, "eval", run, "--device", "tpu0")


GSA_ERRORS = {
    "recipe": (("train", "tiny_gas"), "tiny_gsa"),
    "table": (("reproduce", "gsa.table33"), "gsa.table3"),
    "scale": (("reproduce", "--scale", "huge"), "smoke"),
    "convert-to": (("convert", "FOLDER", "--to", "gas"), "gsa"),
    "convert-source": (("convert", "FOLDER", "--to", "gsa"), "FOLDER"),
    "init-from": (("train", "tiny_gsa", "--init-from", "FOLDER"), "FOLDER"),
    "mqar-model": (("mqar", "--model", "gas"), "gsa"),
    "mqar-pairs": (("mqar", "--seq-len", 64, "--num-pairs", 64), "pairs"),
    "mqar-width": (("mqar", "--model", "gsa", "--width", 0), "width"),
}


@pytest.mark.parametrize("name", GSA_ERRORS)
def test_a_command_of_gsa_answers_a_mistake_in_one_line(capsys, tmp_path, name):
    arguments, word = GSA_ERRORS[name]
    (tmp_path / "empty").mkdir()
    folder = str(tmp_path / "empty")
    given = [folder if argument == "FOLDER" else argument for argument in arguments]
    line = rejected(capsys, *given, "--out", tmp_path / "out", main=gsa_main)
    assert (folder if word == "FOLDER" else word) in line
    assert not (tmp_path / "out").exists()
