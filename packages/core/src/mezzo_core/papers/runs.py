"""Result files to which runs are added one at a time, in several sessions if needed."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mezzo_core.errors import UserError

SAME = ("gpu", "torch", "triton", "setting")
Runs = dict[tuple[str, int], dict[str, Any]]
"""The results of the runs, by model and seed."""


def read_runs(path: Path, origin: Mapping[str, Any], same: Sequence[str] = SAME) -> Runs:
    """Return the runs in a result file; none if there is no file.

    The file's folder is created here, so that a path that cannot be written fails before the
    training and not after it.

    Args:
        path: the result file.
        origin: the machine, software and setting that will be written to the file.
        same: keys of `origin` whose values all runs in the file must share.

    Raises:
        UserError: if the file is not a result file or is of another origin, or if its folder cannot
            be created.
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
    """Write a result file beside its place and rename it, so that a kill never leaves half of it.

    Args:
        path: the result file.
        content: its content, written as JSON.
        draw: draws the figure of the result into the given path.

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
