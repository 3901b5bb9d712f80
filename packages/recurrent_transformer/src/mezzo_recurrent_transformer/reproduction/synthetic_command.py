"""`mezzo-recurrent-transformer synthetic`: the sweep as a command.

The defaults of `SweepConfig` are repeated here, so that help needs no torch; a test compares them.
"""

from pathlib import Path
from typing import Annotated

from mezzo_core.console import show, show_table
from mezzo_core.errors import UserError, nearest
from mezzo_core.options import with_options
from mezzo_core.paths import expanded
from typer import Option

TASK_NAMES = [
    "in-context-recall",
    "noisy-in-context-recall",
    "fuzzy-in-context-recall",
    "selective-copying",
    "memorization",
    "compression",
    "copying",
]
MODELS = ["transformer", "recurrent"]
RATES, DECAYS, SEEDS = [1e-3, 5e-4, 1e-4], [0.0, 0.1], [0, 1, 2]


def synthetic(
    out: Annotated[
        Path, Option(help="Folder of the result and the runs.", callback=expanded)
    ] = Path("synthetic"),
    task: Annotated[list[str], Option(help=f"Of {', '.join(TASK_NAMES)}; repeat.")] = TASK_NAMES,
    models: Annotated[
        list[str], Option("--model", help=f"Of {', '.join(MODELS)}; repeat.")
    ] = MODELS,
    learning_rates: Annotated[list[float], Option("--lr", help="Learning rate; repeat.")] = RATES,
    weight_decays: Annotated[list[float], Option("--decay", help="Weight decay; repeat.")] = DECAYS,
    seeds: Annotated[list[int], Option("--seed", help="Of weights and order; repeat.")] = SEEDS,
    d_model: Annotated[int, Option("--width", help="Of the layer, a multiple of 8.")] = 128,
    train_rows: Annotated[int | None, Option(help="Rows to train on; default: MAD's.")] = None,
    test_rows: Annotated[int | None, Option(help="Rows to test on; default: MAD's.")] = None,
    batch_size: Annotated[int, Option(help="Rows a step.")] = 128,
    epochs: Annotated[int, Option(help="At most.")] = 200,
    max_steps: Annotated[int | None, Option(help="Most steps of a run.")] = None,
    precision: Annotated[str, Option(help="fp32, bf16 or auto.")] = "auto",
    compile: Annotated[bool, Option(help="Use torch.compile.")] = False,
    cuda_graph: Annotated[bool, Option(help="Replay steps as CUDA graphs.")] = False,
    jobs: Annotated[int, Option(min=1, help="Trainings at the same time, over all GPUs.")] = 1,
    device: Annotated[str | None, Option(help="cpu, cuda or cuda:N.")] = None,
) -> None:
    """Train one recurrent layer and one Transformer layer on synthetic tasks, and compare them.

    Without options: MAD's six tasks and copying in full, many GPU hours. A folder goes on where it
    was left.
    """
    given = locals().copy()
    from mezzo_core.reproduction.figures import draw_result
    from mezzo_core.reproduction.measurement import read_result
    from mezzo_core.reproduction.tables import format_value

    from mezzo_recurrent_transformer.reproduction.synthetic import SweepConfig, sweep
    from mezzo_recurrent_transformer.synthetic.tasks import TASKS

    for name in task:
        if name not in TASKS:
            raise UserError(f"no task is named {name!r}{nearest(name, TASKS)}")
    tasks = [with_options(TASKS[name], given) for name in task]
    config = with_options(SweepConfig(), {**given, "tasks": tasks})
    result = sweep(config, out, device=device, jobs=jobs)
    found = read_result(result.path)
    rows = []
    for column in found.columns:
        for name in result.header.models:
            # Another call may train the other model.
            values = (found.typical(name, column, group) for group in found.groups)
            rows.append((column, name, *map(format_value, values)))
    show_table(("task", "model", *found.groups), rows)
    figure = result.path.with_suffix(".png")
    draw_result(found, figure)
    show(f"{result.path} has every run, {figure} shows them")
