"""Saves and loads models as folders with model.safetensors and config.json; nothing is pickled."""

import json
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mezzo_core.config_json import from_json, to_json
from mezzo_core.errors import UserError
from mezzo_core.files import read_json
from mezzo_core.libraries import first_line, import_library
from mezzo_core.nn.lm import LM, LMConfig
from mezzo_core.nn.on_meta import build_on_meta
from mezzo_core.nn.sharded import check_whole

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
_DTYPES = ("F64", "F32", "BF16", "F16")


def save_model(
    model: LM,
    config: LMConfig,
    folder: str | Path,
    extra: dict[str, Any] | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the model to `folder`, replacing a model that was there.

    The files are written beside `folder` and renamed into place. So `load_model` always finds
    either the old model or the new one complete, even if the process is killed.

    Args:
        model: the model to save, or `torch.compile` of it. A weight with several names (a tied
            head) is stored once.
        config: the configuration that builds the model.
        folder: where to save it; created if needed, with its parents.
        extra: JSON values to store beside the configuration (a tokenizer's name, the step).
        weights: the full `state_dict` (`whole_weights`), if the model is sharded over processes.

    Raises:
        UserError: if `folder` holds other files than a model's, holds a model that another program
            wrote, or cannot be written; if the weights do not fit the configuration; or if
            safetensors is not installed.
        TypeError: if `extra` holds values that JSON does not have.
        ValueError: if `extra` holds NaN or infinity, or the model is sharded and `weights` is not
            given.
    """
    library = import_library("safetensors.torch", "train")
    folder = Path(folder).resolve()
    described: dict[str, Any] = {"config": to_json(config), "extra": extra or {}}
    json.dumps(described, allow_nan=False)  # raises before any work
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper renames all weights
    if weights is None:
        check_whole(model)
    source = model.state_dict() if weights is None else weights
    aliases = _aliases(model)
    stored = {
        name: weight.detach().contiguous() for name, weight in source.items() if name not in aliases
    }
    where = f"cannot save the model in {folder}"
    built = build_on_meta(config, where)
    expected = {name: w for name, w in built.state_dict().items() if name not in _aliases(built)}
    check_weights(where, expected, {name: weight.shape for name, weight in stored.items()})
    check_replaceable(folder)
    new = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        new.mkdir()
        try:
            library.save_file(stored, new / WEIGHTS)
            # The library lets only the owner read it: take the folder's mode, which follows umask.
            (new / WEIGHTS).chmod(new.stat().st_mode & 0o666)
            described["weights_crc32"] = _checksum(new / WEIGHTS)
            (new / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
            _put_in_place(new, folder)
        finally:
            _remove(new)
    except (OSError, safetensor_error()) as error:
        raise UserError(f"cannot save the model in {folder}: {error}") from error


def load_model(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    allow_packages: Sequence[str] = (),
) -> tuple[LM, LMConfig, dict[str, Any]]:
    """Load a model that `save_model` wrote.

    Weights keep the dtype in which they were saved. No random numbers are drawn.

    Args:
        folder: the model's folder.
        device: the device of the weights.
        allow_packages: packages besides mezzo's own whose mixers the configuration may name.

    Returns:
        The model in evaluation mode, its configuration, and the `extra` given to `save_model`.

    Raises:
        UserError: if a file is missing or damaged, the configuration names an unknown type or
            field, the weights do not fit the configured model, or there is no such device.
    """
    asked, folder = folder, _existing(Path(folder).resolve())
    description = _read_description(folder / CONFIG)
    config = _read_config(folder / CONFIG, description, allow_packages)
    device = _usable(device)
    weights: dict[str, Tensor] | UserError
    try:
        model = build_on_meta(config, folder / CONFIG, num_weights=count_weights(folder))
        aliases = _aliases(model)
        expected = {n: t for n, t in model.state_dict().items() if n not in aliases}
        weights = _read_weights(folder / WEIGHTS, expected, description, device)
    except UserError as error:
        weights = error
    # If a run has saved a new model meanwhile, the weights may be the new ones and the rest old.
    if _read_description(_existing(Path(asked).resolve()) / CONFIG) != description:
        del weights  # two sets of weights might not fit into memory
        return load_model(asked, device=device, allow_packages=allow_packages)
    if isinstance(weights, UserError):
        raise weights
    shared = {name: weights[first] for name, first in aliases.items()}
    model.load_state_dict({**weights, **shared}, assign=True)
    for name, first in aliases.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, model.get_parameter(first))
    unsaved = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if unsaved:
        raise UserError(f"{folder}: the model has buffers that are never saved: {unsaved}")
    return model.eval(), config, description["extra"]


def describe_model(
    folder: str | Path, *, allow_packages: Sequence[str] = ()
) -> tuple[LMConfig, dict[str, Any]]:
    """Read the configuration and the `extra` of a saved model, without its weights.

    Raises:
        UserError: as in `load_model`, except for errors of the weights.
    """
    path = _existing(Path(folder).resolve()) / CONFIG
    description = _read_description(path)
    return _read_config(path, description, allow_packages), description["extra"]


def find_model(run: str | Path) -> Path:
    """Return the folder of a run's model, for `load_model`: RUN/model, or RUN itself.

    Raises:
        UserError: if neither folder holds a model.
    """
    for folder in (Path(run) / "model", Path(run)):
        if all((_existing(folder.resolve()) / name).is_file() for name in (CONFIG, WEIGHTS)):
            return folder
    raise UserError(f"{run} holds no trained model (no model/{CONFIG}, model/{WEIGHTS})")


def count_weights(folder: Path) -> int:
    """Return how many weights a saved model has; only the head of their file is read.

    Raises:
        UserError: if the file is missing or damaged.
    """
    with open_weights(_existing(folder.resolve()) / WEIGHTS) as file:
        return len(file.keys())


@torch.no_grad()
def copy_weights(folder: str | Path, model: LM) -> None:
    """Overwrite a model's weights with saved ones. The model keeps its device and its dtype.

    Its configuration may differ from the saved one in fields that change no weight's name or shape.

    Raises:
        UserError: if a file is missing or damaged, or the weights do not fit the model, which is
            then unchanged.
    """
    folder, aliases = _existing(Path(folder).resolve()), _aliases(model)
    mine = {name: w for name, w in model.state_dict().items() if name not in aliases}
    weights = _read_weights(folder / WEIGHTS, mine, _read_description(folder / CONFIG), "cpu")
    for name, weight in mine.items():
        weight.copy_(weights[name])


def weights_checksum(folder: str | Path) -> int | None:
    """Return the checksum of the weights in a saved model's config.json; None without one."""
    description = _read_description(_existing(Path(folder).resolve()) / CONFIG)
    checksum: int | None = description["weights_crc32"]
    return checksum


def current_name(name: str) -> str:
    """Return a weight's current name: models saved before version 0.2 had no `stack` in names."""
    return f"stack.{name}" if name.startswith("blocks.") else name


def check_weights(
    where: str | Path, expected: Mapping[str, Tensor], got: Mapping[str, Sequence[int]]
) -> None:
    """Check that a file's weights have the names and shapes of a model's.

    Args:
        where: the beginning of the message, such as the file.
        expected: the weights of the configured model.
        got: the shape of each weight in the file.

    Raises:
        UserError: if names or shapes differ; the message lists them.
    """
    missing = [name for name in expected if name not in got]
    unexpected = [name for name in got if name not in expected]
    reshaped = [
        f"{name} is {tuple(got[name])}, the configuration says {tuple(expected[name].shape)}"
        for name in expected
        if name in got and tuple(got[name]) != tuple(expected[name].shape)
    ]
    problems = []
    if missing:
        problems.append(f"missing weights {_list(missing)}")
    if unexpected:
        problems.append(f"unexpected weights {_list(unexpected)}")
    if reshaped:
        problems.append(_list(reshaped))
    if problems:
        raise UserError(f"{where}: {'; '.join(problems)}")


def _aliases(model: nn.Module) -> dict[str, str]:
    """Map every other name of a shared parameter to its first name."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(parameter), name)
        if kept != name:
            aliases[name] = kept
    return aliases


def _previous(folder: Path) -> Path:
    """Return where the old model waits while the new one is moved into place."""
    return folder.with_name(f".{folder.name}.previous")


def _put_in_place(new: Path, folder: Path) -> None:
    # A folder with files in it cannot be replaced by a rename, so the old model is moved away
    # first. If the process dies between the two renames, load_model finds the old model there.
    previous = _previous(folder)
    if folder.exists():
        _remove(previous)
        folder.rename(previous)
    new.rename(folder)
    _remove(previous)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed calls of `save_model` left beside this folder."""
    ours = re.compile(re.escape(f".{folder.name}.") + "[0-9a-f]{16}")
    with suppress(OSError):
        for path in [path for path in folder.parent.iterdir() if ours.fullmatch(path.name)]:
            _remove(path)


def _remove(folder: Path) -> None:
    """Remove a model's files, and their folder unless it holds other files."""
    if folder.is_symlink():
        return
    with suppress(OSError):
        # safetensors first writes to a file named .tmpXXXXXX.
        for path in [*folder.glob(".tmp??????"), folder / WEIGHTS, folder / CONFIG]:
            path.unlink(missing_ok=True)
        folder.rmdir()


def _existing(folder: Path) -> Path:
    return folder if folder.exists() or not _previous(folder).exists() else _previous(folder)


def check_replaceable(folder: Path) -> None:
    """Raise a UserError if saving a model there would remove files that do not belong to one."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"cannot save the model in {folder}: it is a file")
    if folder.is_dir():
        foreign = sorted({path.name for path in folder.iterdir()} - {WEIGHTS, CONFIG})
        if foreign:
            raise UserError(
                f"cannot save the model in {folder}: it holds {_list(foreign)}; move this elsewhere"
            )
        if _is_foreign(folder / CONFIG):
            raise UserError(f"cannot save the model in {folder}: it holds a model of another kind")


def _is_foreign(path: Path) -> bool:
    """Tell whether this config.json was written by another program, as those on the hub are."""
    try:
        return "config" not in read_json(path)
    except UserError:  # missing or damaged: saving replaces it
        return False


def _read_description(path: Path) -> dict[str, Any]:
    """Read config.json: its "config", "extra" and "weights_crc32" (None if that is missing)."""
    if not path.is_file():
        raise UserError(f"no model in {path.parent}: {path.name} is missing")
    found = {"extra": {}, "weights_crc32": None, **read_json(path)}
    if "config" not in found:
        hint = ": make it a run first, by import" if "model_type" in found else ""
        if (path.parent / "model" / CONFIG).is_file():
            hint = f": give {path.parent / 'model'}"
        raise UserError(f'{path} is no description of a model: it has no "config"{hint}')
    if not isinstance(found["extra"], dict):
        raise UserError(f'{path}: "extra" must be a JSON object')
    if type(found["weights_crc32"]) not in (int, type(None)):
        raise UserError(f'{path}: "weights_crc32" must be a whole number')
    return found


def _read_config(path: Path, description: dict[str, Any], allow: Sequence[str]) -> LMConfig:
    try:
        config = from_json(description["config"], allow)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if not isinstance(config, LMConfig):
        raise UserError(f"{path}: config must be LMConfig, got {type(config).__name__}")
    return config


def _read_weights(
    path: Path,
    expected: Mapping[str, Tensor],
    description: dict[str, Any],
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Read the weights; names, shapes and checksum are checked before memory is allocated."""
    library = import_library("safetensors.torch", "train")
    with open_weights(path) as file:
        stored = {current_name(name): file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        check_weights(path, expected, {n: part.get_shape() for n, part in stored.items()})
        for name, part in stored.items():
            if part.get_dtype() not in _DTYPES:
                raise UserError(
                    f"{path}: {name} must be of {', '.join(_DTYPES)}, got {part.get_dtype()}"
                )
    try:
        if description["weights_crc32"] not in (None, _checksum(path)):
            raise UserError(f"{path} is damaged: its checksum is not that of what was saved")
        weights = library.load_file(path, device=str(device))
        return {current_name(name): weight for name, weight in weights.items()}
    except (OSError, safetensor_error()) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """Open a safetensors file; its errors become a UserError of one line."""
    library = import_library("safetensors", "train")
    if not path.is_file():  # on a pipe the library would wait forever
        raise UserError(f"no model in {path.parent}: {path.name} is missing, or no file")
    try:
        with library.safe_open(path, framework="pt") as file:
            yield file
    except (OSError, library.SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _usable(device: torch.device | str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(
            f"device {str(device)!r} cannot be used here: {first_line(error)}"
        ) from error


def safetensor_error() -> type[Exception]:
    """Return the exception that safetensors raises for a damaged file or a failed write."""
    return import_library("safetensors", "train").SafetensorError


def _list(items: Iterable[str]) -> str:
    names = list(items)
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
