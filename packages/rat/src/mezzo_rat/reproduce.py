"""Rerun the paper's tables and claims at the scale of this machine, and report what came out."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from mezzo_core.papers import (
    Experiment,
    Figure,
    Finding,
    PaperReport,
    Published,
    load_bench,
    load_experiments,
    load_published,
    prepare_folder,
)
from mezzo_core.reproduction.flow import (
    known_ids,
    known_scale,
    progress,
    report_papers,
    threads,
)
from rich.console import Console

from mezzo_rat.reproduction import scale as scales
from mezzo_rat.reproduction.evidence import Evidence
from mezzo_rat.reproduction.figures import draw_figures, write_sample
from mezzo_rat.reproduction.gpu.result_files import ids_of
from mezzo_rat.reproduction.gpu.shapes import TABLES, Selection, SpeedShapes
from mezzo_rat.reproduction.gpu.tables import measure_tables
from mezzo_rat.reproduction.limits import CHECKS
from mezzo_rat.reproduction.tables import find_all

SCALES = tuple(scales.SCALES)
"""The names that `--scale` takes, the default first."""


CHOICE = (
    "Learning rate, batch and warm-up are the same for all; batch 2 and a warm-up over a fifth of "
    "the steps were chosen on the embedded novels by trying the RNN, RAT(L=16) and attention, all "
    "three of which they help. Orders at this size depend on the budget: with a warm-up over a "
    "twentieth of the steps, attention overshot and came out last of the four. So few tokens say "
    "little about larger models."
)
"""How the hyperparameters of the tiny trainings were chosen; the report prints this."""


def reproduce(only: Sequence[str] | None, scale: str, out: Path) -> list[Finding]:
    """Rerun tables, claims and checks, and write report.md, .html and .json into `out`.

    The tiny models stay in `out/rat/runs`, where `mezzo-rat generate` can use them. Results of an
    earlier reproduction in `out` are replaced.

    Args:
        only: ids of tables, claims or checks; None or empty means all.
        scale: one of SCALES.
        out: the report's folder; it is made if needed.

    Raises:
        UserError: if an id or the scale is unknown, `out` cannot be written, or the scale needs a
            GPU and there is none.
    """
    (report,) = report_papers([reproduce_paper], only, scale, out)
    return list(report.findings)


def reproduce_paper(only: Sequence[str] | None, scale: str, out: Path) -> PaperReport:
    """Do what `reproduce` does, but return the report and do not write it."""
    published = read_published()
    wanted = known_ids(published, CHECKS, only)
    chosen = known_scale(scales.SCALES, scale)
    if chosen.speed is not None:
        chosen.speed.check_device()
    experiments = load_experiments(results_folder())
    folder = prepare_folder(out, "rat")
    shutil.rmtree(folder / "speed", ignore_errors=True)
    console = Console(stderr=True)
    if chosen.speed is not None:
        experiments += measure_speed(chosen.speed, published, wanted, folder, console)
    with threads(chosen.threads), progress(console) as watch:
        evidence = Evidence(chosen, folder, watch)
        findings = find_all(published, evidence, wanted, experiments)
        watch("figures", 1, 1)
        return PaperReport(
            name="rat",
            published=published,
            findings=findings,
            figures=[*draw_figures(evidence, folder / "figures"), *speed_figures(folder)],
            samples=write_sample(evidence),
            bench=load_bench(results_folder()),
            settings=(evidence.trainings.setting, CHOICE) if evidence.trainings.done else (),
        )


def measure_speed(
    speed: SpeedShapes,
    published: Published,
    wanted: list[str] | None,
    folder: Path,
    console: Console,
) -> list[Experiment]:
    """Measure the speed tables that the wanted ids need, into `folder/speed`; return them."""
    only = tuple(name for name in TABLES if wanted is None or set(wanted) & ids_of(name))
    if only:
        measure_tables(
            speed,
            folder / "speed" / speed.device,
            published,
            Selection(only=only),
            say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
        )
    return load_experiments(folder / "speed")


def speed_figures(folder: Path) -> list[Figure]:
    """Return the figures of the speed tables that this run measured."""
    return [
        Figure(
            path,
            f"Speed: {path.stem.removeprefix('speed_')}",
            "Our lines over the length beside the paper's; the settings stand at the tables.",
        )
        for path in sorted((folder / "speed").glob("*/*.png"))
    ]


def read_published() -> Published:
    """Return the paper's tables and claims."""
    return load_published(Path(__file__).with_name("published.toml"))


def results_folder() -> Path:
    """Return the folder of committed results in a checkout; a wheel has no such folder."""
    return Path(__file__).parents[2] / "results"
