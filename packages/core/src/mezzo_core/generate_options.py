"""The numeric options of the command `generate`."""

import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from inspect import Parameter
from typing import Annotated, Any

import typer

from mezzo_core.docstrings import described


@dataclass(frozen=True)
class GenerateOptions:
    """The numeric arguments of `mezzo_core.nn.generate`, which checks them.

    Attributes:
        max_new_tokens: tokens to write.
        temperature: 0 takes the likeliest token.
        top_k: only the k likeliest tokens.
        top_p: only the fewest tokens whose probabilities sum to p.
        min_p: only tokens at least p times as likely as the likeliest.
        seed: seed of the sampling.
        prefill_tokens: prompt tokens at a time, for bounded memory.
        num_samples: continuations of each prompt.
        num_rows: continuations at a time; where some end, the next begin. Default: all.
        repetition_penalty: above 1, tokens that were there become less likely.
        num_drafted: the most tokens that the assistant proposes at a time.
    """

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    prefill_tokens: int | None = None
    num_samples: int = 1
    num_rows: int | None = None
    repetition_penalty: float = 1.0
    num_drafted: int = 15


def _flags() -> Iterator[Parameter]:
    hints = typing.get_type_hints(GenerateOptions)
    words = described(GenerateOptions.__doc__, "Attributes")
    for field in fields(GenerateOptions):
        text = words[field.name]
        if field.default is not None:
            text = f"{text.removesuffix('.')}. Default: {field.default}."
        option = typer.Option(f"--{field.name.replace('_', '-')}", help=text)
        kind: Any = hints[field.name] | None
        annotation = Annotated[kind, option]
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


FLAGS = tuple(_flags())
"""A flag for each field; its value is None if it is not given."""
