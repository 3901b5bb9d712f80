"""`reproduce`: answer a paper's tables and claims at the scale of this machine, and report it.

A package describes its paper once, as a `Reproduction`; everything else is here.
"""

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mezzo_core.console import show, show_table
from mezzo_core.device import choose_device
from mezzo_core.errors import UserError, nearest
from mezzo_core.reproduction.claims import TRAININGS, Evidence, Finding, Run, check_complete, find
from mezzo_core.reproduction.figures import draw_result, model_names
from mezzo_core.reproduction.measurement import Measurement, read_results
from mezzo_core.reproduction.origin import origin
from mezzo_core.reproduction.published import Published, load_published
from mezzo_core.reproduction.report import Figure, PaperReport, Report, prepare_folder, write_report
from mezzo_core.reproduction.speeds import Speeds
from mezzo_core.reproduction.tiny import Budget, train_tiny
from mezzo_core.train.config import TrainConfig


@dataclass(frozen=True)
class Scale:
    """How much one reproduction runs."""

    budget: Budget  # of the tiny trainings
    sizes: Any = None  # of the paper's speeds; None: nothing is measured
    threads: int | None = None  # of this process: few for tiny work; None keeps torch's choice
    needs_gpu: bool = False  # whether the sizes are for a GPU


@dataclass(frozen=True)
class Reproduction:
    """A paper: its claims, the evidence for them, and what to train and measure for it."""

    name: str  # of the package, without "mezzo_"
    module: str  # the file of its claims.py, `__file__` there
    answers: Mapping[str, Sequence[Evidence]]  # by id, in the paper's order
    models: Mapping[str, TrainConfig]  # recipes of the tiny trainings, by the paper's names
    scales: Mapping[str, Scale]  # by the name that `--scale` takes, the default first
    lead: str = ""  # the claim whose committed result the report shows first, as a figure
    speeds: Speeds | None = None  # what else a run can measure
    notes: tuple[str, ...] = ()  # what a reader must know about the tiny trainings

    @property
    def published(self) -> Published:
        """The paper's tables and claims as printed."""
        return load_published(Path(self.module).with_name("published.toml"))

    @property
    def results_folder(self) -> Path:
        """The committed results: inside an installed package, at its side in a checkout."""
        installed = Path(self.module).parents[1] / "results"
        return installed if installed.exists() else Path(self.module).parents[3] / "results"

    def find(self, run: Run, only: Sequence[str] | None = None) -> list[Finding]:
        """Return the findings about all tables and claims, or some, in the paper's order."""
        printed = self.published.by_id
        kept = (each for id, each in printed.items() if not only or id in only)
        return [find(each, self.answers.get(each.id, ()), run) for each in kept]

    def committed(self) -> list[Finding]:
        """Return what counts and committed results say, without a training or a measurement."""
        nothing = Run(read_results(self.results_folder), lambda name: None)
        return self.find(nothing)

    def report(self, only: Sequence[str] | None, scale: str, out: Path) -> PaperReport:
        """Answer tables and claims, and return their report; see `reproduce_papers`."""
        published = self.published
        check_complete(published, self.answers)
        for id in only or ():
            if id not in published.by_id:
                raise UserError(f"no table or claim is named {id!r}{nearest(id, published.by_id)}")
        if scale not in self.scales:
            raise UserError(f"no scale is named {scale!r}{nearest(scale, self.scales)}")
        if self.scales[scale].needs_gpu and not torch.cuda.is_available():
            raise UserError(f"--scale {scale} needs a CUDA GPU, and torch sees none here")
        threads = torch.get_num_threads()
        torch.set_num_threads(self.scales[scale].threads or threads)
        try:
            return self._report(only, self.scales[scale], prepare_folder(out, self.name))
        finally:
            torch.set_num_threads(threads)

    def _report(self, only: Sequence[str] | None, scale: Scale, folder: Path) -> PaperReport:
        """Train and measure under a progress bar what the answers ask for, each once."""
        published, results = self.published, read_results(self.results_folder)
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bars:
            task = bars.add_task("counting")

            def watch(name: str, done: int, of: int) -> None:
                bars.update(task, description=name, completed=done, total=of)

            makers: dict[str, Callable[[], Measurement | None]]
            makers = {TRAININGS: partial(train_tiny, self.models, scale.budget, folder, watch)}
            if self.speeds and scale.sizes is not None:
                given = (scale.sizes, folder / "measured", partial(show, console=console))
                makers |= {n: partial(self.speeds.measure, n, *given) for n in self.speeds.makers}
            found: dict[str, Measurement | Exception | None] = {}

            def measured(name: str) -> Measurement | None:
                if name not in found and name in makers:
                    watch(f"measuring {name}", 0, 1)
                    try:
                        found[name] = makers[name]()
                    except Exception as error:
                        found[name] = error
                ours = found.get(name)
                if isinstance(ours, Exception):
                    raise ours
                return ours

            run = Run(results, measured)
            findings = self.find(run, only)
            watch("figures", 1, 1)
            names = [*model_names(published, results.values()), *self.models]

            def draw(name: str, ours: Measurement, title: str, text: str) -> Figure:
                path = folder / "figures" / f"{name}.png"
                draw_result(ours, path, names)
                return Figure(path, title, text)

            lead = None
            for first in (f.measurements[0] for f in findings if f.id == self.lead):
                lead = draw("lead", first, self.lead, f"From {first.source}.json")
            figures = [
                draw(name, ours, ours.title or name, ours.setting)
                for name, ours in found.items()
                if isinstance(ours, Measurement)
            ]
            trained = found.get(TRAININGS)
            notes = (trained.setting, *self.notes) if isinstance(trained, Measurement) else ()
            return PaperReport(self.name, published, findings, figures, notes, lead)


def reproduce_papers(
    papers: Sequence[Reproduction], only: Sequence[str] | None, scale: str, out: Path
) -> list[PaperReport]:
    """Reproduce papers, write report.html and .json into `out`, and print the findings.

    The tiny models stay in `out/NAME/runs`, where the `generate` command can use them. Results of
    an earlier reproduction in `out`, which is made if needed, are replaced. `only` has ids of
    tables or claims; None or empty means all. Of several papers, one without a scale of the given
    name takes its first.

    Raises:
        UserError: if an id or the scale is unknown, `out` cannot be written, or the scale needs a
            GPU and there is none.
    """
    start = time.perf_counter()
    reports = []
    for paper in papers:
        known = scale if len(papers) == 1 or scale in paper.scales else next(iter(paper.scales))
        reports.append(paper.report(only, known, out))
    program = Path(sys.argv[0])
    as_module = ["python", "-m", program.parent.name]
    begin = as_module if program.name == "__main__.py" else [program.name]
    command = shlex.join([*begin, *sys.argv[1:]])
    seconds = time.perf_counter() - start
    whole = Report(reports, scale, command, seconds, origin(choose_device(None, None)))
    write_report(whole, out)
    for report in reports:
        _show(report)
    show(f"Report: {out / 'report.html'} (also report.json)")
    return reports


def _show(report: PaperReport) -> None:
    """Print the findings, one line for each, without those that were not attempted."""
    shown = [f for f in report.findings if f.outcome is not None or len(report.findings) == 1]
    rows = [(f.id, f.how.value, f.outcome.value if f.outcome else "-", f.summary) for f in shown]
    show_table(("table or claim", "how it was run", "outcome", "in one sentence"), rows)
    if left_out := len(report.findings) - len(shown):
        show(f"{left_out} more were not attempted; the report says why.")
