"""The commands that lead to other libraries and back: export, import."""

from pathlib import Path
from typing import Annotated

import typer

from mezzo_core.console import show
from mezzo_core.inputs import check_writable, expanded
from mezzo_core.libraries import import_library
from mezzo_core.options import AllowPackage, TokenizerName


def add_hub_commands(app: typer.Typer) -> None:
    """Add the commands; their libraries are imported when they run."""

    @app.command(name="export")
    def export_command(
        run: Annotated[Path, typer.Argument(help="A training run's folder, or its model/.")],
        out: Annotated[Path, typer.Argument(help="A new folder.", callback=expanded)],
        tokenizer: TokenizerName = None,
        allow_package: AllowPackage = None,
    ) -> None:
        """Write a trained model for transformers: `from_pretrained(OUT)` reads it."""
        _quiet_transformers()
        from mezzo_core.hub.folder import export_model

        check_writable(out, is_folder=True)
        files = export_model(run, out, tokenizer=tokenizer, allow_packages=allow_package or ())
        show(f"{out}: {', '.join(files)}")

    @app.command(name="import")
    def import_command(
        folder: Annotated[Path, typer.Argument(help="A folder that transformers has written.")],
        run: Annotated[Path, typer.Argument(help="The new run's folder.", callback=expanded)],
        allow_package: AllowPackage = None,
    ) -> None:
        """Read a model back from transformers, for `generate`, `eval` and `train --init-from`."""
        _quiet_transformers()
        from mezzo_core.hub.folder import import_model

        check_writable(run, is_folder=True)
        import_model(folder, run, allow_packages=allow_package or ())
        show(f"the model is in {run / 'model'}")


def _quiet_transformers() -> None:
    """Keep its progress bars and warnings off a command's output."""
    logging = import_library("transformers", "hub").utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
