"""The script of the synthetic experiment: what a full run is."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "experiments/synthetic.py"


def test_the_sweeps_are_the_papers_but_for_what_each_cuts():
    whole, short = (
        sweep.header().setting.split("Here: ")[1]
        for sweep in runpy.run_path(str(SCRIPT))["SWEEPS"].values()
    )
    assert short == "max_steps 4000, not None"
    assert whole == "learning_rates (0.001,), not (0.001, 0.0005, 0.0001)"
