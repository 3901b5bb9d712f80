"""Rerun the paper's tables and claims at the scale of this machine, and report what came out."""

from collections.abc import Sequence
from pathlib import Path

from mezzo_core.papers import (
    Finding,
    PaperReport,
    Published,
    load_bench,
    load_experiments,
    load_published,
    prepare_folder,
)
from mezzo_core.reproduction.evidence import Once, Trainings
from mezzo_core.reproduction.figures import layer_costs, sample_text, training_figures
from mezzo_core.reproduction.flow import known_ids, known_scale, progress, report_papers, threads
from rich.console import Console

from mezzo_gsa.recipes import PAPER_NAMES, RECIPES
from mezzo_gsa.reproduction.limits import CHECKS
from mezzo_gsa.reproduction.scale import MODELS
from mezzo_gsa.reproduction.scale import SCALES as _SCALES
from mezzo_gsa.reproduction.tables import find_all

SCALES = tuple(_SCALES)
"""The names that `--scale` takes, the default first."""

CHOICE = (
    "Learning rate, batch and warm-up were chosen for the tiny models of mezzo-rat, not for these. "
    "Orders at this size depend on how gates start: constant ones start with memories of 2 to "
    "2,048 tokens, gates that look at the token with about twelve and all alike, which over so few "
    "steps outweighs what they see. So few tokens say little about larger models."
)
"""How the hyperparameters of the tiny trainings were chosen; the report prints this."""


def reproduce(only: Sequence[str] | None, scale: str, out: Path) -> list[Finding]:
    """Rerun tables, claims and checks, and write report.md, .html and .json into `out`.

    The tiny models stay in `out/gsa/runs`, where `mezzo-gsa generate` can use them. Results of an
    earlier reproduction in `out` are replaced.

    Args:
        only: ids of tables, claims or checks; None or empty means all.
        scale: one of SCALES.
        out: the report's folder; it is made if needed.

    Raises:
        UserError: if an id or the scale is unknown, or `out` cannot be written.
    """
    (report,) = report_papers([reproduce_paper], only, scale, out)
    return list(report.findings)


def reproduce_paper(only: Sequence[str] | None, scale: str, out: Path) -> PaperReport:
    """Do what `reproduce` does, but return the report and do not write it."""
    published = read_published()
    wanted = known_ids(published, CHECKS, only)
    chosen = known_scale(_SCALES, scale)
    experiments = load_experiments(results_folder())
    folder = prepare_folder(out, "gsa")
    figures = folder / "figures"
    with threads(chosen.threads), progress(Console(stderr=True)) as watch:
        models = {name: recipe() for name, recipe in MODELS.items()}
        trainings = Trainings(models, chosen.budget, folder / "runs", Once(watch))
        findings = find_all(published, trainings, wanted, experiments)
        watch("figures", 1, 1)
        layers = {name: RECIPES[f"1p3b_{a}"]().model.mixers[0] for a, name in PAPER_NAMES.items()}
        costs = layer_costs(layers, 2048, figures / "costs.png", "the 1.3B models, C = 2048, bf16")
        return PaperReport(
            name="gsa",
            published=published,
            findings=findings,
            figures=[*training_figures(trainings, figures), costs],
            samples=sample_text(trainings, "GSA", chosen.sample_tokens),
            bench=load_bench(results_folder()),
            settings=(trainings.setting, CHOICE) if trainings.done else (),
        )


def read_published() -> Published:
    """Return the paper's tables and claims."""
    return load_published(Path(__file__).with_name("published.toml"))


def results_folder() -> Path:
    """Return the folder of committed results in a checkout; a wheel has no such folder."""
    return Path(__file__).parents[2] / "results"
