"""`mezzo-gsa export --layout fla` and `import`: no library is needed for that."""

import json

import pytest
import torch
from mezzo_core.config_json import to_json
from mezzo_core.data import DataConfig
from mezzo_core.data.tokenizer_files import load_tokenizer
from mezzo_core.nn import LMConfig, generate
from mezzo_core.nn.checkpoint import load_model, save_model
from mezzo_core.nn.mlp import MLPConfig
from mezzo_gsa import GSAConfig
from mezzo_gsa.__main__ import main
from safetensors.torch import load_file
from transformers import AutoTokenizer

CONFIG = LMConfig(257, 32, (GSAConfig(2, num_slots=8),) * 2, MLPConfig("swiglu", 24))


def call(capsys, *arguments) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out + told.err


@pytest.fixture
def run(tmp_path):
    torch.manual_seed(0)
    told = {"tokenizer": "byte", "tokenizer_identity": load_tokenizer("byte").identity}
    data = to_json(DataConfig(tokenizer="byte"))
    save_model(CONFIG.build(), CONFIG, tmp_path / "run/model", {**told, "data": data})
    return tmp_path / "run"


def test_a_run_goes_to_the_library_s_folder_and_back(run, tmp_path, capsys):
    code, told = call(capsys, "export", run, tmp_path / "out", "--layout", "fla")
    assert code == 0, told
    values = json.loads((tmp_path / "out/config.json").read_text())
    assert (values["model_type"], values["num_slots"], values["eos_token_id"]) == ("gsa", 8, 256)
    names = load_file(tmp_path / "out/model.safetensors").keys()
    assert "model.layers.1.attn.f_proj.weight" in names
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab").input_ids == [97, 98]
    code, told = call(capsys, "import", tmp_path / "out", tmp_path / "back")
    assert code == 0, told
    (lm, config, _), (again, same, _) = (load_model(x / "model") for x in (run, tmp_path / "back"))
    assert same == config
    prompt = [list(b"It is")]
    assert generate(again, prompt, max_new_tokens=9) == generate(lm, prompt, max_new_tokens=9)


def test_a_layout_that_is_not_there_is_one_line(run, tmp_path, capsys):
    code, told = call(capsys, "export", run, tmp_path / "out", "--layout", "flax")
    assert (code, told) == (2, "error: --layout takes fla, got 'flax'\n")
    assert not (tmp_path / "out").exists()
