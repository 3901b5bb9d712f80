"""The speeds of a paper: what counts as its setting, and what its commands measure."""

from dataclasses import dataclass, replace

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.reproduction import Cell
from mezzo_core.reproduction.measurement import How, read_result
from mezzo_core.reproduction.runner import Job
from mezzo_core.reproduction.speeds import AbstractSizes, Speeds


@dataclass(frozen=True)
class Sizes(AbstractSizes):
    d_model: int


FULL, DRY = Sizes(1024, device="cuda"), Sizes(8, device="cpu")
MODELS = ("RNN", "RAT")


@pytest.fixture
def speeds():
    """Files "first" and "second" of both models, whose speed is the width."""

    def make(sizes):
        def work(cells, folder, device):
            yield [cell.entry(sizes.d_model) for cell in cells]

        header = {"title": "a table", "setting": "toy", "unit": "ms"}
        jobs = [Job((Cell(model, "64"),), work) for model in MODELS]
        return header, jobs

    return Speeds({"first": make, "second": make}, FULL, DRY)


@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        (FULL, How.OTHER_HARDWARE),
        (replace(FULL, models=("RNN",)), How.OTHER_HARDWARE),
        (DRY, How.SCALED_DOWN),
    ],
)
def test_only_the_full_sizes_are_the_papers(speeds, tmp_path, sizes, how):
    sizes = replace(sizes, device="cpu")
    speeds = replace(speeds, full=replace(FULL, device="cpu"))
    assert speeds.measure("first", replace(sizes, models=("SWA",)), tmp_path, print) is None
    ours = speeds.measure("first", sizes, tmp_path, print)
    assert (ours.how, ours.kind, ours.source) == (how, "speed", "")
    assert [model for _, model in ours.rows] == [*(sizes.models or MODELS)]


@pytest.mark.parametrize(
    ("only", "files", "models"),
    [
        ([], {"first", "second"}, MODELS),
        (["second", "RAT"], {"second"}, ("RAT",)),
        (["RNN"], {"first", "second"}, ("RNN",)),
    ],
)
def test_a_bench_takes_files_and_models(speeds, tmp_path, only, files, models):
    speeds.bench(torch.device("cpu"), True, tmp_path, only)
    found = {path.stem: read_result(path) for path in tmp_path.glob("*.json")}
    assert set(found) == {f"speed_{name}" for name in files}
    for ours in found.values():
        assert tuple(model for _, model in ours.rows) == models
    with pytest.raises(UserError, match=r"named 'RMN'.*RNN"):
        speeds.bench(torch.device("cpu"), True, tmp_path, ["RMN"])


def test_a_bench_that_has_nothing_left_to_measure_says_where_the_results_are(
    speeds, tmp_path, run_command
):
    words = ("bench", "--quick", "--device", "cpu", "--out", tmp_path)
    for _ in range(2):
        _, shown, _ = run_command(*words, bench=lambda: speeds.bench)
        assert shown.endswith(f"the results are in {tmp_path}\n")
