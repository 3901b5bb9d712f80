"""A paper's speeds: the sizes at which they are measured, their files, and the `bench` command."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mezzo_core.errors import UserError, nearest
from mezzo_core.reproduction.measurement import Measurement, read_result
from mezzo_core.reproduction.result_file import Say, say
from mezzo_core.reproduction.runner import Job, fill

Make = Callable[[Any], tuple[Mapping[str, Any], Sequence[Job]]]
"""Takes sizes; returns a file's title, setting, unit and what is better, and its jobs."""


@dataclass(frozen=True, kw_only=True)
class AbstractSizes:
    """The sizes that all papers have; a paper adds its own, whose defaults are the paper's."""

    device: str = "cuda"
    models: tuple[str, ...] | None = None  # those that are measured; None: all

    @property
    def dtype(self) -> str:
        """In which models and layers decode, in words."""
        return "bf16" if self.device == "cuda" else "float32"


@dataclass(frozen=True)
class Speeds:
    """What a paper times, and at which sizes."""

    makers: Mapping[str, Make]  # the lists of what is timed, by names
    full: AbstractSizes  # the paper's, for a GPU; at all others the result is scaled down
    dry: AbstractSizes  # take seconds
    cpu: AbstractSizes | None = None  # for a CPU; None: the dry ones
    prefix: str = "speed_"  # of the files' names, before those of the makers

    def measure(
        self, name: str, sizes: AbstractSizes, folder: Path, say: Say
    ) -> Measurement | None:
        """Time what is missing in a file, and return its content; None if it stays empty.

        Raises:
            UserError: if the file cannot be written or continued.
        """
        header, jobs = self.makers[name](sizes)
        is_full = replace(sizes, models=None) == self.full
        whole = {"kind": "speed", "how": "other hardware" if is_full else "scaled down", **header}
        path, device = folder / f"{self.prefix}{name}.json", torch.device(sizes.device)
        result = fill(path, whole, jobs, folder, device, models=sizes.models, say=say)
        return replace(read_result(path), source="") if result.entries else None

    def bench(
        self, device: torch.device, quick: bool, out: Path | None, only: Sequence[str] = ()
    ) -> None:
        """Do what a `bench` command does: time all at this machine's sizes (`quick`: at toy sizes).

        `out` keeps the result files; None keeps none. `only` names makers, models, or both; none
        means all.

        Raises:
            UserError: if a name is of none of them.
        """
        usual = self.full if device.type == "cuda" else self.cpu or self.dry
        sizes = replace(self.dry if quick else usual, device=device.type)
        jobs = [job for make in self.makers.values() for job in make(sizes)[1]]
        known = [*self.makers, *dict.fromkeys(c.model for job in jobs for c in job.cells)]
        for name in only:
            if name not in known:
                raise UserError(f"nothing that is timed is named {name!r}{nearest(name, known)}")
        models = tuple(name for name in only if name not in self.makers)
        if device.index is not None:
            torch.cuda.set_device(device)
        with TemporaryDirectory() as scratch:
            for name in [name for name in only if name in self.makers] or self.makers:
                self.measure(name, replace(sizes, models=models or None), out or Path(scratch), say)
