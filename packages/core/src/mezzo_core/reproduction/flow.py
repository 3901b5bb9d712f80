"""The steps from a `reproduce` command to its report, which all papers share."""

import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mezzo_core.errors import UserError, nearest
from mezzo_core.papers import (
    Finding,
    Kind,
    PaperReport,
    Published,
    Report,
    Status,
    check_complete,
    describe_environment,
    render_report,
)
from mezzo_core.reproduction.evidence import Watch

RunScale = TypeVar("RunScale")
ReproducePaper = Callable[[Sequence[str] | None, str, Path], PaperReport]
"""Called with the wanted ids (None for all), the name of the scale and the report's folder."""


def report_papers(
    papers: Sequence[ReproducePaper], only: Sequence[str] | None, scale: str, out: Path
) -> list[PaperReport]:
    """Reproduce papers, write report.md, .html and .json into `out`, and print the findings."""
    start = time.perf_counter()
    reports = [reproduce_paper(only, scale, out) for reproduce_paper in papers]
    whole = Report(
        papers=reports,
        scale=scale,
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        seconds=time.perf_counter() - start,
        environment=describe_environment(),
    )
    render_report(whole, out)
    for report in reports:
        show(report)
    Console().print(f"Report: {out / 'report.html'} (also report.md, report.json)", soft_wrap=True)
    return reports


def show(report: PaperReport) -> None:
    """Print the findings, one line for each, without those that were not attempted."""
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


def known_scale(scales: Mapping[str, RunScale], name: str) -> RunScale:
    """Return the scale of this name.

    Raises:
        UserError: if there is none; the message shows similar names.
    """
    if name not in scales:
        raise UserError(f"no scale is named {name!r}{nearest(name, scales)}")
    return scales[name]


def known_ids(
    published: Published, checks: Collection[str], only: Sequence[str] | None
) -> list[str] | None:
    """Return the wanted ids, or None for all.

    Raises:
        UserError: if an id is unknown; the message shows similar ids.
    """
    known = (*published.ids, *checks)
    for id in only or ():
        if id not in known:
            raise UserError(f"no table or claim is named {id!r}{nearest(id, known)}")
    return list(only) if only else None


def find_all(
    published: Published,
    checks: Collection[str],
    only: Collection[str] | None,
    find: Callable[[str], Finding],
) -> list[Finding]:
    """Return a finding for each table, claim and check (in `only`), in the order of the paper."""
    findings = [find(id) for id in (*published.ids, *checks) if only is None or id in only]
    check_complete(published, findings, None if only is None else set(only))
    return findings


def guarded(id: str, work: Callable[[], Finding]) -> Finding:
    """Run a check. If it fails with an error, return a finding that says so, with status "differs".

    So the other checks still run. A `UserError`, such as a full disk, stops the reproduction.
    """
    try:
        return work()
    except UserError:
        raise
    except Exception as error:
        summary = f"the check itself failed: {type(error).__name__}: {error}"
        return Finding(id, kind_of(id), Status.DIFFERS, summary)


def kind_of(id: str) -> Kind:
    """Return the kind of an id PAPER.KIND...: "table", "check", or "claim" for all others."""
    kind = id.split(".")[1]
    if kind.startswith("table"):
        return "table"
    return "check" if kind == "check" else "claim"


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Set torch's number of threads in this context; None leaves it unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def progress(console: Console) -> Iterator[Watch]:
    """Show a progress bar; running work reports its progress to the yielded function."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as bars:
        task = bars.add_task("exact checks")

        def watch(name: str, done: int, of: int) -> None:
            bars.update(task, description=name, completed=done, total=of)

        yield watch
