"""Calls side by side: each once, in processes with folders of their own, and errors come back."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from mezzo_core.bench.jobs import side_by_side
from mezzo_core.errors import UserError
from toys.jobs import fail, meet, place_of, threads_of

CPU = torch.device("cpu")


def test_one_job_runs_in_this_process_one_after_another():
    calls = {number: partial(place_of, number) for number in range(3)}
    found = list(side_by_side(calls, Path("here"), CPU, 1))
    assert found == [(i, (i, os.getpid(), "here cpu")) for i in range(3)]


def test_several_jobs_run_in_processes_with_folders_of_their_own(tmp_path):
    both = dict.fromkeys(range(2), partial(meet, tmp_path))
    calls = both | {number: partial(place_of, number) for number in range(2, 5)}
    found = dict(side_by_side(calls, Path("here"), CPU, 2))
    assert {found.pop(0), found.pop(1)} == {"here/job_0", "here/job_1"}
    processes = {path.name for path in tmp_path.iterdir()}
    assert str(os.getpid()) not in processes
    assert [found[i][0] for i in range(2, 5)] == [2, 3, 4]
    assert {str(pid) for _, pid, _ in found.values()} <= processes


def test_several_jobs_share_out_the_threads(monkeypatch: pytest.MonkeyPatch):
    """With all threads for each, they would wait for each other."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    calls = dict.fromkeys("ab", threads_of)
    assert dict(side_by_side(calls, Path("here"), CPU, 2)) == {"a": 3, "b": 3}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert dict(side_by_side(calls, Path("here"), CPU, 2)) == {"a": 1, "b": 1}


def test_an_error_is_told_at_once_with_its_name_and_raised_after_all_other_calls(capfd):
    calls = {("GSA", 0): fail} | {number: partial(place_of, number) for number in range(5)}
    found: list[tuple[object, object]] = []
    with pytest.raises(UserError, match="this one fails"):
        found.extend(side_by_side(calls, Path("here"), CPU, 2))
    assert sorted(name for name, _ in found) == [0, 1, 2, 3, 4]
    assert "GSA, 0: failed, the others go on: UserError('this one fails')" in capfd.readouterr().out
