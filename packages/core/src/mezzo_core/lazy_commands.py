"""Commands that are imported when they run, so that `--help` and a mistyped word need no torch."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup


class LazyCommand(NamedTuple):
    """A command and what `--help` of the whole program says of it."""

    help: str
    """Its first line, as in the command's own docstring."""
    load: Callable[[], Callable[..., None]]
    """Imports the command and returns it: a function for `typer.Typer.command`."""


def add_lazy_commands(app: typer.Typer, commands: Mapping[str, LazyCommand]) -> None:
    """Add commands to an app, by their names."""

    class Group(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            name, command, rest = super().resolve_command(ctx, args)
            if name is not None and name in commands:
                command = _load(name, commands[name])
            return name, command, rest

    app.info.cls = Group
    for name, command in commands.items():
        app.command(name, help=command.help)(_stand_in)


def _load(name: str, lazy: LazyCommand) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    app.command(name)(lazy.load())
    return typer.main.get_command(app)


def _stand_in() -> None:
    """Stand for a command in the list of commands."""
    raise AssertionError("resolve_command puts the command itself in this one's place")
