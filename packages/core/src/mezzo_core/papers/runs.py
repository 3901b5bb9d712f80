"""A result file that grows by a run at a time: read back to go on, and always written whole."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mezzo_core.errors import UserError

SAME = ("gpu", "torch", "triton", "setting")
Runs = dict[tuple[str, int], dict[str, Any]]
"""What each run showed, by model and seed."""


def read_runs(path: Path, origin: Mapping[str, Any], same: Sequence[str] = SAME) -> Runs:
    """Return the runs that are in a result file; none if there is no file.

    The file's folder is made, so that one which cannot be is no surprise after the training.

    Args:
        path: of the file.
        origin: what the file will say of machine, software and setting.
        same: keys of `origin` that runs in one file share.

    Raises:
        UserError: if it is no such file, or of another origin, or its folder cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be made ({error.strerror})") from error
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        runs = {(run["model"], run["seed"]): run for run in content["runs"]}
        there = {key: content[key] for key in same}
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: no result of this benchmark: {error}") from error
    for key, value in there.items():
        if value != origin[key]:
            raise UserError(
                f"{path} holds runs of another {key} ({value}, this is {origin[key]}): "
                "write into another folder, or remove it"
            )
    return runs


def write_result(
    path: Path, content: Mapping[str, Any], draw: Callable[[Path], None] | None = None
) -> None:
    """Write a result file through one beside it, so that a kill leaves it old or new, never half.

    Args:
        path: of the file.
        content: what is written, as JSON.
        draw: draws the figure that goes with it, into the file that it is given.

    Raises:
        UserError: if a file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".part")
        whole.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        whole.replace(path)
        if draw is not None:
            draw(path.with_suffix(".png"))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
