"""Write each package's RESULTS.md, and the tables in the READMEs: `python tools/check_results.py`.

A README's table stands between `<!-- table MACHINE/NAME -->` and `<!-- end of table -->`; in the
workspace's README, PACKAGE/MACHINE/NAME. With `--figures`, missing figures of results are drawn.
"""

import re
import sys
from pathlib import Path

from mezzo_core.papers.figures import draw_result, model_names
from mezzo_core.papers.markdown import results_markdown, table
from mezzo_core.papers.measurement import Measurement, printed_measurement, read_results
from mezzo_core.papers.published import Claim, Published, Table, load_published
from mezzo_core.papers.tables import measured_grid

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/results"))
TABLE = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def documents(folder: Path) -> dict[Path, str]:
    """Return the README, and for a package RESULTS.md, as they should be."""
    readme, found = folder / "README.md", sources(folder)

    def write(match: re.Match[str]) -> str:
        grid = measured_grid(found[match[2]])
        return "\n".join((match[1], *table(grid), match[3]))

    texts = {readme: TABLE.sub(write, readme.read_text(encoding="utf-8"))}
    if folder != ROOT:
        path, title = folder / "results", f"mezzo-{folder.name}"
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


def draw_missing(package: Path) -> None:
    """Draw the figures of those result files that have none."""
    results = read_results(package / "results")
    names = model_names(published(package), results.values())
    for ours in results.values():
        path = package / "results" / f"{ours.source}.png"
        if ours.kind != "timings" and not path.exists():
            draw_result(ours, path, names)


if __name__ == "__main__":
    for package in PACKAGES if "--figures" in sys.argv else ():
        draw_missing(package)
    for folder in (*PACKAGES, ROOT):
        for path, text in documents(folder).items():
            path.write_text(text, encoding="utf-8")
