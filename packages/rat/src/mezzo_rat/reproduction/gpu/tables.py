"""Measurement of the paper's speed tables, one after another, into result files and figures."""

from pathlib import Path
from typing import Any

from mezzo_core.bench import environment
from mezzo_core.papers import Published
from mezzo_core.papers.cells import Result, Say

from mezzo_rat.reproduction.gpu.decode import measure_decoding
from mezzo_rat.reproduction.gpu.figures import draw
from mezzo_rat.reproduction.gpu.layers import measure_layers
from mezzo_rat.reproduction.gpu.result_files import VIEWS, contexts, result_files
from mezzo_rat.reproduction.gpu.shapes import Selection, SpeedShapes
from mezzo_rat.reproduction.gpu.throughput import measure_throughput


def measure_tables(
    shapes: SpeedShapes,
    folder: Path,
    published: Published,
    selection: Selection,
    *,
    say: Say,
    commit: str | None = None,
) -> None:
    """Measure the selected part of the speed tables.

    A cell that was measured at this commit is not measured again. A cell of another commit stays
    until it is measured again.

    Args:
        shapes: the sizes.
        folder: where the result files and their figures go.
        published: the paper's numbers, drawn beside ours.
        selection: which tables, lengths and models.
        say: called with a line for each cell.
        commit: of the code that is measured; None: the checkout's.

    Raises:
        UserError: if the device is missing, the selection names something unknown, files in
            `folder` are of another machine or cannot be written, or a layer computes wrong results.
    """
    device = shapes.check_device()
    selection.check(shapes)
    origin: dict[str, Any] = environment(device)
    origin["commit"] = commit or origin["commit"]
    results = {name: Result(table, folder, origin) for name, table in result_files(shapes).items()}
    phases = {"train": "table6", "prefill": "table7"}
    wanted = {p: results[name] for p, name in phases.items() if selection.table(name)}
    if wanted:
        measure_layers(shapes, selection, wanted, say)
    if selection.table("table8"):
        measure_decoding(shapes, selection, results["table8"], say)
    if selection.table("fig5"):
        places = {T: [(results["fig5"], f"T={T}")] for T in shapes.contexts}
        for view, context in contexts(shapes).items():
            places[context].append((results[view], "Throughput"))
        measure_throughput(shapes, selection, places, say)
    for result in results.values():
        if result.cells and result.table.name not in VIEWS:
            draw(result, published)
