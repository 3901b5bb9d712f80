"""Reproduce every paper at the scale of this machine: `hatch run reproduce`.

    python tools/reproduce.py [--scale SCALE] [--out FOLDER]

The report, its figures and the trained models go to `reports/`; a second run replaces them. A paper
without a scale of the given name takes its usual one.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from mezzo_core.errors import UserError
from mezzo_core.papers import PaperReport
from mezzo_core.reproduction.flow import ReproducePaper, report_papers
from mezzo_gsa import reproduce as gsa
from mezzo_rat import reproduce as rat
from rich.console import Console

PAPERS = (rat, gsa)
SCALES = tuple(dict.fromkeys(scale for paper in PAPERS for scale in paper.SCALES))


def main() -> int:
    """Run all papers; return 0, or 2 when the user can mend what went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", choices=SCALES, default=SCALES[0])
    parser.add_argument("--out", type=Path, default=Path("reports"))
    arguments = parser.parse_args()
    try:
        papers = [at_known_scale(paper) for paper in PAPERS]
        report_papers(papers, None, arguments.scale, arguments.out)
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, style="red", soft_wrap=True)
        return 2
    return 0


def at_known_scale(paper: ModuleType) -> ReproducePaper:
    """Return what reproduces a paper, at its first scale where it has none of the name."""

    def reproduce(only: Sequence[str] | None, scale: str, out: Path) -> PaperReport:
        known = scale if scale in paper.SCALES else paper.SCALES[0]
        return paper.reproduce_paper(only, known, out)

    return reproduce


if __name__ == "__main__":
    sys.exit(main())
