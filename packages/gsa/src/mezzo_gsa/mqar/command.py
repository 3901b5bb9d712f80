"""`mezzo-gsa mqar`: the sweep as a command."""

from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from typer import Option

from mezzo_gsa.mqar.sweep import NAMES, SweepConfig, sweep
from mezzo_gsa.mqar.task import MQARConfig

TASK, WHOLE = MQARConfig(), SweepConfig()
MODELS, WIDTHS, RATES = list(WHOLE.models), list(WHOLE.widths), list(WHOLE.learning_rates)


def mqar(
    out: Annotated[Path, Option(help="Folder of the result and of the runs.")] = Path("mqar"),
    model: Annotated[list[str], Option(help=f"Of {', '.join(NAMES)}; repeat.")] = MODELS,
    width: Annotated[list[int], Option(help="Model width; repeat.")] = WIDTHS,
    lr: Annotated[list[float], Option(help="Learning rate; repeat.")] = RATES,
    skip_solved: Annotated[bool, Option(help="After a rate has solved it, try no others.")] = False,
    seq_len: Annotated[int, Option(help="Tokens a row.")] = TASK.seq_len,
    num_pairs: Annotated[int, Option(help="Pairs a row.")] = TASK.num_pairs,
    vocab_size: Annotated[int, Option(help="Tokens known.")] = TASK.vocab_size,
    train_pairs: Annotated[list[int] | None, Option(help="Pairs to train on; repeat.")] = None,
    train_rows: Annotated[int, Option(help="Rows to train on.")] = TASK.train_rows,
    test_rows: Annotated[int, Option(help="Rows to test on.")] = TASK.test_rows,
    batch_size: Annotated[int, Option(help="Rows a step.")] = WHOLE.batch_size,
    epochs: Annotated[int, Option(help="At most.")] = WHOLE.epochs,
    conv_width: Annotated[int, Option(help="Tokens of a convolution as the first layer.")] = 0,
    init: Annotated[str, Option(help="Start of weights: zoology or fan_in.")] = WHOLE.init,
    seed: Annotated[int, Option(help="Of weights and order.")] = TASK.seed,
    precision: Annotated[str, Option(help="fp32, bf16 or auto.")] = WHOLE.precision,
    compile: Annotated[bool, Option(help="Use torch.compile.")] = False,
    device: Annotated[str | None, Option(help="cpu, cuda or cuda:N.")] = None,
) -> None:
    """Train GSA and other mixers on multi-query associative recall (MQAR), and compare them.

    Without options: Zoology's full protocol, many GPU hours. A folder goes on where it was left.
    """
    pairs, swept = tuple(train_pairs or ()), (tuple(model), tuple(width), tuple(lr))
    task = MQARConfig(
        vocab_size, seq_len, num_pairs, TASK.power, train_rows, pairs, test_rows, seed
    )
    checked_later: dict[str, Any] = {"init": init, "precision": precision, "compile": compile}
    config = SweepConfig(task, *swept, skip_solved, batch_size, epochs, conv_width, **checked_later)
    console = Console(soft_wrap=True)
    result = sweep(config, out, lambda line: console.print(line, highlight=False), device=device)
    table = Table("model", "C", "accuracy", "lr", "state (bytes a row)")
    for entry in result.entries:
        shown = (entry["value"], entry["lr"], f"{entry['state_bytes']:,}")
        table.add_row(entry["model"], entry["column"].removeprefix("C="), *map(str, shown))
    console.print(table)
    console.print(f"{result.path} has every run")
