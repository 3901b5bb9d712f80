"""The speeds of a paper: what counts as its setting, and what a command line chooses."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
from mezzo_core.papers.measurement import How
from mezzo_core.papers.speeds import AbstractSizes, as_measured, open_speeds, run_speeds


@dataclass(frozen=True)
class Sizes(AbstractSizes):
    d_model: int


FULL = Sizes(1024, device="cpu")
DRY = Sizes(8, device="cpu")
HEADER = {"title": "a table", "setting": "toy", "unit": "ms", "better": "lower"}
MODELS = ("RNN", "RAT")


@pytest.fixture
def measured():
    """The measurers "first" and "second", and what they were asked for."""
    asked = []

    def measure(name):
        return lambda sizes, folder, say: asked.append((name, sizes.models, sizes.d_model))

    return {name: measure(name) for name in ("first", "second")}, asked


@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        (FULL, How.OTHER_HARDWARE),
        (replace(FULL, models=("RNN",)), How.OTHER_HARDWARE),
        (DRY, How.SCALED_DOWN),
    ],
)
def test_only_the_full_sizes_are_the_papers(tmp_path, sizes, how):
    path = tmp_path / "cpu/speed.json"
    result = open_speeds(path, sizes, FULL, print, columns=("64",), models=MODELS, **HEADER)
    assert as_measured(result) is None
    result.add(1.5, model="RNN", column="64")
    ours = as_measured(result)
    assert (ours.how, ours.kind, ours.source) == (how, "speed", "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [("first", MODELS), ("second", MODELS)]),
        (["--models", "second"], [("second", None)]),
        (["--models", "second", "RAT"], [("second", ("RAT",))]),
        (["--models", "RNN"], [("first", ("RNN",)), ("second", ("RNN",))]),
    ],
)
def test_a_command_line_takes_measurers_and_models(tmp_path, measured, words, expected):
    measurers, asked = measured
    with patch("sys.argv", ["speed.py", "--dry-run", "--out", str(tmp_path), *words]):
        assert run_speeds("Measure.", measurers, FULL, DRY, (*MODELS, "RNN")) == 0
    assert asked == [(*each, 8) for each in expected]
