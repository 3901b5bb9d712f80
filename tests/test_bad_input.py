"""Bad input gets one clear line, exit code 2 and no traceback, and nothing is lost."""

import json
import os

import pytest
import torch
from mezzo_core.nn import AttentionConfig
from mezzo_core.ops.attention import attention
from mezzo_core.ops.linear_scan import linear_scan
from mezzo_core.ops.online_softmax import SoftmaxPart, merge_softmax
from mezzo_gsa.__main__ import main as gsa_main
from mezzo_gsa.abc import ABCConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.hgrn2 import HGRN2Config
from mezzo_gsa.ops.gla import chunk_gla
from mezzo_gsa.ops.gsa import chunk_gsa
from mezzo_rat import RATConfig
from mezzo_rat.__main__ import main
from mezzo_rat.ops.rat_attention import chunk_rat_attention


def command(capsys, *arguments: str, main=main) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code, capsys.readouterr().err


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


def test_an_empty_prompt_is_refused(capsys, run):
    assert "prompt" in rejected(capsys, "generate", run, "--prompt", "")


@pytest.mark.parametrize(
    ("option", "value"), [("--steps", 0), ("--batch-size", -1), ("--seq-len", 0)]
)
def test_a_bad_training_value_names_what_is_allowed(capsys, tmp_path, option, value):
    line = rejected(capsys, "train", "tiny_rnn", option, value, "--out", tmp_path / "out")
    assert option[2:].replace("-", "_") in line.replace("-", "_")


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


Q = torch.randn(1, 6, 2, 4)
V = torch.randn(1, 6, 4, 4)
GATE = torch.rand(1, 6, 4, 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(lambda: linear_scan(Q, Q[0]), "x", id="scan-rank"),
        pytest.param(lambda: linear_scan(Q, Q, chunk_size=0), "chunk_size", id="scan-chunk-0"),
        pytest.param(lambda: linear_scan(Q, Q.long()), "x", id="scan-dtype"),
        pytest.param(
            lambda: linear_scan(Q, Q, cu_seqlens=torch.tensor([0, 4, 3, 6])),
            "cu_seqlens",
            id="scan-borders-decrease",
        ),
        pytest.param(
            lambda: linear_scan(Q, Q, cu_seqlens=torch.tensor([0, 5])),
            "cu_seqlens",
            id="scan-borders-end",
        ),
        pytest.param(lambda: linear_scan(Q, Q.to("meta")), "meta", id="scan-device"),
        pytest.param(lambda: linear_scan(Q, Q, impl="cuda"), "impl", id="scan-impl"),
        pytest.param(lambda: attention(Q, V[..., :2], V), "k", id="attention-width"),
        pytest.param(lambda: attention(V[:, :, :3], Q, Q), "heads", id="attention-groups"),
        pytest.param(lambda: attention(Q, Q, Q, window_size=0), "window_size", id="window-0"),
        pytest.param(
            lambda: merge_softmax(SoftmaxPart(Q, Q[..., 0]), SoftmaxPart(V, V[..., 0])),
            "shape",
            id="merge-shapes",
        ),
        pytest.param(
            lambda: chunk_rat_attention(Q, Q, V, GATE, chunk_size=0), "chunk_size", id="rat-chunk-0"
        ),
        pytest.param(
            lambda: chunk_rat_attention(Q, Q[:, :4], V, GATE, chunk_size=2), "k", id="rat-q-and-k"
        ),
        pytest.param(
            lambda: chunk_rat_attention(Q, Q, V, GATE[..., :2], chunk_size=2), "g", id="rat-gate"
        ),
        pytest.param(
            lambda: chunk_rat_attention(Q, Q, V, GATE, chunk_size=2, impl="triton"),
            "triton",
            id="rat-no-kernel",
        ),
        pytest.param(lambda: RATConfig(head_dim=7).build(16), "head_dim", id="rat-head-width"),
        pytest.param(lambda: chunk_gsa(Q, Q, Q), "g or s", id="gsa-no-gate"),
        pytest.param(lambda: chunk_gsa(Q, Q, Q, GATE), "g", id="gsa-gate-heads"),
        pytest.param(
            lambda: chunk_gsa(Q, Q, Q, GATE[:, :, :2], between="max"), "between", id="gsa-between"
        ),
        pytest.param(lambda: chunk_gla(Q, Q[:, :4], Q, Q), "k", id="gla-q-and-k"),
        pytest.param(lambda: GSAConfig(num_heads=3).build(16), "num_heads", id="gsa-heads"),
        pytest.param(lambda: GSAConfig(num_slots=0).build(16), "num_slots", id="gsa-slots"),
        pytest.param(lambda: ABCConfig(reading="book").build(16), "reading", id="abc-reading"),
        pytest.param(lambda: HGRN2Config(8, 1.0).build(16), "lower_bound", id="hgrn2-bound"),
        pytest.param(
            lambda: GSAConfig(num_heads=2).build(16)(torch.randn(1, 4, 8)), "x must", id="gsa-input"
        ),
        pytest.param(
            lambda: AttentionConfig(head_dim=16, num_kv_heads=3).build(64),
            "num_kv_heads",
            id="attention-kv-heads",
        ),
        pytest.param(
            lambda: RATConfig(head_dim=8).build(16)(torch.randn(1, 4, 8)), "x must", id="rat-input"
        ),
    ],
)
def test_an_op_or_mixer_names_the_argument(call, words):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    assert words in str(error.value)
    assert "\n" not in str(error.value)
