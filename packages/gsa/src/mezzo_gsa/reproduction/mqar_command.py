"""`mezzo-gsa mqar`: the sweep as a command.

Its help, which needs no torch, says the defaults in words; a test compares them with the protocols.
"""

from pathlib import Path
from typing import Annotated, Any

from mezzo_core.console import show, show_table
from mezzo_core.errors import UserError, nearest
from mezzo_core.options import with_options
from mezzo_core.paths import expanded
from typer import Option

NAMES = ("attention", "gsa", "gsa_one_head", "gla", "hgrn2", "retnet")
RATES = "0.0001 0.000464 0.00215 0.01; authors: 0.002 0.001 0.005 0.0005 0.01 0.0001"


def part(text: str, default: str, *word: str) -> Any:
    """Return an option that replaces a part of the protocol, which has this default."""
    return Option(*word, help=text, show_default=default)


def mqar(
    out: Annotated[
        Path, Option(help="Folder of the result and of the runs.", callback=expanded)
    ] = Path("mqar"),
    protocol: Annotated[str, Option(help="Of zoology, authors.")] = "zoology",
    models: Annotated[
        list[str] | None,
        part(f"Of {', '.join(NAMES)}; repeat.", "attention gsa gla hgrn2 retnet", "--model"),
    ] = None,
    widths: Annotated[
        list[int] | None, part("Model width; repeat.", "64 128 256 512", "--width")
    ] = None,
    learning_rates: Annotated[
        list[float] | None, part("Learning rate; repeat.", RATES, "--lr")
    ] = None,
    skip_solved: Annotated[
        bool | None, part("After a rate has solved it, try no others.", "False")
    ] = None,
    seq_len: Annotated[int | None, part("Tokens a row.", "512")] = None,
    num_pairs: Annotated[int | None, part("Pairs a row.", "64")] = None,
    vocab_size: Annotated[int | None, part("Tokens known.", "8192")] = None,
    train_pairs: Annotated[list[int] | None, Option(help="Pairs to train on; repeat.")] = None,
    train_rows: Annotated[int | None, part("Rows to train on.", "100000")] = None,
    test_rows: Annotated[int | None, part("Rows to test on.", "3000")] = None,
    batch_size: Annotated[int | None, part("Rows a step.", "128")] = None,
    epochs: Annotated[int | None, part("At most.", "64")] = None,
    seed: Annotated[int | None, part("Of weights and order.", "123")] = None,
    precision: Annotated[str | None, part("fp32, bf16 or auto.", "fp32")] = None,
    compile: Annotated[bool | None, part("Use torch.compile.", "False")] = None,
    cuda_graph: Annotated[bool | None, part("Replay steps as CUDA graphs.", "False")] = None,
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
