"""Write each package's RESULTS.md, and the tables in the READMEs: `python tools/check_results.py`.

A README's table stands between `<!-- table MACHINE/NAME -->` and `<!-- end of table -->`; in the
workspace's README, PACKAGE/MACHINE/NAME. With `--figures`, figures of results that are missing or
of other numbers are drawn: each keeps the checksum of its result.
"""

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mezzo_core.papers.figures import draw_result, model_names
from mezzo_core.papers.markdown import results_markdown, table
from mezzo_core.papers.measurement import Measurement, printed_measurement, read_results
from mezzo_core.papers.published import Claim, Published, Table, load_published
from mezzo_core.papers.tables import measured_grid
from PIL import Image

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parents[2] for path in ROOT.glob("packages/*/src/*/published.toml"))
CHECKSUM = "Result"
"""The name of a figure's checksum in its file."""
TABLE = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def documents(folder: Path) -> dict[Path, str]:
    """Return the README, and for a package RESULTS.md, as they should be."""
    readme, found = folder / "README.md", sources(folder)

    def write(match: re.Match[str]) -> str:
        grid = measured_grid(found[match[2]])
        return "\n".join((match[1], *table(grid), match[3]))

    texts = {readme: TABLE.sub(write, readme.read_text(encoding="utf-8"))}
    if folder != ROOT:
        path, title = folder / "results", f"mezzo-{folder.name.replace('_', '-')}"
        texts[folder / "RESULTS.md"] = results_markdown(path, title, published(folder))
    return texts


def sources(folder: Path) -> dict[str, Measurement]:
    """Return what a README's numbers come from: the results, and the paper's tables and claims."""
    if folder == ROOT:
        every = {f"{package.name}/": sources(package) for package in PACKAGES}
        return {package + name: each for package, s in every.items() for name, each in s.items()}
    paper = published(folder)
    with_numbers: list[Table | Claim] = [*paper.tables, *(c for c in paper.claims if c.labels)]
    return {each.id: printed_measurement(each) for each in with_numbers} | read_results(
        folder / "results"
    )


def published(package: Path) -> Published:
    """Return what the package's paper says."""
    return load_published(next(package.glob("src/*/published.toml")))


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
    names = model_names(published(package), [ours for ours, *_ in found])
    for ours, path, checksum in found:
        if drawn_from(path) != checksum:
            draw_result(ours, path, names, metadata={CHECKSUM: checksum})


if __name__ == "__main__":
    for package in PACKAGES if "--figures" in sys.argv else ():
        draw_figures(package)
    for folder in (*PACKAGES, ROOT):
        for path, text in documents(folder).items():
            path.write_text(text, encoding="utf-8")
