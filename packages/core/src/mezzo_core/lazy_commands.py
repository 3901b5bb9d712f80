"""Commands that are imported when they run, so that `--help` and a mistyped word need no torch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup


class LazyCommand(NamedTuple):
    """A command and what `--help` of the whole program says of it."""

    help: str
    """Its first line, as in the command's own docstring."""
    load: Callable[[], Callable[..., None]]
    """Imports the command and returns it: a function for `typer.Typer.command`."""
    check: Callable[[str], None] | None = None
    """Checks the command's first word, if it is no option, before the import."""
    first_words: Callable[[], list[str]] | None = None
    """Returns what the first word can be, for a shell to complete."""


class LazyCommands:
    """The lazy commands of an app."""

    def __init__(self, app: typer.Typer) -> None:
        """Make the app, which has no lazy commands yet, import those that are added."""
        self._app, self._commands = app, dict[str, LazyCommand]()
        commands = self._commands

        class Group(TyperGroup):
            def resolve_command(
                self, ctx: Any, args: list[str]
            ) -> tuple[str | None, Any, list[str]]:
                name, command, rest = super().resolve_command(ctx, args)
                lazy = commands.get(name or "")
                if lazy is None or (ctx.resilient_parsing and not rest):  # completes the first word
                    return name, command, rest
                return name, _load(name, lazy, rest), rest

        app.info.cls = Group

    def add(self, name: str, command: LazyCommand) -> None:
        """Add a command."""
        self._commands[name] = command
        self._app.command(name, help=command.help)(_stand_in(command.first_words))


def _load(name: str | None, lazy: LazyCommand, words: Sequence[str]) -> Any:
    if lazy.check is not None and words and not words[0].startswith("-"):
        lazy.check(words[0])
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    app.command(name)(lazy.load())
    return typer.main.get_command(app)


def _stand_in(first_words: Callable[[], list[str]] | None) -> Callable[..., None]:
    """Return what stands for a command in the list of commands."""

    def stand_in(word: str = typer.Argument("", autocompletion=first_words)) -> None:
        raise AssertionError("resolve_command puts the command itself in this one's place")

    return stand_in
