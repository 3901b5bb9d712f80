"""The folder of a run: which run it belongs to, its lock, and whether a run may use it."""

import json
import os
import re
import reprlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mezzo_core.config_json import to_json, with_defaults
from mezzo_core.data import SourceConfig
from mezzo_core.data.hub import HUB_PREFIX
from mezzo_core.data.texts import TextConfig, name_texts
from mezzo_core.errors import UserError
from mezzo_core.files import acquire, read_json, remove, remove_scratch, write_whole
from mezzo_core.nn.checkpoint import check_replaceable, weights_checksum
from mezzo_core.paths import check_writable
from mezzo_core.train.config import TrainConfig

# Fields that may change when a run is resumed: its length, its logging, and how it is computed.
# The model and the training data may not change.
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
        "cuda_graph",
        "activation_checkpointing",
        "shard",
        "context_parallel",
        "track",
        "data.skip_bad",
    }
)
# Fields that say where texts and the tokenizer are: these may move if the tokens are the same.
_PLACE = re.compile(r"data(\.text|\.texts\[\d+\])?\.(source|validation_source|tokenizer)")
_CONFIG, _CORPUS, _LOCK = "config.json", "corpus.json", ".mezzo.lock"
# The other files of a run, which starting over removes.
_WRITTEN = ("checkpoints", "model", "tensorboard", "log.jsonl", "log.csv", "loss.png", _CORPUS)
_START = "weights_crc32"  # in corpus.json: of the model that the run started from
_TYPE = f"{TrainConfig.__module__}:{TrainConfig.__name__}"


def check_folder(out: Path, config: TrainConfig, *, resume: bool, may_move: bool = False) -> None:
    """Check that this run may use a folder, without changing anything in it.

    A folder belongs to a run if its config.json has the type of a `TrainConfig`. A folder may also
    be used if it has no file with a name that a run writes, whatever other files it has.

    Args:
        out: folder of the run; it need not exist.
        config: configuration of the run that wants to use it.
        resume: whether to continue the run in the folder. That run must then have the same
            configuration, except for `CHANGEABLE` fields.
        may_move: whether its texts, its tokenizer and the model that it started from may be
            elsewhere now, if it has a checkpoint. Then `check_corpus` compares the tokens, once
            they are read.

    Raises:
        UserError: if the folder has files that may not be a run's, or holds a different run, or
            the model that this run starts from, or a user's file beside it, would be removed.
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
        found, may_move = with_defaults(found, config), may_move and _has_begun(out)
        if may_move and config.init_from not in (None, found["init_from"]):
            start = read_json(out / _CORPUS).get(_START)
            if start is not None and start == weights_checksum(config.init_from):
                found["init_from"] = config.init_from  # it has moved
        _refuse_another(out, found, to_json(config), may_move=may_move)
    elif config.init_from and Path(config.init_from).resolve() == (out / "model").resolve():
        raise UserError(
            f"starting over in {out} would remove the model that it is to start from: "
            "train into another folder"
        )
    check_replaceable(out / "model")


def _has_begun(out: Path) -> bool:
    """Tell whether a run can go on in a folder, and what it was trained on is noted there.

    Older versions wrote no corpus.json.
    """
    return (out / _CORPUS).exists() and any((out / "checkpoints").glob("step-*"))


@contextmanager
def hold_folder(out: Path) -> Iterator[None]:
    """Create the folder and lock it against other runs; a kill releases the lock as well.

    Raises:
        UserError: if another run has locked the folder, or it cannot be created.
    """
    path = out / _LOCK
    check_writable(out, is_folder=True)
    with _explained(out):
        out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    holder = _holder(path)  # read first: an older filelock empties the file as it tries
    try:
        with _explained(out):
            acquire(lock)
    except Timeout:
        raise UserError(
            f"{out} is in use by {holder}: wait until it ends, or train into another folder"
        ) from None
    try:
        with suppress(OSError):  # the lock works without the name of its holder
            _sign(path)
        yield
    finally:
        lock.release()


def claim_folder(out: Path, config: TrainConfig, fingerprint: str, *, resume: bool) -> None:
    """Write this run's files into the folder. Call it once the folder is locked and all is built.

    config.json gets the configuration, and corpus.json the fingerprint of the data. Without
    `resume`, the files of the run that was there are removed.

    Raises:
        UserError: as in `check_folder`, or if the folder cannot be written.
    """
    check_folder(out, config, resume=resume, may_move=True)
    with _explained(out):
        noted = {}
        if resume and _has_begun(out):
            with suppress(UserError):  # a damaged file, which `new_data` lets be replaced
                noted = read_json(out / _CORPUS)
        if not noted and config.init_from is not None:
            noted[_START] = weights_checksum(config.init_from)
        noted["fingerprint"] = fingerprint
        if not resume:
            _remove_run(out)
        for name in (_CONFIG, _CORPUS, "log.jsonl", "log.csv"):
            remove_scratch(out / name)
        with naming(out / _CONFIG):
            write_whole(out / _CONFIG, json.dumps(to_json(config), indent=2) + "\n")
        with naming(out / _CORPUS):
            write_whole(out / _CORPUS, json.dumps(noted) + "\n")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's path to an OSError, since the error of a full disk does not name it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def in_words(error: OSError) -> str:
    """Return the error's message and path, without its number."""
    if error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except Timeout:  # an OSError too, but it means that another run has the lock
        raise
    except OSError as error:
        raise UserError(f"cannot keep a run in {out}: {in_words(error)}") from error


def _sign(path: Path) -> None:
    """Write this process into the lock file, so that another run can say who has the lock."""
    descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 (a descriptor)
        if os.fstat(descriptor).st_nlink == 1:  # a hard link could be another file of the user
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}")


def _holder(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        signed = re.fullmatch(rb"process \d+ on [\w.-]+", file.read(300))
        if signed:
            return f"another run ({signed[0].decode()})"
    return "another run"


def _refuse_another(
    out: Path, found: dict[str, Any], wanted: dict[str, Any], *, may_move: bool
) -> None:
    differences = _differences(found, wanted, may_move=may_move)
    if differences:
        shown = "; ".join(differences[:3])
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(
            f"{out} holds a run of another configuration ({shown}{more}): "
            "train into another folder, or start over (train --fresh), which removes that run"
        )


def _differences(found: Any, wanted: Any, name: str = "", *, may_move: bool = False) -> list[str]:
    """List the differences between two JSON values, one phrase each, but for what may change."""
    if name in CHANGEABLE or (may_move and _is_place(name, found, wanted)):
        return []
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = dict.fromkeys([*found, *wanted])
        if found.get("streaming") is True and wanted.get("streaming") is True:
            keys.pop("validation_fraction", None)  # a stream does not look at it
        # A switch that is off here and missing there is of a newer version: it was off there too.
        found = {**{key: False for key in keys if wanted.get(key) is False}, **found}
        pairs = [(f"{name}.{key}".lstrip("."), found.get(key), wanted.get(key)) for key in keys]
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(found, wanted, strict=True))]
    elif found == wanted:
        return []
    elif isinstance(found, list) and isinstance(wanted, list):
        return [f"{name} has {len(found)} items there, {len(wanted)} here"]
    else:  # shortened, because the value in the file may be anything
        return [f"{name} is {reprlib.repr(found)} there, {reprlib.repr(wanted)} here"]
    lists = (_differences(old, new, key, may_move=may_move) for key, old, new in pairs)
    return [phrase for phrases in lists for phrase in phrases]


def _is_place(name: str, *values: Any) -> bool:
    """Tell whether a field says where something is that may be elsewhere now.

    So may a text or a tokenizer, unless it is the hub's: the fingerprint shows whether it is the
    same.
    """
    told = all(isinstance(value, str) and not value.startswith(HUB_PREFIX) for value in values)
    return told and _PLACE.fullmatch(name) is not None


def check_corpus(out: Path, data: SourceConfig, fingerprint: str) -> None:
    """Check that the run in a folder was trained on this data.

    Raises:
        UserError: if the fingerprint of its data was another one.
    """
    if not (out / _CORPUS).exists():  # older versions wrote no corpus.json
        return
    found = read_json(out / _CORPUS).get("fingerprint")
    if found != fingerprint:
        source = name_texts(data) if isinstance(data, TextConfig) else str(data)
        places = _differences(read_json(out / _CONFIG).get("data"), to_json(data), "data")
        there = f" ({'; '.join(places)})" if places else ""
        advice = (
            "train into another folder"
            if places
            else "go on with the new one by --new-data (new_data=True)"
        )
        raise UserError(
            f"the tokens of {source} are not those that the run in {out} was trained on{there}: "
            f"its text or its tokenizer has changed. Restore it, or {advice}"
        )


def _remove_run(out: Path) -> None:
    """Remove a run's files. A user's own files beside the checkpoints stay."""
    checkpoints = out / "checkpoints"
    others = (out / name for name in _WRITTEN if name != checkpoints.name)
    for path in (*checkpoints.glob("step-*"), *checkpoints.glob(".step-*"), *others):
        remove(path)
    with suppress(OSError):  # where other files are left
        checkpoints.rmdir()
