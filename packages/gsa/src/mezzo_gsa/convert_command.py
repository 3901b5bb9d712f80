"""`mezzo-gsa convert`: makes a model from a Transformer on disk, for `train --init-from`."""

from pathlib import Path
from typing import Annotated

import typer
from mezzo_core.console import show
from mezzo_core.errors import UserError
from mezzo_core.paths import check_writable, expanded

NAMES = ("gsa", "gsa_spread", "gla", "retnet", "supra")
"""The names in `mezzo_gsa.convert.TARGETS`, repeated so that --help needs no torch."""


def convert_command(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder with a Llama or Mistral checkpoint (config.json, *.safetensors), "
            "hub:NAME, or a training run of softmax attention."
        ),
    ],
    to: Annotated[str, typer.Option(help=f"What attention becomes: {', '.join(NAMES)}.")],
    out: Annotated[Path, typer.Option(help="The new model's folder.", callback=expanded)],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A tokenizer's file or folder, or hub:NAME. Default: the model's own."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the weights that are new.")
    ] = 0,
) -> None:
    """Turn a Transformer into an RNN that keeps its weights, to be fine-tuned.

    Then: `train t2r_gsa --init-from OUT`, and `generate` from that run.
    """
    if to not in NAMES:
        raise UserError(f"--to takes {', '.join(NAMES)}, got {to!r}")
    import torch
    from mezzo_core.nn.checkpoint import save_model

    from mezzo_gsa.convert.convert import ROTATED, TARGETS, convert
    from mezzo_gsa.convert.source import read_transformer

    transformer = read_transformer(source, tokenizer, has_rope=to in ROTATED)
    if (out / "config.json").exists():
        raise UserError(f"{out} has a model already: convert into another folder")
    check_writable(out, is_folder=True)
    config, weights = convert(transformer.config, transformer.weights, TARGETS[to], seed=seed)
    with torch.device("meta"):
        model = config.build()
        before = transformer.config.build().num_parameters()
    extra = {**transformer.extra, "converted_from": source, "step": 0}
    save_model(model, config, out, extra, weights=weights)
    added = model.num_parameters() - before
    show(
        f"{source}: {before:,} weights of a Transformer, {added:,} new ones of {to}; "
        f"the model is in {out}"
    )
