"""`mezzo-gsa mqar`: the sweep as a command."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from mezzo_core.data.mqar import MQARConfig
from rich.console import Console
from rich.table import Table

from mezzo_gsa.mqar.config import RecallTraining, SweepConfig
from mezzo_gsa.mqar.model import MIXERS
from mezzo_gsa.mqar.result import SweepResult
from mezzo_gsa.mqar.sweep import sweep

DEFAULT = SweepConfig()


def mqar(
    out: Annotated[Path, typer.Option(help="Folder of the result and its figure.")] = Path("mqar"),
    model: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(MIXERS)}; repeat.")
    ] = None,
    width: Annotated[
        list[int] | None, typer.Option(help="Model width; repeat for several. Default: 64 to 512.")
    ] = None,
    lr: Annotated[
        list[float] | None, typer.Option(help="Learning rate; repeat. Default: 1e-4 to 1e-2.")
    ] = None,
    skip_solved: Annotated[
        bool, typer.Option("--skip-solved", help="After a rate has solved it, try no others.")
    ] = False,
    seq_len: Annotated[int | None, typer.Option(help="Tokens a row. Default: 512.")] = None,
    num_pairs: Annotated[int | None, typer.Option(help="Pairs a row. Default: 64.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Tokens known. Default: 8192.")] = None,
    train_pairs: Annotated[
        list[int] | None,
        typer.Option(help="Pairs of rows to train on; repeat for several."),
    ] = None,
    train_rows: Annotated[int | None, typer.Option(help="Default: 100,000.")] = None,
    test_rows: Annotated[int | None, typer.Option(help="Default: 3,000.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows a step. Default: 128.")] = None,
    epochs: Annotated[int | None, typer.Option(help="At most. Default: 64.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Of a run: none begins an epoch after that.")
    ] = None,
    conv_width: Annotated[
        int | None, typer.Option(help="Tokens of a convolution as the first layer. Default: none.")
    ] = None,
    init: Annotated[
        str | None, typer.Option(help="Start of weights: zoology (the default) or fan_in.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and order. Default: 123.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp32, or auto: bf16 on a GPU. Default: auto.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Use torch.compile.")
    ] = False,
    graph: Annotated[
        bool, typer.Option("--graph/--no-graph", help="CUDA graphs of the steps, on a GPU.")
    ] = True,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU if any.")
    ] = None,
) -> None:
    """Train GSA and other mixers on multi-query associative recall (MQAR), and compare them.

    Without options: Zoology's full protocol, many GPU hours. A folder goes on where it was left.
    """
    task = _override(MQARConfig(), seq_len=seq_len, num_pairs=num_pairs, vocab_size=vocab_size)
    training = _override(
        RecallTraining(),
        task=task,
        train_rows=train_rows,
        train_pairs=tuple(train_pairs) if train_pairs else None,
        test_rows=test_rows,
        batch_size=batch_size,
        epochs=epochs,
        seconds=seconds,
        conv_width=conv_width,
        init=init,
        seed=seed,
        precision=precision,
        compile=compile,
        graph=graph,
    )
    config = _override(
        DEFAULT,
        models=tuple(model) if model else None,
        widths=tuple(width) if width else None,
        learning_rates=tuple(lr) if lr else None,
        skip_solved=skip_solved,
        training=training,
    )
    console = Console(soft_wrap=True)
    result = sweep(config, out, lambda line: console.print(line, highlight=False), device=device)
    console.print(_table(result))
    console.print(f"{result.path} has every run, and what was left out of the protocol")


def _table(result: SweepResult) -> Table:
    table = Table("model", "C", "accuracy", "lr", "state (bytes a row)")
    for run in result.best():
        table.add_row(
            run.model,
            str(run.d_model),
            f"{run.accuracy:.4f}",
            f"{run.lr:g}",
            f"{run.state_bytes:,}",
        )
    return table


def _override(config: Any, **options: Any) -> Any:
    given = {name: value for name, value in options.items() if value is not None}
    return replace(config, **given)
