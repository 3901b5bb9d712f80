"""`reproduce`: answer a paper's tables and claims at the scale of this machine, and report it.

A package describes its paper once, as a `Reproduction`; everything else is here.
"""

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as ConsoleTable

from mezzo_core.bench.origin import origin
from mezzo_core.errors import UserError, nearest
from mezzo_core.nn.contract import MixerConfig
from mezzo_core.papers.claims import Answer, Check, Finding, Kind, check_complete, find
from mezzo_core.papers.criteria import Outcome
from mezzo_core.papers.figures import report_figures
from mezzo_core.papers.measurement import How, Measurement, read_results
from mezzo_core.papers.published import Published, load_published
from mezzo_core.papers.report import PaperReport, Report, prepare_folder, write_report
from mezzo_core.papers.trainings import Budget, Trainings, write_sample
from mezzo_core.train.config import TrainConfig

Say = Callable[[str], None]
Measurer = Callable[[Any, Path, Say], Measurement | None]
"""Measures something at a scale's sizes, into a folder; None if the sizes leave it out."""


@dataclass(frozen=True)
class Scale:
    """How much one reproduction runs.

    Attributes:
        budget: of the tiny trainings.
        sizes: given to the paper's measurers; None: nothing is measured.
        sample_tokens: length of the text that a tiny model writes.
        threads: of this process; None keeps torch's choice. On a busy machine, threads that wait
            for each other make tiny work slow.
        needs_gpu: whether the sizes are for a GPU.
    """

    budget: Budget
    sizes: Any = None
    sample_tokens: int = 400
    threads: int | None = None
    needs_gpu: bool = False


@dataclass(frozen=True)
class Reproduction:
    """A paper: what it says, what answers it, and what is trained and measured for that.

    Attributes:
        name: of the package, without "mezzo_".
        module: the file of a module in the package's top folder, `__file__` of claims.py.
        answers: one for each table and claim, in the paper's order.
        checks: of the method.
        models: the recipes of the tiny trainings, by the paper's names.
        sample: the model that writes a sample text.
        scales: by the name that `--scale` takes, the default first.
        measurers: what a run can measure besides, by name.
        layers: the layers whose costs are drawn, of width `layers_width`, by the paper's names.
        notes: what a reader must know about the tiny trainings.
    """

    name: str
    module: str
    answers: Sequence[Answer]
    checks: Sequence[Check]
    models: Mapping[str, TrainConfig]
    sample: str
    scales: Mapping[str, Scale]
    measurers: Mapping[str, Measurer] = field(default_factory=dict)
    layers: Mapping[str, MixerConfig] = field(default_factory=dict)
    layers_width: int = 2048
    notes: tuple[str, ...] = ()

    @property
    def published(self) -> Published:
        """The paper's tables and claims as printed."""
        return load_published(Path(self.module).with_name("published.toml"))

    @property
    def results_folder(self) -> Path:
        """The committed results: inside an installed package, at its side in a checkout."""
        installed = Path(self.module).with_name("results")
        return installed if installed.exists() else Path(self.module).parents[2] / "results"

    def reproduce(self, only: Sequence[str] | None, scale: str, out: Path) -> list[Finding]:
        """Answer tables, claims and checks, and write report.md, .html and .json into `out`.

        The tiny models stay in `out/NAME/runs`, where the `generate` command can use them. Results
        of an earlier reproduction in `out` are replaced.

        Args:
            only: ids of tables, claims or checks; None or empty means all.
            scale: one of `scales`.
            out: the report's folder; it is made if needed.

        Raises:
            UserError: if an id or the scale is unknown, `out` cannot be written, or the scale needs
                a GPU and there is none.
        """
        (report,) = reproduce_papers([self], only, scale, out)
        return list(report.findings)

    def report(self, only: Sequence[str] | None, scale: str, out: Path) -> PaperReport:
        """Do what `reproduce` does, but return the report and do not write it."""
        published = self.published
        check_complete(published, self.answers)
        known = (*published.ids, *(check.id for check in self.checks))
        for id in only or ():
            if id not in known:
                raise UserError(f"no table or claim is named {id!r}{nearest(id, known)}")
        if scale not in self.scales:
            raise UserError(f"no scale is named {scale!r}{nearest(scale, self.scales)}")
        chosen = self.scales[scale]
        if chosen.needs_gpu and not torch.cuda.is_available():
            raise UserError(f"--scale {scale} needs a CUDA GPU, and torch sees none here")
        folder = prepare_folder(out, self.name)
        console = Console(stderr=True)
        with _threads(chosen.threads), _progress(console) as watch:
            run = Run(self, chosen, folder, watch, console)
            findings = [
                _guarded(answer.id, partial(find, answer, published, run))
                for answer in self.answers
                if not only or answer.id in only
            ]
            findings += [
                _guarded(check.id, partial(_finding, check))
                for check in self.checks
                if not only or check.id in only
            ]
            watch("figures", 1, 1)
            trainings = run.trainings
            done = trainings.done
            return PaperReport(
                name=self.name,
                published=published,
                findings=findings,
                figures=report_figures(self, run, folder / "figures"),
                samples=[write_sample(trainings, self.sample, chosen.sample_tokens)]
                if done
                else [],
                results=run.results,
                notes=(trainings.setting, *self.notes) if done else (),
            )


class Run:
    """One reproduction: its committed results, and what it trains and measures itself, once."""

    def __init__(
        self,
        paper: Reproduction,
        scale: Scale,
        folder: Path,
        watch: Callable[[str, int, int], None],
        console: Console,
    ) -> None:
        self.results = read_results(paper.results_folder)
        self.trainings = Trainings(paper.models, scale.budget, folder / "runs", watch)
        self._paper, self._scale, self._folder = paper, scale, folder
        self._watch, self._console = watch, console
        self.timed: dict[str, Measurement | None] = {}

    def trained(self, models: Sequence[str], by_length: bool) -> Measurement | None:
        """See `mezzo_core.papers.claims.Run`."""
        return self.trainings.measurement(models, by_length)

    def measured(self, name: str) -> Measurement | None:
        """See `mezzo_core.papers.claims.Run`."""
        if name not in self.timed:
            self._watch(f"measuring {name}", 0, 1)
            self.timed[name] = None
            if self._scale.sizes is not None:
                measurer = self._paper.measurers[name]
                self.timed[name] = measurer(self._scale.sizes, self._folder / "speed", self._say)
        return self.timed[name]

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def reproduce_papers(
    papers: Sequence[Reproduction], only: Sequence[str] | None, scale: str, out: Path
) -> list[PaperReport]:
    """Reproduce papers, write report.md, .html and .json into `out`, and print the findings.

    A paper without a scale of this name takes its first one, unless it is the only paper.
    """
    start = time.perf_counter()
    reports = []
    for paper in papers:
        known = scale if len(papers) == 1 or scale in paper.scales else next(iter(paper.scales))
        reports.append(paper.report(only, known, out))
    whole = Report(
        papers=reports,
        scale=scale,
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        seconds=time.perf_counter() - start,
        origin=origin(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    )
    write_report(whole, out)
    for report in reports:
        _show(report)
    Console().print(f"Report: {out / 'report.html'} (also report.md, report.json)", soft_wrap=True)
    return reports


def _finding(check: Check) -> Finding:
    judgement = check.work()
    return Finding(
        check.id, "check", How.PAPER, judgement.outcome, judgement.summary, (), judgement.details
    )


def _guarded(id: str, work: Callable[[], Finding]) -> Finding:
    """Return a finding. One that fails with an error differs, and says so, and the others go on.

    A `UserError`, such as a full disk, stops the reproduction.
    """
    try:
        return work()
    except UserError:
        raise
    except Exception as error:
        summary = f"could not be answered: {type(error).__name__}: {error}"
        kind: Kind = "check" if ".check." in id else "table" if ".table" in id else "claim"
        return Finding(id, kind, How.PAPER, Outcome.DIFFERS, summary)


def _show(report: PaperReport) -> None:
    """Print the findings, one line for each, without those that were not attempted."""
    console = Console()
    table = ConsoleTable("table, claim or check", "how it was run", "outcome", "in one sentence")
    shown = [f for f in report.findings if f.outcome is not None or len(report.findings) == 1]
    for finding in shown:
        outcome = finding.outcome.value if finding.outcome else "-"
        table.add_row(finding.id, finding.how.value, outcome, finding.summary)
    console.print(table)
    if left_out := len(report.findings) - len(shown):
        console.print(f"{left_out} more were not attempted; the report says why.")


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Set torch's number of threads in this context; None leaves it unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar; running work reports its progress to the yielded function."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as bars:
        task = bars.add_task("counting and checking")

        def watch(name: str, done: int, of: int) -> None:
            bars.update(task, description=name, completed=done, total=of)

        yield watch
