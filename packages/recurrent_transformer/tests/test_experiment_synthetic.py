"""The script of the synthetic experiment, rehearsed on a CPU."""

import runpy
import sys
from pathlib import Path

import pytest
from mezzo_core.papers.measurement import How, read_result
from mezzo_recurrent_transformer.synthetic.tasks import TASKS

SCRIPT = Path(__file__).parents[1] / "experiments/synthetic.py"


@pytest.fixture
def rehearse(tmp_path, monkeypatch):
    def run(*words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["synthetic", "--out", "results/cpu", *words])
        with pytest.raises(SystemExit) as exit:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return exit.value.code

    return run


def test_every_task_is_trained_and_the_result_says_what_was_cut(rehearse):
    for model in ("transformer", "recurrent"):
        assert rehearse("--dry-run", "--models", model) == 0
    found = read_result(Path("results/cpu/synthetic.json"))
    assert read_result(Path("results/cpu/synthetic_rates.json")).columns == found.columns
    assert found.how is How.SCALED_DOWN
    assert found.columns == tuple(TASKS)
    assert {entry.model for entry in found.entries} == {"Transformer", "Recurrent Transformer"}
    assert "max_steps 2, not None" in found.setting
    assert not Path("results/cpu/synthetic").exists(), "runs are scratch, not results"


def test_the_sweeps_are_the_papers_but_for_what_each_cuts():
    whole, short = (
        sweep.header().setting.split("Here: ")[1]
        for sweep in runpy.run_path(str(SCRIPT))["SWEEPS"].values()
    )
    assert short == "max_steps 4000, not None"
    assert whole == "learning_rates (0.001,), not (0.001, 0.0005, 0.0001)"
