"""Reads checkpoints in the Hugging Face hub's format; pickled weights are never read."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezzo_core.errors import UserError
from mezzo_core.files import is_number, read_json
from mezzo_core.nn.checkpoint import open_weights
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.on_meta import build_on_meta

CONFIG = "config.json"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# No model has more layers. The names of all layers' weights are listed before any file is read, so
# a damaged number must not make that list huge.
_MOST_LAYERS = 10_000
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


Read = Callable[[Path], tuple[LMConfig, dict[str, Tensor]]]
"""Reads a folder into a model's configuration and `state_dict`; see `mezzo_core.nn.llama`."""


class Layout(NamedTuple):
    """How another library writes its models.

    Attributes:
        kinds: its values of "model_type" in config.json.
        read: reads a folder of that library into a model of ours.
        write: returns the library's config.json, and the weights by its names.
    """

    kinds: Sequence[str]
    read: Read
    write: Callable[[LMConfig, Mapping[str, Tensor]], tuple[dict[str, Any], dict[str, Tensor]]]


class Described(NamedTuple):
    """The contents of a config.json; its methods raise a UserError that names the key."""

    values: Mapping[str, Any]
    path: Path

    @classmethod
    def of(cls, folder: Path) -> "Described":
        """Read the file of a folder."""
        return cls(read_json(folder / CONFIG), folder / CONFIG)

    def kind(self, known: Collection[str]) -> str:
        """Return "model_type", one of `known`; refuse what is no causal language model."""
        kind = self.values.get("model_type")
        if not isinstance(kind, str) or kind not in known:
            hint = ": make it a run first, by import" if kind == "mezzo" else ""
            raise UserError(
                f"{self.path}: model_type must be {' or '.join(known)}, got {kind!r}{hint}"
            )
        architectures = self.values.get("architectures") or []
        if not isinstance(architectures, list):
            raise UserError(f"{self.path}: architectures must be a list, got {architectures!r}")
        for architecture in architectures:
            if not str(architecture).endswith("ForCausalLM"):
                raise UserError(f"{self.path}: only language models are read, got {architecture}")
        return kind

    def check_only(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Check that these keys have one of these values, if they are there."""
        for key, choices in allowed.items():
            if key in self.values and self.values[key] not in choices:
                raise UserError(
                    f"{self.path}: {key} must be {choices[0]!r}, got {self.values[key]!r}"
                )

    def count(self, key: str) -> int:
        """Return a whole number of 1 or more."""
        value = self.values.get(key)
        return self._checked(
            key, value, type(value) is int and value >= 1, "a whole number of 1 or more"
        )

    def count_or_none(self, key: str) -> int | None:
        """Return a whole number of 1 or more; None if there is none."""
        return None if self.values.get(key) is None else self.count(key)

    def num_layers(self) -> int:
        """Return num_hidden_layers."""
        layers = self.count("num_hidden_layers")
        if layers > _MOST_LAYERS:
            raise UserError(
                f"{self.path}: num_hidden_layers must be at most {_MOST_LAYERS}, got {layers}"
            )
        return layers

    def positive(self, key: str, default: float) -> float:
        """Return a positive number."""
        value = self.values.get(key, default)
        return float(self._checked(key, value, is_number(value) and value > 0, "a positive number"))

    def number(self, key: str, default: float) -> float:
        """Return a finite number."""
        value = self.values.get(key, default)
        return float(self._checked(key, value, is_number(value), "a number"))

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.values.get(key, default)
        return self._checked(key, value, type(value) is bool, "true or false")

    def _checked(self, key: str, value: Any, is_right: bool, what: str) -> Any:
        if not is_right:
            raise UserError(f"{self.path}: {key} must be {what}, got {value!r}")
        return value


def read_weights(folder: Path, names: Iterable[str], unused: Collection[str]) -> dict[str, Tensor]:
    """Read weights by the hub's names; cast all matrices and biases to their widest dtype.

    Args:
        folder: with model.safetensors, or several files beside model.safetensors.index.json.
        names: the weights that must be there.
        unused: names of weights that may be there too.

    Raises:
        UserError: if a file is missing or damaged, a weight is missing or unknown, or its dtype is
            not float32, bfloat16 or float16.
    """
    names = list(names)
    files = _files(folder)
    missing = [name for name in names if name not in files]
    known = {*names, *unused}
    # Old checkpoints also store RoPE's frequencies.
    unknown = [
        name for name in files if name not in known and not name.endswith(".rotary_emb.inv_freq")
    ]
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}"
        more = len(missing) + len(unknown) - 1
        raise UserError(
            f"{folder} {what}{f' and {more} more problems' if more else ''}: these are not the "
            f"weights of the model that {CONFIG} describes"
        )
    weights = {}
    for file in dict.fromkeys(files.values()):
        with open_weights(folder / file) as stored:
            for name in (name for name in names if files[name] == file):
                weights[name] = stored.get_tensor(name)
    for name, weight in weights.items():
        if weight.dtype not in _DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise UserError(f"{folder}: {name} is {weight.dtype}; supported: {allowed}")
    widest = reduce(torch.promote_types, {w.dtype for w in weights.values() if w.ndim == 2})
    return {
        name: w.to(widest) if w.ndim == 2 or name.endswith(".bias") else w
        for name, w in weights.items()
    }


def check_shapes(
    folder: Path, config: LMConfig, weights: Mapping[str, Tensor], names: Mapping[str, str]
) -> None:
    """Check that weights, by our names, have the shapes of a model.

    Raises:
        UserError: if one has another shape. The message has its name on the hub, from `names`.
    """
    expected = build_on_meta(config, folder / CONFIG).state_dict()
    for ours, weight in weights.items():
        if weight.shape != expected[ours].shape:
            raise UserError(
                f"{folder}: {names[ours]} is of shape {tuple(weight.shape)}, {CONFIG} says "
                f"{tuple(expected[ours].shape)}"
            )


def _files(folder: Path) -> dict[str, str]:
    """Return the file of every weight."""
    if (folder / INDEX).is_file():
        files = read_json(folder / INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in files.values()
        ):
            raise UserError(f"{folder / INDEX}: weight_map must name files beside it")
        return files
    if (folder / WHOLE).is_file():
        with open_weights(folder / WHOLE) as stored:
            return dict.fromkeys(stored.keys(), WHOLE)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    instead = f"; {pickled[0]} is pickled, which is never read" if pickled else ""
    raise UserError(f"{folder} has neither {WHOLE} nor {INDEX}{instead}")
