"""Checks paths that are given to commands, before any work."""

import os
from pathlib import Path

from mezzo_core.errors import UserError


def expanded(path: Path | None) -> Path | None:
    """Expand ~ in an option's path; a shell does not in "--out=~/run".

    Raises:
        UserError: if the user in ~USER is not known.
    """
    try:
        return path and path.expanduser()
    except RuntimeError:
        raise UserError(f"{path} begins with a user that is not known here") from None


def check_writable(path: Path, *, is_folder: bool) -> None:
    """Check that a file or a folder can be written, before any work.

    Raises:
        UserError: if it cannot be written.
    """
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    wants_file = there == path and not is_folder
    if not (there.is_file() if wants_file else there.is_dir()):
        kind = "file" if wants_file else "folder"
        raise UserError(f"{path} cannot be written: {there} is no {kind}")
    if not os.access(there, os.W_OK):
        raise UserError(f"{path} cannot be written: {there} allows no writing")
