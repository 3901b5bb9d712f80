"""The folder of a run: whose it is, who holds it, and whether a run may go on in it."""

import json
import os
import re
import reprlib
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mezzo_core.config_json import to_json
from mezzo_core.data import DataConfig, SourceConfig
from mezzo_core.errors import UserError
from mezzo_core.files import read_json, write_whole
from mezzo_core.train.config import TrainConfig

# What may change when a run goes on: how long, how it is watched and how it is computed, never
# what is learned from what.
CHANGEABLE = frozenset(
    {
        "steps",
        "eval_every",
        "eval_batches",
        "stop_at_accuracy",
        "checkpoint_every",
        "keep_checkpoints",
        "micro_batch_size",
        "compile",
        "track",
    }
)
_CONFIG, _CORPUS, _LOCK = "config.json", "corpus.json", ".mezzo.lock"
# What else a run writes, and starting over removes. Packed tokens stay: they are of any run.
_WRITTEN = ("checkpoints", "model", "tensorboard", "log.jsonl", "loss.png", _CORPUS)
_TYPE = f"{TrainConfig.__module__}:{TrainConfig.__name__}"


def check_folder(out: Path, config: TrainConfig, *, resume: bool) -> None:
    """Refuse a folder that this run may not use; change nothing.

    A folder is a run's if its config.json is one of ours. A folder that has none of the names
    that a run writes may be used too, whatever else is in it.

    Args:
        out: of the run; it need not be there.
        config: of the run that wants to use it.
        resume: whether to go on with the run that is there, which must then be of the same
            configuration (`CHANGEABLE` fields aside).

    Raises:
        UserError: if anything there is not known to be a run's own, or another run is there.
    """
    names = [name for name in (_CONFIG, *_WRITTEN) if os.path.lexists(out / name)]
    for name in (*names, _LOCK):
        if (out / name).is_symlink():
            raise UserError(
                f"{out / name} is a symbolic link, and a run writes in its own folder alone: "
                f"remove the link (all of {out} may be one), or train into another folder"
            )
    if not names:
        return
    try:
        found = read_json(out / _CONFIG)
    except UserError as error:
        raise UserError(
            f"{out} holds {names[0]}, but it is not known to be a run's ({error}): "
            "train into another folder"
        ) from error
    if found.get("type") != _TYPE:
        raise UserError(
            f"{out} holds {names[0]}, but its {_CONFIG} is not a training run's: "
            "train into another folder"
        )
    if resume:
        _refuse_another(out, found, to_json(config))


@contextmanager
def hold_folder(out: Path) -> Iterator[None]:
    """Make the folder, and keep other runs out of it until the end, even if that is a kill.

    Raises:
        UserError: if another run holds it, or it cannot be made.
    """
    path = out / _LOCK
    with _explained(out):
        out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    try:
        with _explained(out):
            lock.acquire()
    except Timeout:
        raise UserError(
            f"{out} is in use by {_holder(path)}: wait until it ends, or train into another folder"
        ) from None
    try:
        with suppress(OSError):  # who holds it is a courtesy
            _sign(path)
        yield
    finally:
        lock.release()


def claim_folder(
    out: Path,
    config: TrainConfig,
    fingerprint: str,
    *,
    resume: bool,
    has_checkpoint: bool,
    new_data: bool,
) -> None:
    """Make the folder this run's: call it when the run is held and can start.

    Args:
        out: the folder.
        config: of the run, kept in config.json.
        fingerprint: of its corpus, kept in corpus.json.
        resume: go on with the run that is there; False removes what it wrote.
        has_checkpoint: whether there is something to go on from.
        new_data: go on even if the corpus is another.

    Raises:
        UserError: as `check_folder`; if the corpus is not the one that the checkpoint was trained
            on; if the folder cannot be written.
    """
    check_folder(out, config, resume=resume)
    if resume and has_checkpoint and not new_data:
        _refuse_other_corpus(out, config.data, fingerprint)
    with _explained(out):
        if not resume:
            _remove_run(out)
        with naming(out / _CONFIG):
            write_whole(out / _CONFIG, json.dumps(to_json(config), indent=2) + "\n")
        with naming(out / _CORPUS):
            write_whole(out / _CORPUS, json.dumps({"fingerprint": fingerprint}) + "\n")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError tell which file was written: a full disk does not say it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def in_words(error: OSError) -> str:
    """Return what failed and where, without the number of the error."""
    if error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except Timeout:
        raise
    except (OSError, NotImplementedError) as error:
        reason = in_words(error) if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot keep a run in {out}: {reason}") from error


def _sign(path: Path) -> None:
    """Write who holds the lock into its file, for the one who finds it held."""
    descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 (a descriptor)
        if os.fstat(descriptor).st_nlink == 1:  # else it is a file of somebody else, too
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}")


def _holder(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        signed = re.fullmatch(rb"process \d+ on [\w.-]+", file.read(300))
        if signed:
            return f"another run ({signed[0].decode()})"
    return "another run"


def _refuse_another(out: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    same = {name: wanted.get(name) for name in CHANGEABLE}
    differences = _differences({**found, **same}, {**wanted, **same})
    if differences:
        shown = "; ".join(differences[:3])
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(
            f"{out} holds a run of another configuration ({shown}{more}): "
            "train into another folder, or without resuming, which removes that run"
        )


def _differences(found: Any, wanted: Any, name: str = "") -> list[str]:
    """List what differs between two JSON values, each as one phrase."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = dict.fromkeys([*found, *wanted])
        pairs = [(f"{name}.{key}".lstrip("."), found.get(key), wanted.get(key)) for key in keys]
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(found, wanted, strict=True))]
    elif found == wanted:
        return []
    elif isinstance(found, list) and isinstance(wanted, list):
        return [f"{name} has {len(found)} items there, {len(wanted)} here"]
    else:  # shortened: what stands there may be anything
        return [f"{name} is {reprlib.repr(found)} there, {reprlib.repr(wanted)} here"]
    return [phrase for key, old, new in pairs for phrase in _differences(old, new, key)]


def _refuse_other_corpus(out: Path, data: SourceConfig, fingerprint: str) -> None:
    if not (out / _CORPUS).exists():  # a run of before the corpus was kept
        return
    found = read_json(out / _CORPUS).get("fingerprint")
    if found != fingerprint:
        source = repr(data.source) if isinstance(data, DataConfig) else str(data)
        raise UserError(
            f"the tokens of {source} are not those that the run in {out} was trained on: its "
            "text or its tokenizer has changed. Restore it, or go on with the new one by "
            "--new-data (new_data=True)"
        )


def _remove_run(out: Path) -> None:
    for name in _WRITTEN:
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
