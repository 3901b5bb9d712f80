"""Calls for processes of their own, which find them here."""

import os
from pathlib import Path

import torch
from mezzo_core.errors import UserError


def place_of(number: int, folder: Path, device: torch.device) -> tuple[int, int, str]:
    return number, os.getpid(), f"{folder} {device}"


def threads_of(folder: Path, device: torch.device) -> int:
    return torch.get_num_threads()


def fail(folder: Path, device: torch.device) -> None:
    raise UserError("this one fails")
