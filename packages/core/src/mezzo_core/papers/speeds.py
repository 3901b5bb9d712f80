"""A paper's speeds: the sizes at which they are measured, their result files, and their script."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mezzo_core.bench.origin import origin
from mezzo_core.bench.result import Header, Result, Say
from mezzo_core.bench.script import Options, run_script, say
from mezzo_core.papers.measurement import Measurement, read_result

Measurer = Callable[[Any, Path, Say], Measurement | None]
"""Measures something at some sizes, into a folder; None if the sizes leave it out."""
Measurers = Mapping[str, Measurer]
"""By the names in the files' names."""


@dataclass(frozen=True, kw_only=True)
class AbstractSizes:
    """What the sizes of all speeds have; a paper adds its own.

    Attributes:
        device: where they are measured.
        models: those that are measured; None: all.
    """

    device: str
    models: tuple[str, ...] | None = None

    def wants(self, model: str) -> bool:
        """Tell whether a model is measured."""
        return self.models is None or model in self.models


def open_speeds(
    path: Path, sizes: AbstractSizes, full: AbstractSizes, say: Say, **header: Any
) -> Result:
    """Open a result file of speeds; at other sizes than the full ones they are scaled down.

    A cell that the file has already, from the same machine and commit, is not measured again.

    Raises:
        UserError: if the file cannot be written or continued.
    """
    is_full = replace(sizes, models=None) == full
    names = Header(kind="speed", how="other hardware" if is_full else "scaled down", **header)
    return Result(path, names, origin(torch.device(sizes.device)), say)


def as_measured(result: Result) -> Measurement | None:
    """Return what was measured, as numbers of this run; None if none was wanted."""
    return replace(read_result(result.path), source="") if result.entries else None


def run_speeds(
    description: str,
    measurers: Measurers,
    full: AbstractSizes,
    dry: AbstractSizes,
    models: Sequence[str],
) -> int:
    """Run a script that measures a paper's speeds, one after another; see `run_script`.

    Its `--models` takes names of measurers, of models, or both.
    """
    models = tuple(dict.fromkeys(models))

    def measure(options: Options) -> None:
        chosen = tuple(name for name in options.models if name in models)
        sizes = replace(dry if options.dry_run else full, models=chosen or None)
        names = [name for name in options.models if name in measurers]
        for name in names or measurers:
            measurers[name](sizes, options.out, say)

    return run_script(measure, description, (*measurers, *models))
