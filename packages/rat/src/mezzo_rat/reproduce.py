"""Rerun the paper's tables and claims at the scale of this machine, and report what came out."""

import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from mezzo_core.errors import UserError, nearest
from mezzo_core.papers import (
    Experiment,
    Figure,
    Finding,
    PaperReport,
    Published,
    Report,
    Status,
    environment,
    load_bench,
    load_experiments,
    load_published,
    prepare_folder,
    render_report,
)
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mezzo_rat.reproduction import scale as scales
from mezzo_rat.reproduction.evidence import Evidence
from mezzo_rat.reproduction.figures import draw_figures, write_sample
from mezzo_rat.reproduction.gpu.layouts import ids_of
from mezzo_rat.reproduction.gpu.scale import TABLES, Selection, SpeedScale
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
"""How the tiny trainings' budget was spent, for the report."""


def reproduce(only: Sequence[str] | None, scale: str, out: Path) -> list[Finding]:
    """Rerun tables, claims and checks, and write report.md, .html and .json into `out`.

    The tiny models stay in `out/runs`, for `mezzo-rat generate`. What an earlier reproduction left
    in `out` is replaced.

    Args:
        only: ids of tables, claims or checks; None or empty means all.
        scale: one of SCALES.
        out: the report's folder, made if needed.

    Raises:
        UserError: if an id or the scale is unknown, `out` cannot be written, or the scale needs a
            GPU and there is none.
    """
    start = time.perf_counter()
    report = reproduce_paper(only, scale, out)
    whole = Report(
        papers=(report,),
        scale=scale,
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        seconds=time.perf_counter() - start,
        environment=environment(),
    )
    render_report(whole, out)
    show(report, out)
    return list(report.findings)


def reproduce_paper(only: Sequence[str] | None, scale: str, out: Path) -> PaperReport:
    """Do what `reproduce` does, all but writing the report."""
    published = read_published()
    wanted = _known_ids(published, only)
    if scale not in scales.SCALES:
        raise UserError(f"no scale is named {scale!r}{nearest(scale, SCALES)}")
    budget = scales.SCALES[scale]
    if budget.speed is not None:
        budget.speed.check_device()
    experiments = load_experiments(results_folder())
    prepare_folder(out)
    shutil.rmtree(out / "speed", ignore_errors=True)
    console = Console(stderr=True)
    if budget.speed is not None:
        experiments += measure_speed(budget.speed, published, wanted, out, console)
    with (
        _threads(budget.threads),
        Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
        ) as progress,
    ):
        task = progress.add_task("exact checks")

        def watch(name: str, done: int, of: int) -> None:
            progress.update(task, description=name, completed=done, total=of)

        evidence = Evidence(budget, out, watch)
        findings = find_all(published, evidence, wanted, experiments)
        watch("figures", 1, 1)
        return PaperReport(
            name="rat",
            published=published,
            findings=findings,
            figures=[*draw_figures(evidence, out / "figures"), *speed_figures(out)],
            samples=write_sample(evidence),
            bench=load_bench(results_folder()),
            settings=(evidence.training_setting, CHOICE) if evidence.trained else (),
        )


def measure_speed(
    speed: SpeedScale, published: Published, wanted: list[str] | None, out: Path, console: Console
) -> list[Experiment]:
    """Measure the speed tables that the wanted ids need, into `out/speed`; return what is there."""
    only = tuple(name for name in TABLES if wanted is None or set(wanted) & ids_of(name))
    if only:
        measure_tables(
            speed,
            out / "speed" / speed.device,
            published,
            Selection(only=only),
            say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
        )
    return load_experiments(out / "speed")


def speed_figures(out: Path) -> list[Figure]:
    """Return the figures of the speed tables that this run measured."""
    return [
        Figure(
            path,
            f"Speed: {path.stem.removeprefix('speed_')}",
            "Our lines over the length beside the paper's; the settings stand at the tables.",
        )
        for path in sorted((out / "speed").glob("*/*.png"))
    ]


def read_published() -> Published:
    """Return the paper's tables and claims."""
    return load_published(Path(__file__).with_name("published.toml"))


def results_folder() -> Path:
    """Return where a checkout keeps results measured on GPUs; a wheel has no such folder."""
    return Path(__file__).parents[2] / "results"


def show(report: PaperReport, out: Path) -> None:
    """Print what came out, one line a finding that was attempted, and where the report is."""
    console = Console()
    table = Table("table, claim or check", "status", "in one sentence")
    left_out = 0
    for finding in report.findings:
        if finding.status is Status.NOT_ATTEMPTED and len(report.findings) > 1:
            left_out += 1
        else:
            table.add_row(finding.id, finding.status.value, finding.summary)
    console.print(table)
    if left_out:
        console.print(f"{left_out} more were not attempted; the report says why.")
    console.print(f"Report: {out / 'report.html'} (also report.md, report.json)", soft_wrap=True)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _known_ids(published: Published, only: Sequence[str] | None) -> list[str] | None:
    if not only:
        return None
    known = (*published.ids, *CHECKS)
    for id in only:
        if id not in known:
            raise UserError(f"no table or claim is named {id!r}{nearest(id, known)}")
    return list(only)
