"""Write each package's RESULTS.md, and the numbers of READMEs and docs/.

    python tools/check_results.py [--figures]

Measured numbers there stand before a comment `<!-- SOURCE: REFERENCE -->`, by which they are
written (`mezzo_core.reproduction.markdown.evaluate`). In the workspace's README and in docs/
sources begin with the package, `rat/nvidia-h200/...`. With `--figures`, a figure that is missing or
shows other numbers is drawn, and linked in docs/. A figure keeps the checksum of its result.
"""

import hashlib
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mezzo_core.reproduction.figures import draw_result, model_names
from mezzo_core.reproduction.markdown import results_markdown, write_numbers
from mezzo_core.reproduction.measurement import Measurement, read_results
from mezzo_core.reproduction.reproduce import Reproduction
from PIL import Image

ROOT = Path(__file__).parents[1]
PRINTED = "src/*/reproduction/published.toml"
PACKAGES = sorted(path.parents[3] for path in ROOT.glob(f"packages/*/{PRINTED}"))
SHARED = ROOT / "packages/core"
"""Has results of several packages together, and no paper."""
FOLDERS = (*PACKAGES, SHARED, ROOT)
CHECKSUM = "Result"
"""The name of a figure's checksum in its file."""


def documents(folder: Path) -> dict[Path, str]:
    """Return the README and the pages of docs/, and for a package RESULTS.md, as they should be."""
    found = sources(folder)
    pages = (folder / "README.md", *site_pages(folder))
    texts = {page: write_numbers(page.read_text(encoding="utf-8"), found) for page in pages}
    if folder == ROOT:
        return texts
    told: tuple[Any, ...] = ()
    if folder in PACKAGES:
        paper = reproduction(folder)
        told = (paper.published, paper.committed())
    name = f"mezzo-{folder.name.replace('_', '-')}"
    texts[folder / "RESULTS.md"] = results_markdown(folder / "results", name, *told)
    return texts


def site_pages(folder: Path) -> list[Path]:
    """Return the pages of docs/ that are not links to documents elsewhere; a package has none."""
    return [page for page in folder.glob("docs/**/*.md") if not page.is_symlink()]


def sources(folder: Path) -> dict[str, Measurement]:
    """Return the results that a README's numbers come from."""
    if folder != ROOT:
        return read_results(folder / "results")
    every = {found.parent.name: read_results(found) for found in ROOT.glob("packages/*/results")}
    return {f"{package}/{name}": ours for package, s in every.items() for name, ours in s.items()}


def reproduction(package: Path) -> Reproduction:
    """Return the package's paper."""
    (path,) = package.glob(PRINTED)
    paper: Reproduction = import_module(f"{path.parts[-3]}.reproduction.claims").REPRODUCTION
    return paper


def figures(package: Path) -> Iterator[tuple[Measurement, Path, str]]:
    """Yield each result, its figure's path, and the checksum that the figure should have."""
    for ours in read_results(package / "results").values():
        if ours.kind != "timings":
            content = (package / "results" / f"{ours.source}.json").read_bytes()
            figure = package / "results" / f"{ours.source}.png"
            yield ours, figure, hashlib.sha256(content).hexdigest()


def drawn_from(figure: Path) -> str | None:
    """Return the checksum of the result that a figure shows; None if it has none or is missing."""
    if not figure.exists():
        return None
    with Image.open(figure) as picture:
        return picture.info.get(CHECKSUM)


def draw_figures(package: Path) -> None:
    """Draw the figures that do not show their results."""
    found = list(figures(package))
    names = model_names(reproduction(package).published, [ours for ours, *_ in found])
    for ours, path, checksum in found:
        if drawn_from(path) != checksum:
            draw_result(ours, path, names, metadata={CHECKSUM: checksum})


def link_figures(package: Path) -> None:
    """Put a link to each figure beside the package's results in docs/, where pages show it."""
    for _, figure, _ in figures(package):
        link = ROOT / "docs/results" / package.name / figure.relative_to(package)
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(figure, link.parent))


if __name__ == "__main__":
    for package in PACKAGES if "--figures" in sys.argv else ():
        draw_figures(package)
        link_figures(package)
    for folder in FOLDERS:
        for path, text in documents(folder).items():
            path.write_text(text, encoding="utf-8")
