"""The table of the flags of `train`, from the fields and docstrings of a run's dataclasses.

To write the file that `train` reads, after a change of these (a test fails until then):

    python -m mezzo_core.train.flag_table
"""

import csv
import types
import typing
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal

from mezzo_core.data import DataConfig
from mezzo_core.docstrings import described
from mezzo_core.nn.lm import LMConfig
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.flags import FILE, KINDS, Flag

PARTS = {"": TrainConfig, "optim": OptimConfig, "data": DataConfig, "model": LMConfig}
"""The parts of a `TrainConfig` whose fields have flags, by their names in it."""
OWN = {("data", "source"), ("data", "validation_source"), ("", "init_from")}
"""Fields of which the command itself has flags."""


def make_flags() -> Iterator[Flag]:
    """Yield the flag of each field that is a number, a word or a switch."""
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
            if kind in KINDS.values() and (part, field.name) not in OWN:
                takes_none = is_union and kind is not bool and type(None) in kinds
                yield Flag(part, field.name, kind, takes_none, text)


def field_docs(config: type) -> dict[str, str]:
    """Return what a dataclass and its bases say of each field, under "Attributes:"."""
    found = [described(each.__doc__, "Attributes") for each in config.__mro__]
    return {name: words for fields_of in found for name, words in fields_of.items()}


def write_flags() -> None:
    """Write the file that `mezzo_core.train.flags` reads."""
    words: dict[Any, str] = {kind: word for word, kind in KINDS.items()}
    with FILE.open("w", encoding="utf-8", newline="") as file:
        for flag in make_flags():
            none = "or none" if flag.takes_none else ""
            csv.writer(file, lineterminator="\n").writerow(
                (flag.part, flag.field, words[flag.kind], none, flag.help)
            )


if __name__ == "__main__":
    write_flags()
