"""The runner: an experiment is a list of jobs, and each of them fills cells of a result.

What a result has is not measured again, so a run that was killed goes on where it was.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from mezzo_core.reproduction.result_file import Cell, Entry, Result
from mezzo_core.reproduction.script import say
from mezzo_core.reproduction.timing import OOM, attempt, start_afresh

SPEEDS = ("tokens_per_second", "seconds_to_first_step")
"""Details that say nothing where several jobs run at the same time."""
Work = Callable[[tuple[Cell, ...], Path, torch.device], Iterable[Sequence[Entry]]]
"""Measures cells, with a scratch folder, on a device; yields what came of each measurement."""
Name = TypeVar("Name")
Found = TypeVar("Found")
_place: tuple[Path, torch.device]
"""Of this process, if it is one of several."""


@dataclass(frozen=True)
class Job:
    """Cells of a result, and the work that fills them; several processes must be able to have it.

    If the work does not fit into the GPU, the cells that are left are OOM.
    """

    cells: tuple[Cell, ...]
    work: Work

    def measure(
        self, cells: tuple[Cell, ...], folder: Path, device: torch.device
    ) -> Iterator[Sequence[Entry]]:
        """Yield the entries of those cells that are missing."""
        left = dict.fromkeys(cells)
        start_afresh()
        try:
            for entries in self.work(cells, folder, device):
                yield entries
                for entry in entries:
                    left.pop(entry.cell, None)
        except torch.OutOfMemoryError:
            yield [cell.entry(OOM) for cell in left]

    def all(self, cells: tuple[Cell, ...], folder: Path, device: torch.device) -> list[Any]:
        """Return all that `measure` yields, for another process."""
        return list(self.measure(cells, folder, device))


def names_of(jobs: Sequence[Job]) -> dict[str, tuple[str, ...]]:
    """Return the models, columns and groups of a header, in the order of the jobs' cells."""
    every = [cell for job in jobs for cell in job.cells]
    groups = dict.fromkeys(cell.group for cell in every if cell.group)
    return {
        "models": tuple(dict.fromkeys(cell.model for cell in every)),
        "columns": tuple(dict.fromkeys(cell.column for cell in every)),
        "groups": tuple(groups),
    }


def run(
    result: Result, jobs: Iterable[Job], folder: Path, device: torch.device, processes: int = 1
) -> None:
    """Do jobs, and add what they measure to a result as it comes.

    Args:
        result: what it has already is left out.
        jobs: in the order in which they begin.
        folder: scratch.
        device: where to measure.
        processes: jobs at the same time, see `side_by_side`; their trainings have no speed then.
    """
    missing: dict[tuple[Cell, ...], Job] = {}
    for job in jobs:
        if cells := tuple(cell for cell in job.cells if not result.has(cell)):
            missing[cells] = job
    if processes == 1:
        for cells, job in missing.items():
            for entries in job.measure(cells, folder, device):
                result.add(*entries)
        return
    calls = {cells: partial(job.all, cells) for cells, job in missing.items()}
    for _, found in side_by_side(calls, folder, device, processes):
        for entries in found:
            result.add(*map(_without_speed, entries))


def _without_speed(entry: Entry) -> Entry:
    kept = {name: part for name, part in entry.details.items() if name not in SPEEDS}
    return replace(entry, details=kept)


def timing(
    cells: Mapping[Cell, Mapping[str, Any]],
    prepare: Callable[[torch.device], Callable[..., list[Any]]],
    value: str,
) -> Job:
    """Return the job that times one model.

    Args:
        cells: the sizes of each, given to what `prepare` returns; a batch `B` is told too.
        prepare: builds the model on a device, and returns a function that times it, in several
            passes.
        value: the field of a pass that is the value; the others become details.
    """
    return Job(tuple(cells), partial(_time, cells, prepare, value))


def _time(
    cells: Mapping[Cell, Mapping[str, Any]],
    prepare: Callable[[torch.device], Callable[..., list[Any]]],
    value: str,
    missing: tuple[Cell, ...],
    folder: Path,
    device: torch.device,
) -> Iterator[list[Entry]]:
    time = prepare(device)
    for cell in missing:
        found = attempt(partial(time, **cells[cell]))
        yield passes(cell, found, value, **{k: n for k, n in cells[cell].items() if k == "B"})


def passes(cell: Cell, found: list[Any] | str, value: str, **details: Any) -> list[Entry]:
    """Return the entries of all passes of a speed: dataclasses such as `Timing`, or OOM."""
    told = [{value: found}] if isinstance(found, str) else map(asdict, found)
    return [
        cell._replace(seed=seed).entry(each.pop(value), **{**details, **each})
        for seed, each in enumerate(told)
    ]


def side_by_side(
    calls: Mapping[Name, Callable[[Path, torch.device], Found]],
    folder: Path,
    device: torch.device,
    processes: int,
) -> Iterator[tuple[Name, Found]]:
    """Yield the name of each call and what it returns, in the order in which they end.

    For what is too small to fill a GPU, or where there are several. Speeds say nothing then.

    Args:
        calls: by name, such as cells of a result. They take a scratch folder and a device, and
            can be pickled, as what they return.
        folder: scratch. Each process uses a folder in it.
        device: where to measure. The processes share out all GPUs, and the host's threads: with
            all threads for each, they would wait for each other.
        processes: how many, at most; 1 makes one call after another in this one, in the folder
            itself. If a call of several fails, its name and error are told at once; the first
            error is raised after all the others have ended.
    """
    if processes == 1:
        for name, call in calls.items():
            yield name, call(folder, device)
        return
    context, processes = multiprocessing.get_context("spawn"), min(processes, max(len(calls), 1))
    places = context.Queue()
    for i in range(processes):
        chosen = device
        if device.type == "cuda":
            chosen = torch.device("cuda", i % torch.cuda.device_count())
        places.put((folder / f"job_{i}", chosen))
    threads = max(1, torch.get_num_threads() // processes)
    with ProcessPoolExecutor(processes, context, _begin, (places, threads)) as pool:
        running = {pool.submit(_call, call): name for name, call in calls.items()}
        failure: BaseException | None = None
        try:
            for done in as_completed(running):
                name, error = running[done], done.exception()
                if error is None:
                    yield name, done.result()
                else:
                    failure = failure or error
                    say(f"{_words(name)}: failed, the others go on: {error!r}")
        finally:
            pool.shutdown(cancel_futures=True)
    if failure is not None:
        raise failure


def _begin(places: Any, threads: int) -> None:
    """Take a place and some threads for this process."""
    global _place
    _place = places.get()
    torch.set_num_threads(threads)
    if _place[1].type == "cuda":
        torch.cuda.set_device(_place[1])


def _call(call: Callable[[Path, torch.device], Found]) -> Found:
    return call(*_place)


def _words(name: Any) -> str:
    """Return a name in words; of several cells, that of the first."""
    cell = name[0] if isinstance(name, tuple) and isinstance(name[0], Cell) else name
    return ", ".join(str(part) for part in cell if part != "") if cell != name else str(name)
