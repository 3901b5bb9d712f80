"""Each script of experiments/: rehearsed on a CPU it fills its files; what a full run trains."""

import math
import runpy
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import mezzo_drt.recipes
import mezzo_rat.recipes
import mezzo_recurrent_transformer.recipes
import pytest
import torch
from mezzo_core.reproduction import Options, gpus
from mezzo_core.reproduction.measurement import read_results
from mezzo_core.reproduction.result_file import read_file
from mezzo_drt.recipes import PAPER_NAMES
from mezzo_drt.reproduction.claims import REPRODUCTION as DRTS
from mezzo_gsa.reproduction.claims import REPRODUCTION as GSAS
from mezzo_recurrent_transformer import RecurrentBlockConfig
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
    "gsa/t2r": (*ONE, "--models", "Transformer"),
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


def write_words():
    Path("words.txt").write_text("half of the notes stand between a rest and a song " * 400)
    return "words.txt"


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
        command += ["--data", write_words()]
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


FULL = Options(Path("out"), (), torch.device("cuda"), dry_run=False, data="texts")
"""What a full run is given."""


def script(name):
    package, file = name.split("/")
    return SimpleNamespace(**runpy.run_path(str(ROOT / package / f"experiments/{file}.py")))


def test_the_small_trainings_of_rat_are_as_their_docstring_says():
    small, recipe = script("rat/train_small"), mezzo_rat.recipes.small()
    for T in (1024, 2048, 4096):
        for config in small.configure(small.IN_CONTEXTS, T, FULL).values():
            assert (config.seq_len, config.batch_size * T) == (T, 8192)
            assert (config.steps, config.eval_batches) == (3000, None)
            assert (config.optim, config.data.source) == (recipe.optim, "texts")
            with torch.device("meta"):
                assert 40e6 < config.model.build().num_parameters() < 42e6
    long = small.configure(small.IN_LONG, 4096, FULL, rope_base=500_000.0)
    assert long["Attention"].model.mixers[0].rope_base == 500_000
    nope = small.configure(small.IN_POSITIONS, 1024, FULL)
    assert nope["RAT(L=16)-SWA NoPE"].model.mixers[0].rope is None


def test_the_small_trainings_of_the_recurrent_transformer_are_its_recipes():
    small = script("recurrent_transformer/train_small")
    for size, architecture in small.MODELS.values():
        recipe = mezzo_recurrent_transformer.recipes.RECIPES[f"{size}_{architecture}"]()
        kept = replace(recipe, data=FULL.text, eval_batches=None, checkpoint_every=10**9)
        assert small.configure(size, architecture, FULL) == kept
    raw = small.configure("small_12", small.NORMS["without RMSNorm"], FULL).model.stack.block
    assert raw == RecurrentBlockConfig(persistent_norm=False)


def test_the_trainings_on_documents_are_the_small_recipes_of_drt():
    documents = script("drt/train_documents")
    for architecture in documents.MODELS.values():
        ours = documents.configure(architecture, FULL)
        recipe = mezzo_drt.recipes.RECIPES[f"small_{architecture}"]()
        kept = ("batch_size", "steps", "optim", "eval_every", "checkpoint_every")
        of_bytes = replace(recipe.model, vocab_size=257)
        told = {name: getattr(ours, name) for name in kept}
        assert ours == replace(recipe, model=of_bytes, data=FULL.text, **told)
        assert ours.seq_len == documents.TRAINED_AT


def test_needles_cover_the_printed_lengths():
    needles = script("drt/needles")
    for name, table in {needles.PASSKEY: "single_niah", needles.TWO_HOP: "two_hop_niah"}.items():
        printed = DRTS.published.by_id[f"drt.table2.{table}"]
        columns = {column for column in printed.columns if column != "Retrieval"}
        assert columns <= set(needles.TABLES[name].columns) <= set(needles.SAMPLES)
        assert set(needles.TABLES[name].models) <= {row.model for row in printed.rows}


def test_the_stages_of_needles_follow_one_another():
    needles = script("drt/needles")
    runs = needles.runs_of(needles.EIGHT_PATHS, needles.DRT2, 1, FULL)
    assert len(runs) == sum(len(table.stages) for table in needles.TABLES.values())
    assert next(iter(runs.values())).init_from is None
    for (before, _), (_, after) in pairwise(runs.items()):
        assert after.init_from == str(before / "model")
    assert {config.data.text.source for config in runs.values()} == {"texts"}
    assert {config.data.chunk_size for config in runs.values()} == {64}
    landmark = [*needles.runs_of(needles.PASSKEY, needles.LANDMARK, 0, FULL).values()]
    assert [config.seq_len for config in landmark] == [512, *[768] * 4]
    assert {config.batch_size for config in landmark} == {16}, "short rows, so more of them"


def test_the_rows_of_the_ablation_of_gsa_differ_in_their_models_alone():
    ablation = script("gsa/ablation")
    rows = {row.model for row in GSAS.published.by_id["gsa.table2"].rows}
    assert rows <= set(ablation.NAMES.values())
    configs = {name: ablation.configure(name, FULL) for name in ablation.NAMES}
    assert len({config.model for config in configs.values()}) == len(configs)
    gsa = configs["gsa"]
    for name, config in configs.items():
        assert replace(config, name=gsa.name, model=gsa.model) == gsa
        if name not in ("retnet", "hgrn2"):  # a smaller MLP, and a stack
            assert replace(config.model, mixers=gsa.model.mixers) == gsa.model
        with torch.device("meta"):
            assert config.model.build().num_parameters() == pytest.approx(34e6, rel=0.03)
            ablation.configure(name, replace(FULL, dry_run=True)).model.build()


def test_a_fine_tuning_starts_from_the_converted_transformer(tmp_path, monkeypatch, capsys):
    t2r = script("gsa/t2r")
    models = (t2r.TRANSFORMER, "GSA", t2r.CONTROL)
    monkeypatch.chdir(tmp_path)
    text = write_words()

    def rehearse(*models, text=text, out="results/cpu"):
        words = ("--dry-run", "--runs", "runs", "--seeds", "0", "--data", text, "--out", out)
        return run_script(ROOT / "gsa/experiments/t2r.py", *words, "--models", *models)

    assert rehearse("GSA") == 2
    assert "no model to start from: add Transformer to --models" in capsys.readouterr().err
    assert rehearse(t2r.TRANSFORMER) == 0
    (first_alone,) = read_results(tmp_path / "results")["cpu/t2r_rates"].entries
    assert rehearse(*models) == 0
    ours = read_results(tmp_path / "results")["cpu/t2r_rates"]
    assert ours.columns == tuple(t2r.RATES)
    assert [model for _, model in ours.rows] == list(models)
    transformer, *tuned, nothing = ours.entries
    assert transformer == first_alone, "it is not trained again"
    curves = [entry.details["steps"]["val"] for entry in tuned]
    assert len({tuple(curve[0]) for curve in curves}) == 1, "every rate starts from the same model"
    for entry, ((step, first), *_, (last, loss)) in zip(tuned, curves, strict=True):
        assert (step, last) == (0, 10)
        assert loss < first
        assert math.exp(loss) == pytest.approx(entry.value, rel=1e-3)
        assert entry.value < 0.8 * nothing.value
        assert entry.details["parameters"] == nothing.details["parameters"]
    assert transformer.details["steps"]["val"][-1][0] == 30
    assert nothing.details["steps"]["val"][0][0] > 0, "it starts from no model"
    other = str(Path(text).rename("other.txt"))
    assert rehearse("GSA", text=other, out="other") == 2, "the Transformer is of another text"
