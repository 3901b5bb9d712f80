"""Reads descriptions of arguments from docstrings, and gives commands such arguments as flags."""

import inspect
import re
from collections.abc import Callable, Iterable
from inspect import Parameter


def described(text: str | None, heading: str) -> dict[str, str]:
    """Return the description of each name under a docstring's heading, such as "Args"."""
    told = inspect.cleandoc(text or "").partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", told, re.MULTILINE)
    return {
        name: " ".join(f"{words[0].upper()}{words[1:]}".split())
        for names, words in found
        for name in names.split(", ")
    }


def with_parameters(
    command: Callable[..., None], parameters: Iterable[Parameter]
) -> Callable[..., None]:
    """Return the command for typer, with these parameters in place of its `**flags`."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    every = [*own, *parameters]
    command.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in every}
    return command
