"""Starts the command line of a paper's package, or says that its extra `train` is missing."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from mezzo_core.paper import Demo, Paper
from mezzo_core.recipe_table import FILE


def start(
    package: str,
    arguments: Sequence[str] | None,
    *,
    title: str,
    demo: Demo,
    commands: Mapping[str, str] = {},
    layouts: Mapping[str, str] = {},
) -> NoReturn:
    """Run the command line of a package whose modules have the names that all papers share.

    For the options see `Paper`; commands and layouts are given as "module:name" in the package.
    """

    def at(place: str) -> Any:
        return partial(resolve_name, f"{package}.{place}")

    module: Any = import_module(package)
    command = package.replace("_", "-")
    try:
        from mezzo_core.cli import make_app, run

        own = {name: at(place)() for name, place in commands.items()}
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: the commands need the package {error.name}: "
            f"pip install '{command}[train]' brings it"
        )
    paper = Paper(
        command,
        title,
        module.__version__,
        recipes=at("recipes:RECIPES"),
        table=Path(module.__file__).with_name(FILE),
        demo=demo,
        bench=at("reproduction.speed:SPEEDS.bench"),
        reproduction=at("reproduction.claims:REPRODUCTION"),
        layouts={name: at(place) for name, place in layouts.items()},
        commands=own,
    )
    run(make_app(paper), arguments)
