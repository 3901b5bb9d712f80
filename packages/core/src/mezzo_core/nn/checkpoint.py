"""A model on disk: a folder with model.safetensors and config.json, nothing pickled."""

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mezzo_core.config_json import ALLOWED_PACKAGES, from_json, to_json
from mezzo_core.errors import UserError
from mezzo_core.nn.lm import LM, LMConfig

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def save_model(
    model: LM,
    config: LMConfig,
    folder: str | Path,
    extra: dict[str, Any] | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the model to `folder`, in place of a model that was there.

    The files are written beside `folder` and renamed into place, so at any moment, a kill included,
    `load_model` finds the old model or the new one, whole.

    Args:
        model: what to save. A weight under several names (a tied head) is stored once.
        config: what builds the model.
        folder: made if needed, with its parents.
        extra: plain JSON to keep beside the configuration (a tokenizer's name, the step).
        weights: the full `state_dict`, for a model whose own is sharded over processes.

    Raises:
        UserError: if `folder` holds anything that is no part of a model, or a model that another
            program wrote, or cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = Path(folder).resolve()
    description = json.dumps({"config": to_json(config), "extra": extra or {}}, indent=2)
    source = model.state_dict() if weights is None else weights
    aliases = _aliases(model)
    stored = {
        name: weight.detach().contiguous() for name, weight in source.items() if name not in aliases
    }
    _refuse_foreign(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            new = Path(scratch) / "new"
            new.mkdir()  # unlike the scratch folder's, its mode is the user's default
            save_file(stored, new / WEIGHTS)
            (new / CONFIG).write_text(description + "\n", encoding="utf-8")
            _put_in_place(new, folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot save the model in {folder}: {error}") from error


def load_model(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    allow_packages: Sequence[str] = (),
) -> tuple[LM, LMConfig, dict[str, Any]]:
    """Read what `save_model` wrote: the model in evaluation mode, its configuration, the extra.

    Weights keep the dtype that they were saved in. No random number is drawn.

    Args:
        folder: the model's folder.
        device: where the weights go.
        allow_packages: packages besides mezzo's own whose mixers the configuration may name.

    Raises:
        UserError: if a file is missing or damaged, the configuration names an unknown type or
            field, or the weights are not those of the configured model.
    """
    folder = _existing(Path(folder).resolve())
    config, extra = _read_config(folder / CONFIG, (*ALLOWED_PACKAGES, *allow_packages))
    try:
        with torch.device("meta"):
            model = config.build()
    except ValueError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    weights = _read_weights(folder / WEIGHTS, device)
    aliases = _aliases(model)
    expected = {n: t for n, t in model.state_dict().items() if n not in aliases}
    check_weights(folder / WEIGHTS, expected, weights)
    shared = {name: weights[first] for name, first in aliases.items()}
    model.load_state_dict({**weights, **shared}, assign=True)
    for name, first in aliases.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, model.get_parameter(first))
    unsaved = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if unsaved:
        raise UserError(f"{folder}: the model has buffers that are never saved: {unsaved}")
    return model.eval(), config, extra


def describe_model(
    folder: str | Path, *, allow_packages: Sequence[str] = ()
) -> tuple[LMConfig, dict[str, Any]]:
    """Read the configuration and the extra of a model that `save_model` wrote, not its weights.

    Raises:
        UserError: as `load_model`, for the description.
    """
    folder = _existing(Path(folder).resolve())
    return _read_config(folder / CONFIG, (*ALLOWED_PACKAGES, *allow_packages))


@torch.no_grad()
def copy_weights(folder: str | Path, model: LM) -> None:
    """Overwrite a model's weights with those that `save_model` wrote, on the model's own device.

    The model keeps its dtype. Its configuration may differ from the saved one in what no weight
    shows.

    Raises:
        UserError: if a file is missing or damaged, or the weights are those of another model; the
            model is as it was.
    """
    path = _existing(Path(folder).resolve()) / WEIGHTS
    weights, aliases = _read_weights(path, "cpu"), _aliases(model)
    mine = {name: w for name, w in model.state_dict().items() if name not in aliases}
    check_weights(path, mine, weights)
    for name, weight in mine.items():
        weight.copy_(weights[name])


def check_weights(
    where: str | Path, expected: Mapping[str, Tensor], got: Mapping[str, Tensor]
) -> None:
    """Raise a UserError that says, after `where`, which weights differ in name or shape."""
    missing = [name for name in expected if name not in got]
    unexpected = [name for name in got if name not in expected]
    reshaped = [
        f"{name} is {tuple(got[name].shape)}, the configuration says {tuple(expected[name].shape)}"
        for name in expected
        if name in got and got[name].shape != expected[name].shape
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
    """Map every further name of a shared parameter to its first name."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(parameter), name)
        if kept != name:
            aliases[name] = kept
    return aliases


def _previous(folder: Path) -> Path:
    """Return where the old model waits while the new one takes its place."""
    return folder.with_name(f".{folder.name}.previous")


def _put_in_place(new: Path, folder: Path) -> None:
    # A rename onto a full folder is refused, so the old model steps aside; should the process die
    # between the two renames, load_model finds it there.
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    new.rename(folder)
    shutil.rmtree(previous, ignore_errors=True)


def _existing(folder: Path) -> Path:
    return folder if folder.exists() or not _previous(folder).exists() else _previous(folder)


def _refuse_foreign(folder: Path) -> None:
    """Raise if saving would remove something that is no part of a model."""
    if folder.is_file():
        raise UserError(f"cannot save the model in {folder}: it is a file")
    if folder.is_dir():
        foreign = sorted({path.name for path in folder.iterdir()} - {WEIGHTS, CONFIG})
        if foreign:
            raise UserError(f"cannot save the model in {folder}: it holds {_list(foreign)}")
        if _is_foreign(folder / CONFIG):
            raise UserError(f"cannot save the model in {folder}: it holds a model of another kind")


def _is_foreign(path: Path) -> bool:
    """Tell whether this config.json describes what `save_model` did not write, as the hub's do."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or one that is damaged, which saving mends
        return False
    return isinstance(found, dict) and "config" not in found


def _read_config(path: Path, allow: Sequence[str]) -> tuple[LMConfig, dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"no model in {path.parent}: {path.name} is missing")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict) or "config" not in data:
        raise UserError(f'{path} is no description of a model: it has no "config"')
    try:
        config = from_json(data["config"], allow)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if not isinstance(config, LMConfig):
        raise UserError(f"{path}: config must be LMConfig, got {type(config).__name__}")
    return config, data.get("extra", {})


def _read_weights(path: Path, device: torch.device | str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise UserError(f"no model in {path.parent}: {path.name} is missing")
    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _list(items: Iterable[str]) -> str:
    names = list(items)
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
