"""The flags of `train`: one for each setting of a run that is a number, a word or a switch.

They come from a file, so that help and a mistyped word need no torch, which the configuration's
dataclasses import. `mezzo_core.train.flag_table` makes the file from the dataclasses.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mezzo_core.errors import UserError

if TYPE_CHECKING:
    from mezzo_core.train.config import TrainConfig

FILE = Path(__file__).with_name("flags.csv")
KINDS: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "two floats": tuple[float, float],
}
"""The types of flags' values, by their words in the file."""
_PANELS = {"": "Training", "optim": "Optimizer", "data": "Text", "model": "Model"}
NAMES = {("data", "seed"): "data_seed", ("data", "validation_source"): "validation_data"}
"""Names of flags that differ from their fields'."""


class _None:
    """Stands for the word "none" on the command line, where None means that a flag is not given."""


@dataclass(frozen=True)
class Flag:
    """The flag of one field.

    Attributes:
        part: the part of the configuration that has the field, such as "optim".
        field: the field's name.
        kind: the type of a value.
        takes_none: whether a value can be "none" (a switch is on or off).
        help: what the field is.
    """

    part: str
    field: str
    kind: Any
    takes_none: bool
    help: str

    @property
    def name(self) -> str:
        """The name as a parameter of the command, such as "batch_size"."""
        return NAMES.get((self.part, self.field), self.field)

    @property
    def word(self) -> str:
        """The flag as users type it, such as "--batch-size"."""
        return "--" + self.name.replace("_", "-")

    @property
    def path(self) -> str:
        """The field's place in the configuration, such as "optim.lr"."""
        return f"{self.part}.{self.field}".removeprefix(".")

    def parameter(self) -> Parameter:
        """Return the flag as a parameter of a function for typer."""
        panel = "Switches" if self.kind is bool else _PANELS[self.part]
        options: dict[str, Any] = {"help": self.help, "rich_help_panel": panel}
        if self.kind is KINDS["two floats"]:
            options["metavar"] = "FLOAT FLOAT"
        if self.takes_none:
            options |= {"parser": self._parse, "metavar": f"{self.kind.__name__}|none".upper()}
        kind: Any = self.kind | None
        word = f"{self.word}/--no-{self.word[2:]}" if self.kind is bool else self.word
        annotation = Annotated[kind, typer.Option(word, **options)]
        return Parameter(self.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def _parse(self, text: str) -> Any:
        if text.lower() == "none":
            return _None
        try:
            return self.kind(text)
        except ValueError:
            kind = "a whole number" if self.kind is int else "a number"
            raise typer.BadParameter(f"{text!r} is neither {kind} nor none.") from None


def _read_flags() -> Iterator[Flag]:
    with FILE.open(encoding="utf-8", newline="") as file:
        for part, field, kind, takes_none, text in csv.reader(file):
            yield Flag(part, field, KINDS[kind], takes_none == "or none", text)


FLAGS = tuple(_read_flags())


def apply_flags(config: "TrainConfig", given: Mapping[str, Any]) -> "TrainConfig":
    """Return the configuration with the values of the flags that were given (not None).

    Raises:
        UserError: if the configuration refuses a value, or reads no text and a flag is of a text.
    """
    from mezzo_core.data.texts import TextConfig, change_texts

    changes: dict[str, dict[str, Any]] = {part: {} for part in _PANELS}
    for flag in FLAGS:
        if (value := given.get(flag.name)) is not None:
            changes[flag.part][flag.field] = None if value is _None else value
    top = changes.pop("")
    if changes["optim"]:
        top["optim"] = replace(config.optim, **changes["optim"])
    if changes["model"]:
        top["model"] = replace(config.model, **changes["model"])
    if changes["data"]:
        if not isinstance(config.data, TextConfig):
            words = [flag.word for flag in FLAGS if flag.field in changes["data"]]
            raise UserError(f"the recipe {config.name} reads no text: {', '.join(words)} cannot be")
        top["data"] = change_texts(config.data, **changes["data"])
    return replace(config, **top) if top else config


_PLAIN_WORDS = {flag.field for flag in FLAGS if "_" not in flag.field} - {"lr"}
"""Fields whose names are also plain words: they are the field only where a message begins."""
_FIELD = re.compile(
    rf"^(?:\w+Config\.)?({'|'.join(_PLAIN_WORDS)})\b(?= must| =|\[)"
    rf"|(?<!')\b(?:\w+Config\.)?({'|'.join({flag.field for flag in FLAGS} - _PLAIN_WORDS)})\b"
)


def with_flags(message: str, given: Mapping[str, Any] | None = None) -> str:
    """Return an error's message in which each field that it names is followed by its flag.

    A name that a quote begins is the user's own word, and stays.
    If several fields have this name, the one whose flag was given is meant.
    """
    asked = [flag for flag in FLAGS if given and given.get(flag.name) is not None]
    words = {flag.field: flag.word for flag in (*reversed(FLAGS), *asked)}
    told: set[str] = set()

    def add(found: re.Match[str]) -> str:
        field = found[1] or found[2]
        word = words[field]
        if field in told or re.search(rf"{word}\b(?!-)", message):
            return found[0]
        told.add(field)
        return f"{field} ({word})"

    return _FIELD.sub(add, message)
