"""The flags of `train`: one for each setting of a run that is a number, a word or a switch.

They are made from the fields and the docstrings of the configuration's dataclasses.
"""

import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from inspect import Parameter, cleandoc
from itertools import chain
from typing import Annotated, Any, Literal

import typer

from mezzo_core.data import DataConfig
from mezzo_core.data.mixture import TextConfig, change_texts
from mezzo_core.errors import UserError
from mezzo_core.nn.lm import LMConfig
from mezzo_core.train.config import OptimConfig, TrainConfig

PARTS = {"": TrainConfig, "optim": OptimConfig, "data": DataConfig, "model": LMConfig}
"""The parts of a `TrainConfig` whose fields have flags, by their names in it."""
_PANELS = {"": "Training", "optim": "Optimizer", "data": "Text", "model": "Model"}
OWN = {("data", "source"), ("data", "validation_source"), ("", "init_from")}
"""Fields of which the command itself has flags."""
NAMES = {("data", "seed"): "data_seed", ("data", "validation_source"): "validation_data"}
"""Names of flags that differ from their fields'."""
_SIMPLE = (bool, int, float, str)


class _None:
    """The value of a flag that is given as "none"; None itself is that of one that is not given."""


@dataclass(frozen=True)
class Flag:
    """The flag of one field.

    Attributes:
        part: the part of the configuration that has the field, as in `PARTS`.
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
        """The flag as it is typed, such as "--batch-size"."""
        return "--" + self.name.replace("_", "-")

    @property
    def path(self) -> str:
        """The field's place in the configuration, such as "optim.lr"."""
        return f"{self.part}.{self.field}".removeprefix(".")

    def parameter(self) -> Parameter:
        """Return the flag as a parameter of a function for typer."""
        panel = "Switches" if self.kind is bool else _PANELS[self.part]
        options: dict[str, Any] = {"help": self.help, "rich_help_panel": panel}
        if self.takes_none:
            options |= {"parser": self._parse, "metavar": f"{self.kind.__name__}|none".upper()}
        kind: Any = self.kind | None
        annotation = Annotated[kind, typer.Option(self._declared, **options)]
        return Parameter(self.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    @property
    def _declared(self) -> str:
        return f"{self.word}/--no-{self.word[2:]}" if self.kind is bool else self.word

    def _parse(self, text: str) -> Any:
        if text.lower() == "none":
            return _None
        try:
            return self.kind(text)
        except ValueError:
            kind = "a whole number" if self.kind is int else "a number"
            raise typer.BadParameter(f"{text!r} is neither {kind} nor none.") from None


def _flags() -> Iterator[Flag]:
    for part, config in PARTS.items():
        hints, words = typing.get_type_hints(config), field_docs(config)
        for field in fields(config):
            kinds = typing.get_args(hints[field.name])
            is_union = typing.get_origin(hints[field.name]) in (typing.Union, types.UnionType)
            options = [kind for kind in kinds if kind is not type(None)] if is_union else []
            kind = options[0] if len(options) == 1 else hints[field.name]
            text = words[field.name].partition(". ")[0].removesuffix(".") + "."
            if typing.get_origin(kind) is Literal:
                text += f" One of {', '.join(map(str, typing.get_args(kind)))}."
                kind = str
            is_simple = kind in _SIMPLE or all(k is float for k in typing.get_args(kind) or (str,))
            if is_simple and (part, field.name) not in OWN:
                takes_none = is_union and kind is not bool and type(None) in kinds
                yield Flag(part, field.name, kind, takes_none, text)


def field_docs(config: type) -> dict[str, str]:
    """Return what a dataclass and its bases say of each field, under "Attributes:"."""
    texts = [cleandoc(each.__doc__ or "") for each in config.__mro__]
    told = [text.partition("\nAttributes:\n")[2].partition("\n\n")[0] for text in texts]
    found = [re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", text, re.M) for text in told]
    return {
        name: " ".join(f"{words[0].upper()}{words[1:]}".split())
        for names, words in chain.from_iterable(found)
        for name in names.split(", ")
    }


FLAGS = tuple(_flags())


def apply_flags(config: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration with the values of the flags that were given (not None).

    Raises:
        UserError: if the configuration refuses a value, or reads no text and a flag is of a text.
    """
    changes: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
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
"""Fields whose names are also words of a sentence: only at its beginning they are the field."""
_FIELD = re.compile(
    rf"^(?:\w+Config\.)?({'|'.join(_PLAIN_WORDS)})\b(?= must| =|\[)"
    rf"|\b(?:\w+Config\.)?({'|'.join({flag.field for flag in FLAGS} - _PLAIN_WORDS)})\b"
)


def with_flags(message: str, given: Mapping[str, Any] | None = None) -> str:
    """Return an error's message in which each field that it names is followed by its flag.

    Of several fields of one name it is the one whose flag was given.
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
