"""Checkpoints that a kill at any moment leaves usable, and that any number of processes can read.

A checkpoint is a folder `step-N` that appears by one rename, after everything in it is on disk:

    state/           weights and AdamW's moments (torch.distributed.checkpoint, one file a process)
    process-R.json   the random state of process R, and its position in the data
    checkpoint.json  the step and the size of every file; written last

What is not a tensor is JSON. Of torch's own format, tensors are read with `weights_only=True` and
the index through a list of the few classes that it holds, so a checkpoint cannot run code.
"""

import base64
import json
import os
import pickle
import re
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from mezzo_core.errors import UserError
from mezzo_core.train.distributed import World

MARKER = "checkpoint.json"
_COMPLETE = re.compile(r"step-(\d+)")
_INDEX_CLASSES = {
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
}


class Resumed(NamedTuple):
    """Where a checkpoint continues."""

    step: int
    """Steps done."""
    data: dict[str, Any]
    """This process's position in the data."""


class Checkpoints:
    """The checkpoints of one run: `save` adds one, `load` reads the newest that is complete."""

    def __init__(self, folder: Path, world: World, keep: int) -> None:
        self.folder = folder
        self.world = world
        self.keep = keep

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: dict[str, Any],
    ) -> None:
        """Save the state after `step` steps, then remove all but the `keep` newest checkpoints.

        Raises:
            UserError: if it cannot be written; the checkpoints of before are intact.
        """
        scratch = self.folder / f"step-{step}.tmp"
        try:
            self.world.first_only(lambda: _make_empty(scratch))
            with warnings.catch_warnings():
                # torch warns that one process is one process.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save(
                    _tensors(model, optimizer),
                    storage_writer=dcp.FileSystemWriter(scratch / "state"),
                )
            self._write_process(scratch, data)
            self.world.barrier()
            self.world.first_only(lambda: self._complete(scratch, step))
        except (OSError, CheckpointException, RuntimeError) as error:
            if self.world.is_first:
                shutil.rmtree(scratch, ignore_errors=True)
            raise UserError(
                f"cannot save the checkpoint of step {step} in {self.folder} "
                f"({_reason(error)}); {self.describe_newest()}"
            ) from error

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Resumed | None:
        """Read the newest complete checkpoint into the model, the optimizer and torch's RNGs.

        The number of processes may differ from the one that saved.

        Returns:
            The steps done and the data's position; None if there is no complete checkpoint.

        Raises:
            UserError: if the checkpoint is of another model, or damaged.
        """
        newest = self.newest()
        if newest is None:
            return None
        record = json.loads((newest / MARKER).read_text(encoding="utf-8"))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(_tensors(model, optimizer), storage_reader=_SafeReader(newest / "state"))
        except (OSError, CheckpointException, RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                f"cannot resume from {newest} ({_reason(error)}): it is damaged or holds another "
                "model; remove it to resume from the one before, or train into another folder"
            ) from error
        for state in optimizer.state.values():
            state["step"].fill_(record["step"])
        return Resumed(record["step"], self._read_process(newest, record["processes"]))

    def newest(self) -> Path | None:
        """Return the folder of the newest complete checkpoint, if there is one."""
        for _, folder in reversed(self._finished()):
            if _is_complete(folder):
                return folder
        return None

    def describe_newest(self) -> str:
        """Say in words where a run could resume."""
        newest = self.newest()
        return (
            "there is no checkpoint yet" if newest is None else f"the last checkpoint is {newest}"
        )

    def _finished(self) -> list[tuple[int, Path]]:
        if not self.folder.is_dir():
            return []
        found = [(_COMPLETE.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return sorted((int(match[1]), path) for match, path in found if match)

    def _complete(self, scratch: Path, step: int) -> None:
        files = {
            str(path.relative_to(scratch)): path.stat().st_size
            for path in sorted(scratch.rglob("*"))
            if path.is_file()
        }
        record = {"step": step, "processes": self.world.size, "files": files}
        _write(scratch / MARKER, json.dumps(record, indent=1))
        _sync(scratch / "state")
        _sync(scratch)
        final = self.folder / f"step-{step}"
        if final.exists():  # an incomplete one, else this step would not have been done again
            shutil.rmtree(final)
        scratch.rename(final)
        _sync(self.folder)
        for _, old in self._finished()[: -self.keep]:
            shutil.rmtree(old)
        for leftover in self.folder.glob("step-*.tmp"):
            shutil.rmtree(leftover)

    def _write_process(self, scratch: Path, data: dict[str, Any]) -> None:
        states = {"cpu": torch.get_rng_state()}
        if self.world.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.world.device)
        rng = {
            name: base64.b64encode(state.numpy().tobytes()).decode()
            for name, state in states.items()
        }
        path = scratch / f"process-{self.world.rank}.json"
        _write(path, json.dumps({"rng": rng, "data": data}))

    def _read_process(self, folder: Path, processes: int) -> dict[str, Any]:
        # With another number of processes, the first one's file stands for every process.
        rank = self.world.rank if processes == self.world.size else 0
        record = json.loads((folder / f"process-{rank}.json").read_text(encoding="utf-8"))
        if record["data"] and processes != self.world.size:
            raise UserError(
                f"{folder} was saved by {processes} processes that each read their own part of a "
                f"stream: resume with as many, not {self.world.size}"
            )
        for name, text in record["rng"].items():
            state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            if name == "cpu":
                torch.set_rng_state(state)
            elif self.world.device.type == "cuda":
                torch.cuda.set_rng_state(state, self.world.device)
        return record["data"]


class _SafeReader(dcp.FileSystemReader):
    """Reads the index, which torch pickles, through a list of the classes that it may name."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _INDEX_CLASSES:
            raise ValueError(f"its index names {module}.{name}, which no checkpoint of ours holds")
        return super().find_class(module, name)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return what is saved, each under its name; loading writes into the same tensors.

    AdamW's own step counters are left out: they are the checkpoint's step.
    """
    tensors = {f"model.{name}": value for name, value in _persistent(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if key != "step":
                tensors[f"optim.{name}.{key}"] = value
    return tensors


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    seen: dict[int, str] = {}
    # A tied weight has two names in the state; the first stands for both.
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if seen.setdefault(id(value), name) == name
    }


def _is_complete(folder: Path) -> bool:
    """Tell whether every file that the marker lists is there, in full."""
    try:
        files = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Put the names in a folder on disk, not the files alone."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """Return the cause in one line: torch wraps what each process raised in a report."""
    causes: list[BaseException] = [error]
    if isinstance(error, CheckpointException):
        causes = [failure[0] for failure in error.failures.values()] or causes
    for cause in causes:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    return " ".join(str(causes[0]).split())[:300]
