"""The runner: an experiment is a list of jobs, and each of them fills cells of a result.

Cells that a result has are not measured again, so a run that was killed goes on where it was.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mezzo_core.reproduction.origin import origin
from mezzo_core.reproduction.outcomes import failure
from mezzo_core.reproduction.result_file import FAILED, Cell, Entry, Header, Result, Say, say
from mezzo_core.reproduction.timing import OOM, attempt, start_afresh

SPEED = "tokens_per_second"
"""A detail that says nothing where several jobs run at the same time."""
Work = Callable[[tuple[Cell, ...], Path, torch.device], Iterable[Sequence[Entry]]]
"""Measures cells, with a scratch folder, on a device; yields what came of each measurement."""
_place: tuple[Path, torch.device]
_found: Any
"""What `_begin` gives to each of several processes."""


@dataclass(frozen=True)
class Job:
    """Cells of a result, and the work that fills them; for several processes it can be pickled.

    If the work does not fit into the GPU, the cells that are left are OOM. An error of excused work
    does not end the other jobs: its cells are FAILED, and say why.
    """

    cells: tuple[Cell, ...]
    work: Work
    is_excused: bool = False

    def measure(self, folder: Path, device: torch.device) -> Iterator[Sequence[Entry]]:
        """Yield the entries of the cells as they are measured."""
        left = dict.fromkeys(self.cells)
        start_afresh()
        try:
            for entries in self.work(self.cells, folder, device):
                yield entries
                for entry in entries:
                    left.pop(entry.cell, None)
        except torch.OutOfMemoryError:
            yield [cell.entry(OOM) for cell in left]
        except Exception as error:
            if not self.is_excused:
                raise
            words = failure(error)
            yield [cell.entry(FAILED, error=words) for cell in left]


def fill(
    path: Path,
    header: Mapping[str, Any],
    jobs: Iterable[Job],
    folder: Path,
    device: torch.device,
    *,
    models: Sequence[str] | None = None,
    processes: int = 1,
    say: Say = say,
) -> Result:
    """Do the jobs of an experiment, and return the result file with what they measure.

    Models, columns and groups that the header leaves out are those of all jobs; only `models` are
    measured (None: all). See `run` for the folder, the device and the processes.

    Raises:
        UserError: see `Result`.
    """
    jobs = [*jobs]
    cells = [cell for job in jobs for cell in job.cells]
    groups = dict.fromkeys(cell.group for cell in cells if cell.group)
    names = {
        "models": tuple(dict.fromkeys(cell.model for cell in cells)),
        "columns": tuple(dict.fromkeys(cell.column for cell in cells)),
        "groups": tuple(groups),
    }
    result = Result(path, Header(**{**names, **header}), origin(device), say)
    wanted = (
        replace(job, cells=tuple(c for c in job.cells if models is None or c.model in models))
        for job in jobs
    )
    run(result, wanted, folder, device, processes)
    return result


def run(
    result: Result, jobs: Iterable[Job], folder: Path, device: torch.device, processes: int = 1
) -> None:
    """Do jobs in their order, and add what they measure to a result, but for what it has already.

    Work that is too small to fill a GPU, or that is for several GPUs, may have several processes;
    its trainings tell no speed then. The processes share out all GPUs and the host's threads: if
    each had all threads, they would wait for each other. Each has a folder in the scratch folder.

    Raises:
        Exception: the first error of a job; of several processes after all others have ended.
    """
    missing: dict[tuple[Cell, ...], Job] = {}
    for job in jobs:
        if cells := tuple(cell for cell in job.cells if not result.has(cell)):
            missing[cells] = replace(job, cells=cells)
    if processes == 1:
        for job in missing.values():
            for entries in job.measure(folder, device):
                result.add(*entries)
    elif missing:
        _run_side_by_side(result, [*missing.values()], folder, device, processes)


def _run_side_by_side(
    result: Result, jobs: Sequence[Job], folder: Path, device: torch.device, processes: int
) -> None:
    context, processes = multiprocessing.get_context("spawn"), min(processes, len(jobs))
    # A SimpleQueue's `put` returns when the entries are in the pipe: they outlive the process.
    places, found = context.Queue(), context.SimpleQueue()
    for i in range(processes):
        chosen = device
        if device.type == "cuda":
            chosen = torch.device("cuda", i % torch.cuda.device_count())
        places.put((folder / f"job_{i}", chosen))
    threads, errors = max(1, torch.get_num_threads() // processes), []
    with ProcessPoolExecutor(processes, context, _begin, (places, found, threads)) as pool:
        running = {pool.submit(_measure_all, job): job for job in jobs}
        try:
            while running:
                ended, _ = wait(running, timeout=1, return_when=FIRST_COMPLETED)
                while not found.empty():
                    result.add(*map(_without_speed, found.get()))
                for each in ended:
                    job = running.pop(each)
                    if error := each.exception():
                        errors.append(error)
                        cell = ", ".join(str(part) for part in job.cells[0] if part != "")
                        say(f"{cell}: failed, the others go on: {error!r}")
        finally:
            pool.shutdown(cancel_futures=True)
    if errors:
        raise errors[0]


def _begin(places: Any, found: Any, threads: int) -> None:
    """Take a place and some threads for this process."""
    global _place, _found
    _place, _found = places.get(), found
    torch.set_num_threads(threads)
    if _place[1].type == "cuda":
        torch.cuda.set_device(_place[1])


def _measure_all(job: Job) -> None:
    for entries in job.measure(*_place):
        _found.put(entries)


def _without_speed(entry: Entry) -> Entry:
    kept = {name: part for name, part in entry.details.items() if name != SPEED}
    return replace(entry, details=kept)


def timing(
    cells: Mapping[Cell, Mapping[str, Any]],
    prepare: Callable[[torch.device], Callable[..., list[Any]]],
    value: str,
) -> Job:
    """Return the job that times one model.

    Args:
        cells: the sizes of each, which the timing function takes; `B` becomes a detail too.
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
