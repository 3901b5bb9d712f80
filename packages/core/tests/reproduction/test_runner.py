"""Jobs fill a result: each cell once, one after another or in processes of their own."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.reproduction import OOM, Cell, Header, Result, Timing, origin
from mezzo_core.reproduction.result_file import FAILED
from mezzo_core.reproduction.runner import Job, run, timing
from toys.jobs import fail, job_of, meet

CPU = torch.device("cpu")
MODELS = ("RNN", "RAT", "Attention")
HEADER = Header("speed", "T", "toy", ("8", "16"), MODELS, "ms")


@pytest.fixture
def result(tmp_path):
    return Result(tmp_path / "a.json", HEADER, {**origin(CPU), "commit": "c1"})


def values(result):
    return {(entry.model, entry.column): entry.value for entry in result.entries}


def cells(model):
    return tuple(Cell(model, column) for column in HEADER.columns)


def test_what_was_killed_goes_on_and_nothing_is_measured_twice(result, tmp_path):
    measured = []

    def work(wanted, folder, device):
        for cell in wanted:
            if len(measured) == dies:
                raise KeyboardInterrupt
            measured.append(cell)
            yield [cell.entry(len(measured))]

    jobs = [Job(cells(model), work) for model in ("RNN", "RAT")]
    dies = 3
    with pytest.raises(KeyboardInterrupt):
        run(result, jobs, tmp_path, CPU)
    assert len(values(result)) == 3
    dies = None
    again = Result(result.path, HEADER, {**origin(CPU), "commit": "c1"})
    for _ in range(2):
        run(again, [*jobs, *jobs], tmp_path, CPU)
    assert measured == [*cells("RNN"), *cells("RAT")]
    assert values(again) == {cell[:2]: i for i, cell in enumerate(measured, 1)}


def test_work_that_does_not_fit_is_a_word_in_what_is_left_and_the_others_go_on(result, tmp_path):
    def bad(wanted, folder, device):
        yield [wanted[0].entry(1.5)]
        raise torch.OutOfMemoryError

    def good(wanted, folder, device):
        yield [cell.entry(2.5) for cell in wanted]

    run(result, [Job(cells("RNN"), bad), Job(cells("RAT"), good)], tmp_path, CPU)
    assert [*values(result).values()] == [1.5, OOM, 2.5, 2.5]


@dataclass(frozen=True)
class Pass:
    ms: float
    peak_gb: float


def test_a_timed_model_is_built_once_and_each_pass_is_an_entry(result, tmp_path):
    built, seen = [], []

    def prepare(device):
        built.append(device)

        def time(B, T):
            seen.append((B, T))
            if T == 16:
                raise torch.OutOfMemoryError
            return [Pass(2.0, 0.5), Pass(4.0, 0.25)]

        return time

    sizes = {Cell("RNN", "8"): {"B": 2, "T": 8}, Cell("RNN", "16"): {"B": 1, "T": 16}}
    job = timing(sizes, prepare, "ms")
    for _ in range(2):
        run(result, [job], tmp_path, CPU)
    assert (built, seen) == ([CPU], [(2, 8), (1, 16)])
    first, second, full = result.entries
    assert (first.value, first.details, second.seed) == (2.0, {"B": 2, "peak_gb": 0.5}, 1)
    assert (full.value, full.details) == (OOM, {"B": 1})
    assert Timing(1.0, 0.5, 2.0).peak_gb is None


def test_several_processes_have_folders_of_their_own_and_share_out_the_threads(
    result, tmp_path, monkeypatch
):
    """With all threads for each, they would wait for each other."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    shared = tmp_path / "shared"
    shared.mkdir()
    jobs = [Job(cells(model), partial(meet, shared)) for model in MODELS[:2]]
    run(result, jobs, Path("here"), CPU, processes=2)
    places = {(e.details["folder"], e.details["threads"]) for e in result.entries}
    assert places == {("here/job_0", 3), ("here/job_1", 3)}
    assert str(os.getpid()) not in {path.name for path in shared.iterdir()}


def test_an_error_is_told_at_once_and_raised_after_all_other_jobs_which_tell_no_speeds(
    result, tmp_path, capfd
):
    jobs = [Job(cells("RNN"), fail), *(job_of(cells(model)) for model in MODELS[1:])]
    with pytest.raises(UserError, match="this one fails"):
        run(result, jobs, tmp_path, CPU, processes=2)
    others = {(m, c): float(c) for m in MODELS[1:] for c in HEADER.columns}
    assert values(result) == {("RNN", "8"): 1.0} | others  # what was measured before an error too
    assert {tuple(e.details) for e in result.entries if e.model != "RNN"} == {("parameters",)}
    told = "RNN, 8, 0: failed, the others go on: UserError('this one fails')"
    assert told in capfd.readouterr().out


def test_an_excused_error_is_a_word_with_its_reason_unless_the_user_can_mend_it(tmp_path):
    def broken(wanted, folder, device):
        raise error

    error = RuntimeError("no kernel\nhere")
    said = []
    result = Result(tmp_path / "a.json", HEADER, {**origin(CPU), "commit": "c1"}, said.append)
    jobs = [Job(cells("RNN"), broken, is_excused=True), job_of(cells("RAT"))]
    run(result, jobs, tmp_path, CPU)
    assert [*values(result).values()] == [FAILED, FAILED, 8, 16]
    assert result.entries[0].details == {"error": "failed: RuntimeError: no kernel"}
    assert said[0] == "a: RNN, 8, 0: failed: RuntimeError: no kernel"
    run(result, [job_of(cells("RNN"))], tmp_path, CPU)
    assert [*values(result).values()] == [8, 16, 8, 16], "what failed is tried again"
    error = UserError("the disk is full")
    with pytest.raises(UserError, match="disk"):
        run(result, [Job(cells("Attention"), broken, is_excused=True)], tmp_path, CPU)
