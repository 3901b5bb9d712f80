"""Checkpoints that survive a kill at any moment and can be read by any number of processes.

A checkpoint is a folder `step-N`. It appears by one rename, after all its files are on disk:

    state/process-R.safetensors  the weights and AdamW moments that process R held
    process-R.json               random state and data position of process R
    index.json                   the pieces that make up each tensor, with their checksums
    checkpoint.json              the step, the processes, each file's size and the checksums of the
                                 JSON files; written last

Nothing is pickled, so reading a checkpoint cannot run code. Checksums cover every byte: a damaged
checkpoint is skipped, and the one before it is used.
"""

import base64
import json
import logging
import os
import re
import secrets
import shutil
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mezzo_core.errors import UserError, printable
from mezzo_core.files import read_json, remove, write_whole
from mezzo_core.train.distributed import World
from mezzo_core.train.shards import (
    DamagedError,
    Index,
    check_index,
    index_from_json,
    index_to_json,
    named_tensors,
    read_tensors,
    shard_name,
    write_shard,
)

MARKER = "checkpoint.json"
INDEX = "index.json"
_COMPLETE = re.compile(r"step-(0|[1-9][0-9]{0,14})")
_SCRATCH = re.compile(r"\.step-[0-9]+\.[0-9a-f]{16}")
# Names of the files in a checkpoint, in the current format or the one before it.
_OURS = re.compile(
    r"(checkpoint|index|process-[0-9]+)\.json"
    r"|state(/process-[0-9]+\.safetensors|/__[0-9]+_[0-9]+\.distcp|/\.metadata)?"
)

logger = logging.getLogger(__name__)


class Resumed(NamedTuple):
    """The position in training that a checkpoint was loaded from."""

    step: int
    """Optimizer steps done."""
    data: dict[str, Any]
    """This process's position in the data."""


class Checkpoints:
    """The checkpoints of one run: `save` adds one, `load` reads the newest undamaged one."""

    def __init__(self, folder: Path, world: World, keep: int) -> None:
        self.folder = folder
        self.world = world
        self.keep = keep
        self._identity = _identity(folder.parent)
        self._damaged: set[Path] = set()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: dict[str, Any],
    ) -> None:
        """Save the state after `step` steps, then remove all but the `keep` newest checkpoints.

        Raises:
            UserError: if it cannot be written, in which case earlier checkpoints are intact; or if
                the run's folder was removed, renamed or emptied since the run began.
        """
        # All processes write into one folder. Its name is random, so that nobody can create it, or
        # a link of that name, beforehand.
        token = self.world.each(lambda: secrets.token_hex(8))[0]
        scratch = self.folder / f".step-{step}.{token}"
        first = self.world.is_first
        try:
            self.world.each(lambda: self._make_scratch(scratch) if first else None)
            parts = self.world.each(lambda: self._write_part(scratch, model, optimizer, data))
            self.world.each(lambda: self._complete(scratch, step, parts) if first else None)
        except OSError as error:
            raise UserError(
                f"cannot save the checkpoint of step {step} in {self.folder} "
                f"({_reason(error)}); {self.describe_newest()}"
            ) from error
        finally:  # also after an interruption (Ctrl-C): no half-written checkpoint stays
            if first:
                shutil.rmtree(scratch, ignore_errors=True)
        self._damaged.discard(self.folder / f"step-{step}")

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Resumed | None:
        """Read the newest undamaged checkpoint into the model, the optimizer and torch's RNGs.

        It may have been saved by another number of processes. Damaged checkpoints are skipped, with
        a warning that names the damaged file.

        Returns:
            The steps done and the position in the data; None if there is no checkpoint.

        Raises:
            UserError: if all checkpoints are damaged, or the newest undamaged one belongs to
                another model or an older version; the model's weights are then undefined. Or if
                there is none, but a trained model, which is saved after a checkpoint.
        """
        damages: list[str] = []
        for step, folder in reversed(self.world.each(self._finished)[0]):
            try:
                found = self.world.each(partial(self._read, step, folder, model, optimizer))
            except DamagedError as error:
                self._damaged.add(folder)
                damages.append(_reason(error))
                continue
            except UserError as error:
                raise UserError(f"cannot resume from {folder}: {_reason(error)}") from error
            if self.world.is_first:
                for damage in damages:
                    logger.warning("a damaged checkpoint: %s; resuming from %s", damage, folder)
            for state in optimizer.state.values():
                state["step"].fill_(step)
            return Resumed(step, found[self.world.rank])
        if damages:
            raise UserError(
                f"no checkpoint in {self.folder} can be read ({damages[0]}): put back a copy, "
                "start over with --fresh, or train into another folder"
            )
        if self.world.each((self.folder.parent / "model").exists)[0]:
            raise UserError(
                f"{self.folder.parent} holds a trained model, but no checkpoint to go on from: put "
                "back a copy, train the model further in another folder by --init-from, or start "
                "over with --fresh, which removes it"
            )
        return None

    def newest(self) -> Path | None:
        """Return the folder of the newest complete checkpoint, or None."""
        for step, folder in reversed(self._finished()):
            try:
                _read_marker(folder, step)
            except UserError:
                continue
            if folder not in self._damaged:
                return folder
        return None

    def describe_newest(self) -> str:
        """Say in words where a run could resume."""
        run = self.folder.parent
        if self._is_in_place():
            newest, lost = self.newest(), ""
        else:
            lost = f"{run} was removed or renamed while its run trained; "
            beside = [path for path in _entries(run.parent) if _identity(path) == self._identity]
            if not beside:
                return f"{lost}it is not beside its old name"
            newest = Checkpoints(beside[0] / self.folder.name, self.world, self.keep).newest()
        return lost + (
            "there is no checkpoint yet" if newest is None else f"the last checkpoint is {newest}"
        )

    def _is_in_place(self) -> bool:
        """Tell whether the run's folder is the one that it began in."""
        return _identity(self.folder.parent) == self._identity

    def _finished(self) -> list[tuple[int, Path]]:
        """Return the steps and folders of all checkpoints that were completed, in step order."""
        if not self.folder.is_dir():
            return []
        found = [(_COMPLETE.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())

    def _make_scratch(self, scratch: Path) -> None:
        """Create the folder that will become `step-N`, and remove those that killed runs left."""
        if not self._is_in_place():  # another run may have its name now
            raise UserError(f"the run cannot go on: {self.describe_newest()}")
        if not (self.folder.parent / "config.json").exists():  # `rm -rf run/*` leaves the folder
            raise UserError(
                f"the run cannot go on: {self.folder.parent} lost its config.json while its run "
                f"trained; {self.describe_newest()}"
            )
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.iterdir():
            if _SCRATCH.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
        (scratch / "state").mkdir(parents=True)

    def _write_part(
        self,
        scratch: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: dict[str, Any],
    ) -> "_Part":
        rank = self.world.rank
        path = scratch / shard_name(rank)
        index = write_shard(path, named_tensors(model, optimizer), rank)
        states = {"cpu": torch.get_rng_state()}
        if self.world.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.world.device)
        rng = {
            name: base64.b64encode(state.numpy().tobytes()).decode()
            for name, state in states.items()
        }
        name = f"process-{rank}.json"
        written = _write_json(scratch / name, {"rng": rng, "data": data})
        return _Part(index, {shard_name(rank): {"bytes": path.stat().st_size}, name: written})

    def _complete(self, scratch: Path, step: int, parts: "list[_Part]") -> None:
        files = {name: record for part in parts for name, record in part.files.items()}
        index = index_to_json([part.tensors for part in parts])
        files[INDEX] = _write_json(scratch / INDEX, index)
        _write_json(scratch / MARKER, {"step": step, "processes": len(parts), "files": files})
        _sync(scratch / "state")
        _sync(scratch)
        final = self.folder / f"step-{step}"
        if final.is_dir():  # it is damaged, or this step would not have been repeated
            if not _is_ours(final):
                raise FileExistsError(f"{final} is there and is no checkpoint")
            remove(final)
        scratch.rename(final)
        _sync(self.folder)
        _sync(self.folder.parent)
        past = [folder for number, folder in self._finished() if number <= step]
        kept = [folder for folder in past if folder not in self._damaged or folder == final]
        for old in past:
            if old not in kept[-self.keep :] and _is_ours(old):
                remove(old)

    def _read(
        self, step: int, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Read one checkpoint and return this process's position in the data."""
        processes, checksums = _read_marker(folder, step)
        tensors = named_tensors(model, optimizer)
        index = index_from_json(_read_checked(folder / INDEX, checksums))
        check_index(index, tensors, processes)
        # If another number of processes saved it, every process reads the first one's file.
        path = folder / f"process-{self.world.rank if processes == self.world.size else 0}.json"
        record = _read_checked(path, checksums)
        data, rng = record.get("data"), record.get("rng")
        if not isinstance(data, dict) or not isinstance(rng, dict):
            raise DamagedError(f"{path} does not hold a random state and a position in the data")
        if data and processes != self.world.size:
            raise UserError(
                f"it was saved by {processes} processes that read a stream: resume with as many, "
                f"not {self.world.size}"
            )
        read_tensors(folder, index, tensors)
        try:
            torch.set_rng_state(_rng_state(rng["cpu"]))
            if "cuda" in rng and self.world.device.type == "cuda":
                torch.cuda.set_rng_state(_rng_state(rng["cuda"]), self.world.device)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DamagedError(f"{path} holds no random state ({error})") from error
        return data


class _Part(NamedTuple):
    """The part that one process wrote: its tensors' index, and its files' sizes and checksums."""

    tensors: Index
    files: dict[str, dict[str, int]]


def _read_marker(folder: Path, step: int) -> tuple[int, dict[str, int]]:
    """Return how many processes saved a checkpoint, and the checksums of its JSON files.

    Raises:
        DamagedError: if the marker is damaged, or a file that it lists is missing or too short.
        UserError: if the checkpoint is of an older version.
    """
    path = folder / MARKER
    marker = _read_json(path)
    processes, files = marker.get("processes"), marker.get("files")
    if not isinstance(files, dict) or type(processes) is not int or processes < 1:
        raise DamagedError(f"{path} does not say how many processes saved which files")
    if "state/.metadata" in files:
        raise UserError(
            "it was written by an older version, in another format: remove it, or start over "
            "with --fresh"
        )
    if type(marker.get("step")) is not int or marker["step"] != step:
        raise DamagedError(f"{path} is not that of step {step}")
    # The names are built here and only compared: a name read from the file could leave the folder.
    if len(files) != 2 * processes + 1:
        raise DamagedError(f"{path} does not list the files of its processes")
    checksums = {}
    jsons = [INDEX, *(f"process-{rank}.json" for rank in range(processes))]
    for name in [*jsons, *(shard_name(rank) for rank in range(processes))]:
        record, known = files.get(name), {"bytes", "crc32"} if name in jsons else {"bytes"}
        if not isinstance(record, dict) or record.keys() != known:
            raise DamagedError(f"{path} does not describe {name}")
        if not all(type(number) is int for number in record.values()):
            raise DamagedError(f"{path} does not describe {name} in whole numbers")
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise DamagedError(f"{folder / name}: {error.strerror}") from error
        if size != record["bytes"]:
            raise DamagedError(f"{folder / name} has {size} bytes, not those that {MARKER} says")
        if name in jsons:
            checksums[name] = record["crc32"]
    return processes, checksums


def _read_checked(path: Path, checksums: dict[str, int]) -> dict[str, Any]:
    found = _read_json(path)
    if zlib.crc32(path.read_bytes()) != checksums[path.name]:
        raise DamagedError(f"{path} has not the checksum that {MARKER} says")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except UserError as error:
        raise DamagedError(str(error)) from error


def _write_json(path: Path, value: dict[str, Any]) -> dict[str, int]:
    """Write plain JSON and return its size and checksum."""
    text = json.dumps(value)
    write_whole(path, text)
    return {"bytes": len(text.encode()), "crc32": zlib.crc32(text.encode())}


def _rng_state(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return what stays the same when a folder is renamed; None if it is not there.

    The run's lock is open in the folder, so no other folder gets this number before the run ends.
    """
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _is_ours(folder: Path) -> bool:
    """Tell whether a folder holds only files with names of a checkpoint's files."""
    return all(_OURS.fullmatch(path.relative_to(folder).as_posix()) for path in folder.rglob("*"))


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk, since syncing its files does not do so."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    """Return the cause in one line."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(printable(words).split())[:400]
