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
"""Measures speeds: takes a device, whether to use toy sizes, a folder for result files, and the
tables or models to measure (all if none)."""


class Demo(NamedTuple):
    """Which models `demo` trains on the embedded novels; both take less than a minute together."""

    recipe: str
    """The paper's own recipe."""
    attention: str
    """The recipe of an attention model of the same size."""
    steps: int
    batch_size: int


@dataclass(frozen=True)
class Paper:
    """Describes the package of a paper.

    Parts that need torch are functions, which import them when a command needs them.

    Attributes:
        command: the program's name, such as "mezzo-rat".
        title: one line for the top of `--help`.
        version: of the package.
        recipes: imports the recipes.
        table: the file with the table of recipes (`mezzo_core.recipe_table`); None makes the table
            whenever it is needed.
        demo: what `demo` trains; None leaves the command out.
        bench: imports the measurement of speeds; None leaves the command out.
        reproduction: imports the paper's claims; None leaves `reproduce` out.
        layouts: for `export` and `import`: for each other library, imports how it writes the
            paper's models.
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
