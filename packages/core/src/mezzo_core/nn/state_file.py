"""States in safetensors files, with a fingerprint of the model that can go on from them."""

import hashlib
import json
import secrets
import stat
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mezzo_core.errors import UserError
from mezzo_core.files import parse_json
from mezzo_core.libraries import first_line, import_library
from mezzo_core.nn.checkpoint import safetensor_error
from mezzo_core.nn.contract import AbstractSequenceModule
from mezzo_core.nn.lm import LM

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 2**22
"""How many integers of a weight are summed at a time."""


def save_state(
    model: LM | AbstractSequenceModule,
    state: Any,
    path: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a state to one file, replacing a file that is there.

    It is written beside `path` and renamed, so a reader always finds a complete file. Reserved room
    is saved too, with its arbitrary content.

    Args:
        model: the model, or a mixer, block or stack, whose state it is.
        state: from `forward` or from `reserve`.
        path: the file.
        extra: JSON values to keep with it, such as the tokens that the state has read.

    Raises:
        UserError: if the file cannot be written, or safetensors is not installed.
        TypeError: if the state is of another kind of module, or `extra` holds values that JSON
            does not have.
        ValueError: if the state breaks the contract, or `extra` holds NaN or infinity.
    """
    library = import_library("safetensors.torch", "train")
    path = Path(path)
    module = _sequence_module(model)
    module.check_reserve(state, 0)
    told = json.dumps(dict(extra or {}), allow_nan=False)
    tensors = _apart(tree_leaves(state))
    description = {**_describe(model), "extra": told}
    description["crc32"] = str(_checksum(description, tensors))
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            scratch.touch(exist_ok=False)
            # The library lets only the owner read it: keep the mode of a new file of the user.
            mode = stat.S_IMODE(scratch.stat().st_mode)
            library.save_file(tensors, scratch, metadata=description)
            scratch.chmod(mode)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
    except (OSError, safetensor_error()) as error:
        raise UserError(f"cannot save the state in {path}: {first_line(error)}") from error


def load_state(model: LM | AbstractSequenceModule, path: str | Path) -> tuple[Any, dict[str, Any]]:
    """Read a state that `save_state` wrote, to where this model keeps its states.

    Args:
        model: the same modules with the same weights as when the state was saved, on any device.
        path: the file.

    Returns:
        The state, and the `extra` that was saved with it.

    Raises:
        UserError: if the file is missing, damaged, or of another model.
    """
    path = Path(path)
    module = _sequence_module(model)
    description, tensors = _read(path)
    crc32 = description.pop("crc32")
    if crc32 != str(_checksum(description, tensors)):
        raise UserError(f"{path} is damaged: its checksum is not that of what was saved")
    for name, told in _describe(model).items():
        if description[name] != told:
            raise UserError(f"{path} holds a state of a model with other {name}")
    first, tree = tree_flatten(module.init_state(1))
    leaves = [tensors[str(i)].to(leaf.device) for i, leaf in enumerate(first)]
    state = tree_unflatten(leaves, tree)
    module.check_reserve(state, 0)
    with torch.no_grad():  # a module may keep its states in memory of its own, such as files
        state = module.copy_rows(state, torch.arange(len(leaves[0]), device=leaves[0].device))
    return state, parse_json(description["extra"])


def _apart(leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    """Name tensors by their index, and copy those that share memory: safetensors refuses these."""
    tensors: dict[str, Tensor] = {}
    known: set[int] = set()
    for i, leaf in enumerate(leaves):
        tensor = leaf.detach().contiguous()
        tensors[str(i)] = tensor.clone() if tensor.data_ptr() in known else tensor
        known.add(tensor.data_ptr())
    return tensors


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    library = import_library("safetensors", "train")
    if not path.is_file():
        raise UserError(f"no state in {path}: there is no such file")
    try:
        with library.safe_open(path, framework="pt") as file:
            description = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, library.SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from error
    if description.keys() != {"modules", "weights", "extra", "crc32"}:
        raise UserError(f"{path} holds no state: save_state did not write it")
    return description, tensors


def _sequence_module(model: LM | AbstractSequenceModule) -> AbstractSequenceModule:
    return model.stack if isinstance(model, LM) else model


def _describe(model: nn.Module) -> dict[str, str]:
    """Describe what a state depends on: the modules, their configurations and the weights.

    Models with equal descriptions give the same outputs, whatever their device.
    """
    parts = [str(model)]
    for name, part in model.named_modules():
        parts.append(f"{name} {type(part).__qualname__} {getattr(part, 'config', None)!r}")
    weights = []
    for name, weight in model.state_dict().items():
        bits = weight.detach().view(_SAME_SIZE[weight.element_size()]).flatten()
        weights.append(f"{name} {weight.dtype} {tuple(weight.shape)} {_fingerprint(bits)}")
    return {"modules": _digest(parts), "weights": _digest(weights)}


def _fingerprint(integers: Tensor) -> int:
    """Return a number that depends on the integers and on their order.

    Sums and products of integers are exact modulo 2^64, so it is the same on every device.
    """
    total, factor = 0, 0x9E3779B97F4A7C15  # odd: multiplying by it loses no information
    for part in integers.split(_PART):
        places = torch.arange(1, 2 * len(part), 2, device=part.device)
        total = (total * factor + int((part * places).sum())) % 2**64
    return total


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _checksum(description: Mapping[str, str], tensors: Mapping[str, Tensor]) -> int:
    checksum = zlib.crc32(json.dumps(description, sort_keys=True).encode())
    for name in sorted(tensors):
        x = tensors[name]
        checksum = zlib.crc32(f"{name} {x.dtype} {tuple(x.shape)}".encode(), checksum)
        checksum = zlib.crc32(x.cpu().flatten().view(torch.uint8).numpy().data, checksum)
    return checksum
