"""`mezzo-gsa mqar`: the sweep as a command.

The protocols' defaults are repeated here, so that help needs no torch; a test compares them.
"""

from pathlib import Path
from typing import Annotated

from mezzo_core.console import show, show_table
from mezzo_core.errors import UserError, nearest
from mezzo_core.options import with_options
from mezzo_core.paths import expanded
from typer import Option

NAMES = ("attention", "gsa", "gsa_one_head", "gla", "hgrn2", "retnet")
MODELS, WIDTHS = [name for name in NAMES if name != "gsa_one_head"], [64, 128, 256, 512]
RATES = "0.0001 0.000464 0.00215 0.01; authors: 0.002 0.001 0.005 0.0005 0.01 0.0001"


def mqar(
    out: Annotated[
        Path, Option(help="Folder of the result and of the runs.", callback=expanded)
    ] = Path("mqar"),
    protocol: Annotated[str, Option(help="Of zoology, authors.")] = "zoology",
    models: Annotated[
        list[str], Option("--model", help=f"Of {', '.join(NAMES)}; repeat.")
    ] = MODELS,
    widths: Annotated[list[int], Option("--width", help="Model width; repeat.")] = WIDTHS,
    learning_rates: Annotated[
        list[float] | None, Option("--lr", help="Learning rate; repeat.", show_default=RATES)
    ] = None,
    skip_solved: Annotated[bool, Option(help="After a rate has solved it, try no others.")] = False,
    seq_len: Annotated[int, Option(help="Tokens a row.")] = 512,
    num_pairs: Annotated[int, Option(help="Pairs a row.")] = 64,
    vocab_size: Annotated[int, Option(help="Tokens known.")] = 8192,
    train_pairs: Annotated[list[int] | None, Option(help="Pairs to train on; repeat.")] = None,
    train_rows: Annotated[int, Option(help="Rows to train on.")] = 100_000,
    test_rows: Annotated[int, Option(help="Rows to test on.")] = 3_000,
    batch_size: Annotated[int, Option(help="Rows a step.")] = 128,
    epochs: Annotated[int, Option(help="At most.")] = 64,
    seed: Annotated[int, Option(help="Of weights and order.")] = 123,
    precision: Annotated[str, Option(help="fp32, bf16 or auto.")] = "fp32",
    compile: Annotated[bool, Option(help="Use torch.compile.")] = False,
    cuda_graph: Annotated[bool, Option(help="Replay steps as CUDA graphs.")] = False,
    jobs: Annotated[int, Option(min=1, help="Trainings at the same time, over all GPUs.")] = 1,
    device: Annotated[str | None, Option(help="cpu, cuda or cuda:N.")] = None,
) -> None:
    """Train GSA and other mixers on multi-query associative recall (MQAR), and compare them.

    Without options: Zoology's full protocol; with `--protocol authors` that of the public program
    of GSA's first author (the paper does not say its own). Both take many GPU hours; a run ends
    when it has solved the task. Other options replace parts. A folder goes on where it was left.
    """
    given = locals().copy()
    from mezzo_core.reproduction.tables import format_value

    from mezzo_gsa.reproduction.mqar import PROTOCOLS, sweep

    if protocol not in PROTOCOLS:
        raise UserError(f"no protocol is named {protocol!r}{nearest(protocol, PROTOCOLS)}")
    whole = PROTOCOLS[protocol]
    config = with_options(whole, {**given, "task": with_options(whole.task, given)})
    result = sweep(config, out, device=device, jobs=jobs)
    rows = []
    for entry in result.entries:
        shown = (entry.value, *map(entry.details.get, ("lr", "state_bytes")))
        rows.append((entry.model, entry.column.removeprefix("C="), *map(format_value, shown)))
    show_table(("model", "C", "accuracy", "lr", "state (bytes a row)"), rows)
    show(f"{result.path} has every run")
