"""The trainings of experiments/, rehearsed on a CPU: what is written, and what a full run is."""

import runpy
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.bench import Options
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.papers.measurement import How, read_result
from mezzo_core.train.log import RunLog
from mezzo_rat import LinearRNNConfig, trainings
from mezzo_rat.claims import ANSWERS, REPRODUCTION
from mezzo_rat.recipes import PAPER_NAMES, RECIPES, mid, train_config
from mezzo_rat.recipes import small as small_size

SCRIPTS = Path(__file__).parents[1] / "experiments"
six, small, short = (
    SimpleNamespace(**runpy.run_path(str(SCRIPTS / f"{name}.py")))
    for name in ("train_six", "train_small", "train_200m")
)
FULL = Options(Path("out"), (), torch.device("cuda"), dry_run=False, data="texts")


def dry_run(script, models, folder, *words):
    folders = ["--out", str(folder / "results/cpu"), "--runs", str(folder / "runs")]
    command = ["--dry-run", *folders, *words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, "plot", lambda log: None)  # would take most of the time
        return script.run_script(script.measure, "Train.", models, trains=True, words=command)


def judge(id, evidence, results):
    """Judge rehearsed results by a claim's criterion."""
    (answer,) = (each for each in ANSWERS if each.id == f"rat.{id}")
    printed, run = REPRODUCTION.published.by_id[answer.id], SimpleNamespace(results=results)
    found = answer.evidence[evidence].find(run, printed)
    return answer.evidence[evidence].criterion(printed, found)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("six")
    assert dry_run(six, tuple(six.MODELS), folder, "--seeds", "0", "1") == 0
    return read_result(folder / "results/cpu/train_six.json")


def test_the_first_seed_tries_every_rate_and_the_second_the_best(swept):
    assert [model for _, model in swept.rows] == list(six.MODELS)
    assert list(six.MODELS)[:6] == list(PAPER_NAMES.values())
    assert (swept.how, swept.columns) == (How.SCALED_DOWN, ("5e-4", "1e-3", "2e-3"))
    for model in six.MODELS:
        seeds = [len(swept.cell(model, rate)) for rate in swept.columns]
        assert sorted(seeds) == [1, 1, 2], "one rate has a second seed"


@pytest.mark.parametrize(
    ("id", "evidence", "neighbours"),
    [
        *(("table1", 2, 2), ("claim.ppl_200m", 0, 2), ("claim.ppl_between", 0, 3)),
        ("claim.chunk16_matches", 0, 1),
    ],
)
def test_the_main_claims_read_the_best_rates_first(swept, id, evidence, neighbours):
    judged = judge(id, evidence, {trainings.SIX: swept})
    assert f"of {neighbours} neighbours" in judged.summary


def test_a_full_run_of_the_six_is_as_its_docstring_says():
    named = {field.name for field in fields(six.FULL)}
    changed = {name for name in named if getattr(six.FULL, name) != getattr(mid(), name)}
    other = {"eval_every", "checkpoint_every", "compile"}
    assert changed == {"optim", "batch_size", "micro_batch_size", "steps"} | other
    assert (six.FULL.steps, six.FULL.batch_size, six.FULL.seq_len) == (3000, 8, 1024)
    assert six.FULL.optim.min_lr == six.FULL.optim.lr / 10 == 1e-4
    mixers = {
        model: train_config("six", six.FULL, name).model.mixers[0]
        for model, name in six.MODELS.items()
    }
    assert mixers["RNN"].span == six.FULL.seq_len
    assert mixers["RNN, started as RAT(L=16)"] == LinearRNNConfig(mixers["RAT(L=16)"].chunk_size)
    assert mixers["RAT(L=64), started as RAT(L=16)"] == replace(mixers["RAT(L=64)"], span=16)
    assert mixers["Attention, ALiBi"] == AttentionConfig(rope_base=None, alibi="press")


@pytest.fixture(scope="module")
def by_length(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    assert dry_run(small, small.MODELS, folder, "--seeds", "1") == 0
    names = (trainings.CONTEXTS, trainings.LONG, trainings.POSITIONS)
    return {name: read_result(folder / f"results/cpu/{Path(name).name}.json") for name in names}


def test_every_small_model_has_a_number_in_every_column(by_length):
    tables = (small.IN_CONTEXTS, small.IN_LONG, small.IN_POSITIONS)
    for ours, models in zip(by_length.values(), tables, strict=True):
        assert [model for _, model in ours.rows] == list(models)
        assert (ours.how, ours.seeds) == (How.SCALED_DOWN, [1])
        for model in models:
            assert all(len(ours.by_seed(model, column)) == 1 for column in ours.columns)


SMALL_CLAIMS = {
    "table9": 5 + 5 + 5,  # neighbours and ratios
    "table10": 3,
    "claim.ablation_params": 3,
    "claim.ablation_rope": 1 + 1,
    "claim.context_growth": 1 + 3,
    "claim.reversed_worse": 2 * 3,
    "claim.reversed_14": 3 * 3,
    "claim.fig6_rnn": 2 * 2 + 1,
    "claim.fig6_rope": 2 + 1,
    "claim.fig6_nope": 3 + 1,
    "claim.nope_gap": 2,
    "claim.16k_gains": 1,
    "claim.16k_order": 3,
}


@pytest.mark.parametrize("id", SMALL_CLAIMS)
def test_the_claims_read_all_that_they_compare(by_length, id):
    compared = [line for line in judge(id, 0, by_length).details if "not compared" not in line]
    assert len(compared) == SMALL_CLAIMS[id]


def test_table_11_reads_its_perplexities(by_length):
    assert "of 4 neighbours" in judge("table11", 2, by_length).summary


def test_full_small_runs_are_as_the_docstring_says():
    recipe = small_size()
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


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsal")
    assert dry_run(short, tuple(short.NAMES), folder) == 0
    return read_result(folder / "results/cpu/train_200m.json")


def test_a_short_training_gives_hours_and_losses(rehearsal):
    assert rehearsal.columns == short.COLUMNS
    assert [model for _, model in rehearsal.rows] == list(short.NAMES)
    for model in short.NAMES:
        (hours,) = rehearsal.cell(model, "Hours on one GPU for 15B tokens")
        assert hours.value == pytest.approx(
            15e9 / hours.details["tokens_per_second"] / 3600, rel=1e-3
        )
        losses = [loss for _, loss in hours.details["steps"]["train"]]
        assert losses[-1] < losses[0] - 0.1
        assert rehearsal.typical(model, "Train. loss") == pytest.approx(losses[-1], abs=1e-3)
        assert rehearsal.typical(model, "Val. PPL") < 257


def test_the_claim_reads_what_the_script_writes(rehearsal):
    judged = judge("claim.train_time_200m", 0, {"nvidia-h200/train_200m": rehearsal})
    assert judged.summary.startswith("expected 15 to 70 hours on one GPU: RNN ")


@pytest.mark.parametrize("name", short.NAMES.values())
def test_a_full_run_is_the_recipe_but_for_its_length_and_batch(name):
    ours, recipe = train_config(f"200m_{name}", short.SHORT, name), RECIPES[f"200m_{name}"]()
    names = (field.name for field in fields(recipe))
    changed = {each for each in names if getattr(ours, each) != getattr(recipe, each)}
    assert changed == {"steps", "batch_size", "eval_every", "eval_batches"}
    assert ours.batch_size * ours.seq_len == 131_072
    assert recipe.batch_size * recipe.seq_len == 8 * 131_072
    assert ours.compile


@pytest.mark.gpu
@pytest.mark.slow
def test_a_recipe_trains_at_its_own_size_on_a_gpu(tmp_path):
    measure = short.measure
    names = measure.__globals__
    names["SHORT"] = replace(names["SHORT"], steps=21, batch_size=4, eval_batches=2)
    words = ["--out", str(tmp_path / "gpu"), "--runs", str(tmp_path / "runs"), "--models", "RNN"]
    assert short.run_script(measure, "Train.", tuple(short.NAMES), trains=True, words=words) == 0
    ours = read_result(tmp_path / "gpu/train_200m.json")
    details = ours.cell("RNN", short.COLUMNS[0])[0].details
    assert details["parameters"] > 200e6
    assert details["peak_gb"] > 3
