"""`mezzo-gsa mqar`: the sweep as a command."""

from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from typer import Option

from mezzo_gsa.mqar.config import MIXERS, SweepConfig
from mezzo_gsa.mqar.sweep import best, result_path, sweep
from mezzo_gsa.mqar.task import MQARConfig

TASK, WHOLE = MQARConfig(), SweepConfig()
_MODEL = Option(help=f"Of {', '.join(MIXERS)}; repeat. Default: all but gsa_one_head.")
_WIDTH = Option(help="Model width; repeat for several. Default: 64 to 512.")
_LR = Option(help="Learning rate; repeat. Default: 1e-4 to 1e-2.")
_SKIP = Option("--skip-solved", help="After a rate has solved it, try no others.")
_PAIRS = Option(help="Pairs of rows to train on; repeat for several.")
_CONV = Option(help="Tokens of a convolution as the first layer; 0: a mixer there too.")
_DEVICE = Option(help="cpu, cuda or cuda:N. Default: a GPU if any.")


def mqar(
    out: Annotated[Path, Option(help="Folder of the result and of the runs.")] = Path("mqar"),
    model: Annotated[list[str] | None, _MODEL] = None,
    width: Annotated[list[int] | None, _WIDTH] = None,
    lr: Annotated[list[float] | None, _LR] = None,
    skip_solved: Annotated[bool, _SKIP] = False,
    seq_len: Annotated[int, Option(help="Tokens a row.")] = TASK.seq_len,
    num_pairs: Annotated[int, Option(help="Pairs a row.")] = TASK.num_pairs,
    vocab_size: Annotated[int, Option(help="Tokens known.")] = TASK.vocab_size,
    train_pairs: Annotated[list[int] | None, _PAIRS] = None,
    train_rows: Annotated[int, Option(help="Rows to train on.")] = TASK.train_rows,
    test_rows: Annotated[int, Option(help="Rows to test on.")] = TASK.test_rows,
    batch_size: Annotated[int, Option(help="Rows a step.")] = WHOLE.batch_size,
    epochs: Annotated[int, Option(help="At most.")] = WHOLE.epochs,
    conv_width: Annotated[int, _CONV] = WHOLE.conv_width,
    init: Annotated[str, Option(help="Start of weights: zoology or fan_in.")] = WHOLE.init,
    seed: Annotated[int, Option(help="Of weights and order.")] = TASK.seed,
    precision: Annotated[str, Option(help="bf16, fp32, or auto: bf16 on a GPU.")] = "auto",
    compile: Annotated[bool, Option(help="Use torch.compile.")] = False,
    device: Annotated[str | None, _DEVICE] = None,
) -> None:
    """Train GSA and other mixers on multi-query associative recall (MQAR), and compare them.

    Without options: Zoology's full protocol, many GPU hours. A folder goes on where it was left.
    """
    task = MQARConfig(
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_pairs=num_pairs,
        train_rows=train_rows,
        train_pairs=tuple(train_pairs or ()),
        test_rows=test_rows,
        seed=seed,
    )
    words: dict[str, Any] = {"init": init, "precision": precision}  # checked by SweepConfig
    config = SweepConfig(
        task=task,
        models=tuple(model or WHOLE.models),
        widths=tuple(width or WHOLE.widths),
        learning_rates=tuple(lr or WHOLE.learning_rates),
        skip_solved=skip_solved,
        batch_size=batch_size,
        epochs=epochs,
        conv_width=conv_width,
        compile=compile,
        **words,
    )
    console = Console(soft_wrap=True)
    runs = sweep(config, out, lambda line: console.print(line, highlight=False), device=device)
    table = Table("model", "C", "accuracy", "lr", "state (bytes a row)")
    for run in best(runs).values():
        accuracy = "diverged" if run.accuracy is None else f"{run.accuracy:.4f}"
        table.add_row(run.model, str(run.width), accuracy, f"{run.lr:g}", f"{run.state_bytes:,}")
    console.print(table)
    console.print(f"{result_path(config, out)} has every run")
