"""`mezzo-gsa mqar`: the sweep as a command."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from mezzo_core.console import show, show_table
from mezzo_core.errors import UserError, nearest
from mezzo_core.paths import expanded
from mezzo_core.reproduction.tables import format_value
from typer import Option

from mezzo_gsa.reproduction.mqar import NAMES, PROTOCOLS, sweep

Config = TypeVar("Config", bound=Any)
FIELDS = {"model": "models", "width": "widths", "lr": "learning_rates"}
"""The field that an option replaces, if it has another name."""
SLOTS = "Slots of a head of GSA; below 1: share of the width."


def field(name: str, text: str) -> Any:
    """Return an option that replaces this field of the protocol; its help shows what is there."""
    there: dict[str, str] = {}
    for protocol, config in PROTOCOLS.items():
        value = getattr(config if hasattr(config, name) else config.task, name)
        there[protocol] = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    first, *others = there.items()
    differing = [f"{protocol}: {value}" for protocol, value in others if value != first[1]]
    return Option(help=text, show_default="; ".join([first[1], *differing]))


def mqar(
    out: Annotated[
        Path, Option(help="Folder of the result and of the runs.", callback=expanded)
    ] = Path("mqar"),
    protocol: Annotated[str, Option(help=f"Of {', '.join(PROTOCOLS)}.")] = "zoology",
    model: Annotated[list[str] | None, field("models", f"Of {', '.join(NAMES)}; repeat.")] = None,
    width: Annotated[list[int] | None, field("widths", "Model width; repeat.")] = None,
    lr: Annotated[list[float] | None, field("learning_rates", "Learning rate; repeat.")] = None,
    skip_solved: Annotated[
        bool | None, field("skip_solved", "After a rate has solved it, try no others.")
    ] = None,
    seq_len: Annotated[int | None, field("seq_len", "Tokens a row.")] = None,
    num_pairs: Annotated[int | None, field("num_pairs", "Pairs a row.")] = None,
    vocab_size: Annotated[int | None, field("vocab_size", "Tokens known.")] = None,
    random_non_queries: Annotated[
        bool | None, field("random_non_queries", "Random tokens where nothing is asked.")
    ] = None,
    train_pairs: Annotated[list[int] | None, Option(help="Pairs to train on; repeat.")] = None,
    train_rows: Annotated[int | None, field("train_rows", "Rows to train on.")] = None,
    test_rows: Annotated[int | None, field("test_rows", "Rows to test on.")] = None,
    batch_size: Annotated[int | None, field("batch_size", "Rows a step.")] = None,
    epochs: Annotated[int | None, field("epochs", "At most.")] = None,
    num_layers: Annotated[int | None, field("num_layers", "Layers.")] = None,
    identity_mlp: Annotated[
        bool | None, field("identity_mlp", "Add each layer's output once more, normalized.")
    ] = None,
    num_slots: Annotated[float | None, field("num_slots", SLOTS)] = None,
    damping: Annotated[float | None, field("damping", "Damping of GSA's gates.")] = None,
    scale: Annotated[
        str | None, field("scale", "Of GSA's slot logits: one, or head_width (D^-1/2).")
    ] = None,
    seed: Annotated[int | None, field("seed", "Of weights and order.")] = None,
    precision: Annotated[str | None, field("precision", "fp32, bf16 or auto.")] = None,
    compile: Annotated[bool | None, field("compile", "Use torch.compile.")] = None,
    cuda_graph: Annotated[bool | None, field("cuda_graph", "Replay steps as CUDA graphs.")] = None,
    device: Annotated[str | None, Option(help="cpu, cuda or cuda:N.")] = None,
) -> None:
    """Train GSA and other mixers on multi-query associative recall (MQAR), and compare them.

    Without options: Zoology's full protocol; with `--protocol authors` that of the public program
    of GSA's first author (the paper does not say its own). Both take many GPU hours; a run ends
    when it has solved the task. Other options replace parts. A folder goes on where it was left.
    """
    given = {FIELDS.get(name, name): value for name, value in locals().items()}
    if protocol not in PROTOCOLS:
        raise UserError(f"no protocol is named {protocol!r}{nearest(protocol, PROTOCOLS)}")
    whole = PROTOCOLS[protocol]
    config = _replaced(whole, {**given, "task": _replaced(whole.task, given)})
    result = sweep(config, out, device=device)
    rows = []
    for entry in result.entries:
        shown = (entry.value, *map(entry.details.get, ("lr", "state_bytes")))
        rows.append((entry.model, entry.column.removeprefix("C="), *map(format_value, shown)))
    show_table(("model", "C", "accuracy", "lr", "state (bytes a row)"), rows)
    show(f"{result.path} has every run")


def _replaced(config: Config, given: dict[str, Any]) -> Config:
    """Replace the fields that were given; typer's lists become tuples."""
    found = {each.name: given.get(each.name) for each in fields(config)}
    values = {name: value for name, value in found.items() if value not in (None, [])}
    return replace(config, **{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
