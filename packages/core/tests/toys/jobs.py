"""Calls for processes of their own, which find them here."""

import os
import time
from pathlib import Path

import torch
from mezzo_core.errors import UserError


def place_of(number: int, folder: Path, device: torch.device) -> tuple[int, int, str]:
    return number, os.getpid(), f"{folder} {device}"


def meet(shared: Path, folder: Path, device: torch.device) -> str:
    """Return the folder once two processes are here, so that neither can take both calls."""
    (shared / str(os.getpid())).touch()
    for _ in range(1200):
        if len(list(shared.iterdir())) == 2:
            return str(folder)
        time.sleep(0.05)
    raise AssertionError("the other process did not come within a minute")


def threads_of(folder: Path, device: torch.device) -> int:
    return torch.get_num_threads()


def fail(folder: Path, device: torch.device) -> None:
    raise UserError("this one fails")
