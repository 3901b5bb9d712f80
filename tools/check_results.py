"""Write each package's RESULTS.md, and the tables in the READMEs: `python tools/check_results.py`.

A table in a README stands between `<!-- table MACHINE/NAME -->` (in the workspace's README
`<!-- table PACKAGE/MACHINE/NAME -->`) and `<!-- end of table -->`. With `--figures`, the figures
that are missing beside the result files are drawn.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from mezzo_core.papers.figures import draw_result, model_names
from mezzo_core.papers.markdown import results_markdown, table
from mezzo_core.papers.measurement import Measurement, printed_measurement, read_results
from mezzo_core.papers.published import Published, load_published
from mezzo_core.papers.tables import measured_grid

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/results"))
TABLE = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main(figures: bool) -> None:
    """Write the documents of every package that has results, and draw missing figures if asked."""
    for package in PACKAGES:
        if figures:
            draw_missing(package)
        for path, text in documents(package).items():
            path.write_text(text, encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(updated(readme, sources(ROOT)), encoding="utf-8")


def documents(package: Path) -> dict[Path, str]:
    """Return the texts of a package's RESULTS.md and README.md."""
    readme, title = package / "README.md", f"mezzo-{package.name}"
    results = results_markdown(package / "results", title, published(package))
    return {package / "RESULTS.md": results, readme: updated(readme, sources(package))}


def sources(folder: Path) -> dict[str, Measurement]:
    """Return what a README's numbers come from: results, and the paper's tables and claims."""
    if folder == ROOT:
        every = {package.name: sources(package) for package in PACKAGES}
        return {f"{name}/{key}": s for name, found in every.items() for key, s in found.items()}
    paper = published(folder)
    printed = {each.id: printed_measurement(each) for each in (*paper.tables, *paper.claims)}
    return printed | read_results(folder / "results")


def updated(readme: Path, sources: Mapping[str, Measurement]) -> str:
    """Return the text of a README with its tables as the results say."""

    def write(match: re.Match[str]) -> str:
        before, name, after = match.groups()
        return "\n".join([f"{before}", *table(measured_grid(sources[name])), after])

    return TABLE.sub(write, readme.read_text(encoding="utf-8"))


def published(package: Path) -> Published:
    """Return what the package's paper says."""
    (path,) = package.glob("src/*/published.toml")
    return load_published(path)


def draw_missing(package: Path) -> None:
    """Draw the figures of the result files that have none."""
    results = read_results(package / "results")
    for ours in results.values():
        path = package / "results" / f"{ours.source}.png"
        if ours.kind != "timings" and not path.exists():
            draw_result(ours, path, model_names(published(package), results.values()))


if __name__ == "__main__":
    main(figures="--figures" in sys.argv[1:])
