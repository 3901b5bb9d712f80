"""The description of a paper's package, from which its command line is made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mezzo_core.errors import UserError, nearest
from mezzo_core.recipe_table import RecipeRow, make_table, read_table

if TYPE_CHECKING:
    import torch

    from mezzo_core.nn.published import Layout
    from mezzo_core.reproduction.reproduce import Reproduction
    from mezzo_core.train.recipes import Recipes

Bench = Callable[["torch.device", bool, Path | None, Sequence[str]], Any]
"""Measures speeds on a device, at toy sizes if the bool says so, into result files of a folder."""


class Demo(NamedTuple):
    """Which models `demo` trains on the embedded novels; both take less than a minute together."""

    recipe: str
    """The paper's own."""
    attention: str
    """The recipe of attention of the same size."""
    steps: int
    batch_size: int


@dataclass(frozen=True)
class Paper:
    """A package of a paper.

    What needs torch is given by functions, which are called when a command needs it.

    Attributes:
        command: the program's name, such as "mezzo-rat".
        title: one line for the top of `--help`.
        version: of the package.
        recipes: imports the recipes.
        table: the file of the recipes' table (`mezzo_core.recipe_table`). With None the table is
            made whenever it is needed.
        demo: what `demo` trains; None leaves it out.
        bench: imports what measures speed; None leaves the command out.
        reproduction: imports the paper's claims; None leaves `reproduce` out.
        layouts: by the names of other libraries, imports how these write the paper's models, for
            `export` and `import`.
        commands: the package's own commands, by name; they import torch when they run.
    """

    command: str
    title: str
    version: str
    recipes: "Callable[[], Recipes]"
    table: Path | None = None
    demo: Demo | None = None
    bench: Callable[[], Bench] | None = None
    reproduction: "Callable[[], Reproduction] | None" = None
    layouts: "Mapping[str, Callable[[], Layout]]" = field(default_factory=dict)
    commands: Mapping[str, Callable[..., None]] = field(default_factory=dict)

    def rows(self) -> list[RecipeRow]:
        """Return the table of the recipes."""
        return read_table(self.table) if self.table else make_table(self.recipes(), {})

    def names(self) -> list[str]:
        """Return the names of the recipes."""
        return [row.name for row in self.rows()] if self.table else list(self.recipes())

    def check_name(self, name: str) -> None:
        """Check that a recipe has this name.

        Raises:
            UserError: if none has; the message shows similar names.
        """
        if name not in (names := self.names()):
            raise UserError(
                f"no recipe is named {name!r} (`{self.command} recipes` lists them)"
                f"{nearest(name, names)}"
            )
