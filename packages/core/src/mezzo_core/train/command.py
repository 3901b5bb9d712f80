"""The command `train`, with a flag for each setting of a recipe."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mezzo_core.console import show
from mezzo_core.data.mixture import TextConfig, change_texts
from mezzo_core.errors import UserError
from mezzo_core.inputs import choose_texts, start_from
from mezzo_core.options import InitFrom, TrainData, ValidationData
from mezzo_core.paper import Paper
from mezzo_core.paths import expanded
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.distributed import launched_place
from mezzo_core.train.flags import FLAGS, apply_flags, with_flags
from mezzo_core.train.loop import train
from mezzo_core.train.recipes import find_recipe
from mezzo_core.train.settings import apply_settings
from mezzo_core.train.stopping import StoppedError


def make_command(paper: Paper) -> Callable[..., None]:
    """Return the command for a package's recipes."""

    def train_command(
        recipe: Annotated[str, typer.Argument(help="The recipe's name.")],
        *,
        data: TrainData = None,
        validation_data: ValidationData = None,
        init_from: InitFrom = None,
        settings: Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                help="Any other setting that `show RECIPE` shows, such as "
                "model.mixers.head_dim=32 (in every layer that has it); repeat for several.",
                metavar="SETTING=VALUE",
            ),
        ] = None,
        out: Annotated[
            Path | None,
            typer.Option(help="Where the run is kept. Default: runs/RECIPE.", callback=expanded),
        ] = None,
        fresh: Annotated[
            bool, typer.Option("--fresh", help="Start over instead of resuming what --out holds.")
        ] = False,
        new_data: Annotated[
            bool, typer.Option("--new-data", help="Go on even if the text has changed since.")
        ] = False,
        quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
        **flags: Any,
    ) -> None:
        """Train a model by a recipe.

        Settings that are not given are the recipe's; `show RECIPE` shows them, `recipes` lists
        recipes.
        """
        config = find_recipe(paper.recipes(), recipe)
        try:
            if init_from is not None:
                config = start_from(config, init_from, flags["tokenizer"])
            config = apply_settings(apply_flags(config, flags), settings or ())
            config = _choose_texts(config, data or (), validation_data)
        except ValueError as error:
            raise UserError(with_flags(str(error), flags)) from error
        _run(config, out or Path("runs") / recipe, fresh=fresh, new_data=new_data, quiet=quiet)

    return _declared(train_command)


def _declared(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with a parameter for each flag in the place of its `**flags`."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    every = [*own, *(flag.parameter() for flag in FLAGS)]
    command.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in every}
    return command


def _choose_texts(
    config: TrainConfig, data: Sequence[str], validation_data: str | None
) -> TrainConfig:
    if not data and validation_data is None:
        return config
    if not isinstance(config.data, TextConfig):
        raise UserError(f"the recipe {config.name} reads no text: --data does not fit")
    texts = config.data
    if validation_data is not None:
        texts = change_texts(texts, validation_source=validation_data)
    return replace(config, data=choose_texts(texts, data) if data else texts)


def _run(config: TrainConfig, out: Path, *, fresh: bool, new_data: bool, quiet: bool) -> None:
    is_first = launched_place().rank == 0  # only one of torchrun's processes prints results
    try:
        result = train(config, out, resume=not fresh, new_data=new_data, quiet=quiet)
    except StoppedError as stop:
        if is_first:
            show(f"{config.name}: {stop}", Console(stderr=True))
        raise typer.Exit(stop.exit_code) from None
    except UserError as error:
        raise UserError(with_flags(str(error))) from error
    if is_first and result.val_perplexity is not None:
        show(
            f"{config.name}: validation perplexity {result.val_perplexity:.3f} after "
            f"{result.steps} steps; the model is in {result.out / 'model'}"
        )
