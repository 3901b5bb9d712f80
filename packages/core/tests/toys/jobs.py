"""Work for processes of their own, which find it here."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from mezzo_core.errors import UserError
from mezzo_core.reproduction import Cell, Entry
from mezzo_core.reproduction.runner import Job


def meet(
    shared: Path, cells: tuple[Cell, ...], folder: Path, device: torch.device
) -> Iterator[list[Entry]]:
    """Tell folder and threads once two processes are here, so that neither takes both jobs."""
    (shared / str(os.getpid())).touch()
    for _ in range(1200):
        if len(list(shared.iterdir())) == 2:
            told = {"folder": str(folder), "threads": torch.get_num_threads()}
            yield [cell.entry(1, **told) for cell in cells]
            return
        time.sleep(0.05)
    raise AssertionError("the other process did not come within a minute")


def fail(cells: tuple[Cell, ...], folder: Path, device: torch.device) -> Iterator[list[Entry]]:
    """Measure one cell, and fail at the next."""
    yield [cells[0].entry(1.0)]
    raise UserError("this one fails")


def job_of(cells: tuple[Cell, ...]) -> Job:
    """Return a job that gives each cell the number that its column is named by."""
    return Job(cells, _numbers)


def _numbers(cells: tuple[Cell, ...], folder: Path, device: torch.device) -> Iterator[list[Entry]]:
    details = {"parameters": 1, "tokens_per_second": 2.0}
    for cell in cells:
        yield [cell.entry(float(cell.column), **details)]
