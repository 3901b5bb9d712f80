"""Each script of experiments/, rehearsed on a CPU: it fills the files that claims read."""

import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from mezzo_core.reproduction import gpus
from mezzo_core.reproduction.result_file import read_file
from mezzo_drt.recipes import PAPER_NAMES
from mezzo_recurrent_transformer.recipes import with_layers

ROOT = Path(__file__).parents[1] / "packages"
ONE = ("--seeds", "0")
DRT = PAPER_NAMES["drt1"]

WORDS = {
    "core/attention": (),
    "core/context": ("--models", "GSA, 1 GPU", "RAT(L=16), 2 GPUs"),
    "core/kernels": ("--models", "chunk_gsa, 8 x 2,048", f"{DRT}, 4 x 16,384"),
    "core/train_200m": (*ONE, "--models", "GSA", "--data", "embedded"),
    "drt/needles": (*ONE, "--models", DRT, "Landmark Attn."),
    "drt/train_documents": (*ONE, "--models", DRT, f"{DRT}, projected"),
    "gsa/ablation": (*ONE, "1", "--models", "HGRN2"),
    "gsa/accelerate_fla": (),
    "gsa/decoding": ("--models", "assistant, 15 tokens", "continuous batching"),
    "gsa/t2r": (*ONE, "--models", "Transformer", "GSA", "GSA from nothing"),
    "rat/train_gpus": ("--models", "RAT(L=16), 200m, 1 GPU"),
    "rat/train_six": (*ONE, "1", "--models", "RNN", "Attention, ALiBi"),
    "rat/train_small": (*ONE, "--models", "RNN", "Attention-SWA", "RAT(L=16)-SWA NoPE"),
    "recurrent_transformer/train_gpus": (
        "--models",
        f"{with_layers('Recurrent Transformer', 6)}, 1 GPU",
    ),
    "recurrent_transformer/train_small": (
        *ONE,
        "--models",
        with_layers("Transformer", 12),
        "with RMSNorm",
    ),
}
"""What is said besides: a few models show what all do."""
ON_A_GPU_ALONE = {"gsa/accelerate_fla"}
"""Scripts that measure nothing on a CPU."""


def run_script(path, *words):
    """Run a script on a command line in this process, and return its exit code."""
    with patch.object(sys, "argv", [str(path), *words]), pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    return end.value.code


def test_every_script_is_rehearsed():
    scripts = {f"{p.parts[-3]}/{p.stem}" for p in ROOT.glob("*/experiments/*.py")}
    assert scripts == set(WORDS)


@pytest.mark.usefixtures("timed_once")
@pytest.mark.parametrize("name", WORDS)
def test_a_rehearsal_fills_the_files_that_are_committed(name, tmp_path, monkeypatch, capsys):
    package, script = name.split("/")
    path = ROOT / package / "experiments" / f"{script}.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpus, "run_processes", lambda _, work, *given: {0: work(*given)})
    command = ["--dry-run", "--out", "results/cpu", *WORDS[name]]
    if "trains=True" in path.read_text(encoding="utf-8") and "--data" not in command:
        Path("words.txt").write_text("half of the notes stand between a rest and a song " * 400)
        command += ["--data", "words.txt"]
    assert run_script(path, *command) == 0
    measured = {each.stem: read_file(each) for each in Path("results/cpu").glob("*.json")}
    assert bool(measured) == (name not in ON_A_GPU_ALONE)
    for stem, (header, _, entries) in measured.items():
        assert header.how == "scaled down"
        assert entries
        if header.kind == "speed":
            assert {entry.seed for entry in entries} == {0, 1, 2}
        for committed in (ROOT / package / "results").glob(f"*/{stem}.json"):
            theirs = read_file(committed)[0]
            ours, known = set(header.models), set(theirs.models)
            assert ours <= known or known <= ours or header.kind == "timings"
            if header.kind == "training":
                assert set(theirs.columns) <= set(header.columns)
    capsys.readouterr()
    assert run_script(path, *command) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "failed" not in line]
    assert not [line for line in told if "trained on" not in line], "nothing is measured again"
